"""Codebooks for one coordinate of a uniform unit vector, computed from its density, and one for a trellis of them.

A coordinate t of a uniform unit vector in R^d has density proportional to (1 - t²)^((d-3)/2); everything
below is in the units of √d·t, so that its variance is 1.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Bits for which a codebook exists. 32 stores the fp32 value itself: the lossless codec that tests use.
BITS = (2, 3, 4, 8, 32)

#: How codes become levels: each alone, or each together with the one before it.
QUANTIZERS = ("scalar", "trellis")

#: Columns that make a circle of a trellis: before the first comes the last.
CYCLE = 16

#: Steps to a level's own in which a trellis counts errors, so that every kernel finds the same path.
FINE = 4


@dataclass(frozen=True)
class Trellis:
    """Levels for values of variance 1, found by Lloyd's algorithm on circles of normal numbers.

    classes: the code before matters modulo this. levels: of code c after class b at b·2^bits + c, in steps of `unit`.
    error: mean squared error that they leave.
    """

    classes: int
    levels: tuple[int, ...]
    unit: float
    error: float


#: By bits; tests/formats/test_codebook.py has one round of the algorithm. They leave .78, .65 and .67 of the error of
#: as many levels that stand alone.
# fmt: off
TRELLISES = {
    2: Trellis(4, (
        -124,  10,  77, -45,
          74, -30,  20, -84,
           9, 124, -28,  49,
         -45,  49, -81,   0,
    ), 0.017062223726703275, 0.091549),
    3: Trellis(8, (
        -110,  10, -41,  49,  -6, -66,  26, -25,
          52,  -1, -62,  29, -19,  76,  12, -43,
          30, -14,  87,  14, -33,  50,  -1, -89,
          13, -31,  44,  -1, -53,  27, -15,  64,
          -4, -52,  22, -17,  60,   9, -32,  36,
         -22, 109,   5, -44,  37,  -8, -68,  18,
         -39,  40, -10, -79,  20, -24,  61,   3,
         -60,  22, -25,  77,   5, -42,  41, -11,
    ), 0.026232424649325285, 0.022415),
    4: Trellis(4, (
        -109,  -15,   26,  -57,   -5,   36,  -41,    3,   50,  -30,   11,   77,  -21,   18,  -77,  -10,
          28,  -51,   -2,   42,  -35,    5,   58,  -25,   13,  110,  -16,   22,  -64,   -9,   34,  -44,
           0,   46,  -30,   10,   69,  -21,   18,  -89,  -13,   26,  -54,   -5,   36,  -40,    5,   54,
         -28,   11,   90,  -16,   22,  -68,   -9,   31,  -47,   -1,   43,  -35,    6,   63,  -22,   16,
    ), 0.027750776030800558, 0.0063852),
}
# fmt: on

_GRID_CELLS = 100_000
_LEVEL_WIDTH = 128  # the integer levels are chosen once, at this width; only their unit follows the width


@dataclass(frozen=True)
class Codebook:
    """Levels c_k = unit · levels[k], ascending; a value t takes the highest k with boundaries[k-1] <= t.

    levels: small integers that fit int8, so that products of codes with int8 queries are exact.
    unit: size of one integer step in units of the row's root mean square.
    boundaries: midpoints between levels times unit; ties go up. Empty for 8 and 32 bits.

    Of a trellis, `levels` are those of a `Trellis`. There are no boundaries: the codes of a circle of 16 columns are
    chosen together (`ops/quantize`).
    """

    bits: int
    width: int
    levels: tuple[int, ...]
    unit: float
    boundaries: tuple[float, ...]


@cache
def _density(width: int) -> tuple[Array, Array, Array]:
    """Edges x of √d·t, and the running sums of density and of density·x up to each edge (midpoint rule)."""
    edges = np.linspace(-1.0, 1.0, _GRID_CELLS + 1)
    t = (edges[1:] + edges[:-1]) / 2
    weight = (1.0 - t * t) ** ((width - 3) / 2)
    weight /= weight.sum()
    mass = np.concatenate([[0.0], np.cumsum(weight)])
    moment = np.concatenate([[0.0], np.cumsum(weight * t * math.sqrt(width))])
    return edges * math.sqrt(width), mass, moment


def _cells(width: int, levels: Array) -> tuple[Array, Array]:
    """Probability and first moment of each level's cell, cells split at midpoints."""
    x, mass, moment = _density(width)
    edges = np.concatenate([[x[0]], (levels[1:] + levels[:-1]) / 2, [x[-1]]])
    return np.diff(np.interp(edges, x, mass)), np.diff(np.interp(edges, x, moment))


