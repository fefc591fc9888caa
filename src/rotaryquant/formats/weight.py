"""The bytes of a packed weight matrix: codes, and a scale for every group of columns of a row.

A matrix [rows, width] multiplies inputs of `width` values. Row after row, its codes are a little-endian bit stream in
which column i holds its code at bit bits·i, and its scales are bf16, one for each `group` columns. No word holds parts
of two rows, so that matrices can be joined and split between rows, and stacks of them between experts.

What a code stands for (grid):
- normal: one of the 2^bits Lloyd-Max levels of a normal number, small integers times one unit;
- trellis: a level that depends on the code of the column before it too, 16 columns in a circle (formats.codebook);
- uniform: code - 2^(bits - 1), so that zero is a level.
The weight is scale · level. 8 bits are always uniform.

Where a matrix has factors f of its inputs (bf16, one a column), codes are of W / f, and inputs are multiplied by f
before they are rotated: errors of a column are then the smaller, the larger its inputs are (AWQ, arXiv 2306.00978).
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from rotaryquant.formats import codebook as codebooks
from rotaryquant.formats.rotation import Array, hadamard, splitmix64

#: Version of everything in this file; a reader refuses another one.
VERSION = 1

BITS = (2, 3, 4, 8)
GRIDS = ("normal", "trellis", "uniform")
GROUPS = (32, 64, 128)

#: Columns that share a scale at 8 bits, where one more bit of scale is a small share.
GROUP_OF_8 = 32

#: Columns that are rotated together at most: those of a group, so that what shares a scale looks alike.
MOST_ROTATED = 128


@dataclass(frozen=True)
class WeightFormat:
    """How one matrix is stored.

    width: inputs, the length of a row. bits: of a code. grid: of `GRIDS`. group: columns that share a scale. seed: of
    the signs with which inputs are rotated (`input_signs`), or None where they are taken as they are.
    """

    width: int
    bits: int
    grid: str
    group: int
    seed: int | None = None

    def __post_init__(self) -> None:
        for field, valid in (("bits", BITS), ("grid", GRIDS)):
            if (value := getattr(self, field)) not in valid:
                raise ValueError(f"{field}={value!r} is unknown; valid: {', '.join(map(str, valid))}")
        if self.bits == 8 and self.grid != "uniform":
            raise ValueError(f"grid={self.grid!r} at 8 bits: use uniform, whose error no other grid would lower")
        unit = codebooks.CYCLE if self.grid == "trellis" else 8
        if self.width < 8 or self.width % unit or self.group < 1 or self.width % self.group or self.group % unit:
            raise ValueError(
                f"width={self.width} and group={self.group}: a row must be whole groups, a group whole units of {unit}"
            )

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.width // self.group

    @property
    def code_bytes(self) -> int:
        """Bytes of codes in a row: width · bits / 8."""
        return self.width * self.bits // 8

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight, its share of the scale included."""
        return self.bits + 16 / self.group

    @property
    def classes(self) -> int:
        """Of a trellis, where a level depends on the code before it modulo this; 1 elsewhere."""
        return codebooks.TRELLISES[self.bits].classes if self.grid == "trellis" else 1

    @property
    def levels(self) -> tuple[int, ...]:
        """Integer levels, ascending codes; of a trellis those of code c after class b at b·2^bits + c."""
        if self.grid == "uniform":
            half = 1 << (self.bits - 1)
            return tuple(range(-half, half))
        return codebooks.codebook(_NORMAL_WIDTH, self.bits, "trellis" if self.grid == "trellis" else "scalar").levels

    @property
    def unit(self) -> float:
        """Scale of a group of normal numbers of variance 1."""
        if self.grid == "uniform":
            return _uniform_step(self.bits)
        return codebooks.codebook(_NORMAL_WIDTH, self.bits, "trellis" if self.grid == "trellis" else "scalar").unit

    @property
    def rotated(self) -> int:
        """Inputs that are rotated together: the largest power of two that divides the width, up to MOST_ROTATED."""
        return 1 if self.seed is None else min(self.width & -self.width, MOST_ROTATED)


#: Levels for columns of a weight are those for coordinates of a long vector.
_NORMAL_WIDTH = 128


@cache
def _uniform_step(bits: int) -> float:
    """Step of a uniform grid with zero among its levels that leaves normal numbers the least squared error."""
    half = 1 << (bits - 1)
    levels = np.arange(-half, half, dtype=np.float64)
    low, high = 0.5 / half, 4.0 / half
    while high - low > 1e-6:  # the error has one minimum
        third = (high - low) / 3
        a, b = (codebooks.mean_squared_error(_NORMAL_WIDTH, step * levels) for step in (low + third, high - third))
        low, high = (low, high - third) if a < b else (low + third, high)
    return (low + high) / 2


def fit(width: int, bits: int, grid: str, group: int, seed: int | None) -> WeightFormat | None:
    """The format nearest to the one that is asked for that a row of `width` can have, or None.

    A group that does not divide the row gives way to the largest smaller one that does; 8 bits take GROUP_OF_8.
    """
    if bits == 8:
        grid, group = "uniform", min(group, GROUP_OF_8)
    unit = codebooks.CYCLE if grid == "trellis" else 8
    group = math.gcd(group, width)
    return WeightFormat(width, bits, grid, group, seed) if group >= min(unit, width) and group % unit == 0 else None


def input_signs(width: int, seed: int) -> Array:
    """±1 for each input [width], drawn from the seed (SplitMix64, the top bit)."""
    draws = splitmix64(seed, width)
    return np.where(draws >> np.uint64(63), -1.0, 1.0)


def input_rotation(weight: WeightFormat) -> Array | None:
    """R [width, width] of y = x·R, orthogonal: signs, then Hadamard matrices of `rotated` columns; None for none.

    A matrix W is stored as W·R, since x·Wᵀ = (x·R)·(W·R)ᵀ.
    """
    if weight.seed is None:
        return None
    block = hadamard(weight.rotated)
    rotation: Array = input_signs(weight.width, weight.seed)[:, None] * np.kron(
        np.eye(weight.width // weight.rotated), block
    )
    return rotation