def mean_squared_error(width: int, levels: Array) -> float:
    """E (√d·t - nearest level)² for a uniform unit vector in R^width."""
    mass, moment = _cells(width, levels)
    return float(1.0 - 2.0 * (moment * levels).sum() + (mass * levels**2).sum())


@cache
def lloyd_max(width: int, bits: int) -> tuple[float, ...]:
    """The 2^bits levels with least mean squared error (Lloyd 1982, Max 1960), ascending and symmetric."""
    levels = np.linspace(-2.2, 2.2, 2**bits)
    for _ in range(5000):
        mass, moment = _cells(width, levels)
        new = moment / mass
        new = (new - new[::-1]) / 2
        if np.abs(new - levels).max() < 1e-10:
            break
        levels = new
    return tuple(float(v) for v in levels)


def _best_unit(width: int, integers: Array, start: float) -> float:
    """Unit u that minimises the error of the levels u·integers, by alternating cells and least squares."""
    unit = start
    for _ in range(200):
        mass, moment = _cells(width, integers * unit)
        new = float((moment * integers).sum() / (mass * integers**2).sum())
        if abs(new - unit) < 1e-12:
            break
        unit = new
    return unit


@cache
def integer_levels(bits: int) -> tuple[int, ...]:
    """Integers of at most 127 whose multiples come closest to the Lloyd-Max levels, found by search.

    At 3 bits this is ±{13, 40, 71, 113}, 0.002% above the optimum.
    """
    optimum = np.array(lloyd_max(_LEVEL_WIDTH, bits))
    best: tuple[float, tuple[int, ...]] | None = None
    for largest in range(2 ** (bits - 1), 128):
        unit = optimum[-1] / largest
        integers = np.round(optimum / unit)
        if len(np.unique(integers)) < len(integers):
            continue
        unit = _best_unit(_LEVEL_WIDTH, integers, unit)
        error = mean_squared_error(_LEVEL_WIDTH, integers * unit)
        if best is None or error < best[0] - 1e-12:
            best = (error, tuple(int(v) for v in integers))
    assert best is not None
    return best[1]


@cache
def codebook(width: int, bits: int, quantizer: str = "scalar") -> Codebook:
    """The codebook of `bits` bits for vectors of `width` values.

    Up to 4 bits: integer Lloyd-Max levels. 8 bits: the uniform grid -127..127 whose step follows each row's
    largest magnitude, so it has no fixed unit. quantizer: of QUANTIZERS. Raises ValueError for other bits, and for a
    trellis of other bits than TRELLISES has or of a width that is no multiple of CYCLE.
    """
    if quantizer == "trellis":
        if bits not in TRELLISES or width % CYCLE:
            raise ValueError(f"a trellis has 2 to 4 bits and widths of multiples of {CYCLE}, not {bits} and {width}")
        return Codebook(bits, width, TRELLISES[bits].levels, TRELLISES[bits].unit, ())
    if bits not in BITS:
        raise ValueError(f"bits={bits} is unknown; valid: {', '.join(map(str, BITS))}")
    if bits == 8:
        return Codebook(8, width, tuple(range(-128, 128)), 0.0, ())
    if bits == 32:
        return Codebook(32, width, (), 0.0, ())
    levels = integer_levels(bits)
    integers = np.array(levels, dtype=np.float64)
    unit = _best_unit(width, integers, lloyd_max(width, bits)[-1] / levels[-1])
    boundaries = tuple(float(v) for v in (integers[1:] + integers[:-1]) / 2 * unit)
    return Codebook(bits, width, levels, unit, boundaries)


@cache
def relative_error(width: int, bits: int, quantizer: str = "scalar") -> float:
    """|k - k̂|² / |k|² expected of a packed row (the codebook's mean squared error)."""
    if quantizer == "trellis":
        return TRELLISES[bits].error
    if bits == 32:
        return 0.0
    if bits == 8:
        # the step follows the largest of `width` near-normal coordinates: about sqrt(2 ln width) deviations
        step = math.sqrt(2.0 * math.log(width)) / 127.0
        return step * step / 12.0
    book = codebook(width, bits)
    return mean_squared_error(width, np.array(book.levels, dtype=np.float64) * book.unit)
