"""What the ops on weights work on: a codec (how a matrix is coded), a packed matrix, and inputs as it wants them."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rotaryquant.formats.rotation import hadamard
from rotaryquant.formats.weight import WeightFormat, input_signs


@dataclass(frozen=True, eq=False, slots=True)
class WeightCodec:
    """Tables of a weight format on one device.

    levels: fp32 [classes · 2^bits], what codes stand for, of a trellis after each class of the code before.
    small_levels: the same as int8, in the bytes of uint8. input_factors: fp32 [width], signs over the root of how many
    columns are rotated together, or None where inputs are taken as they are.
    """

    format: WeightFormat
    levels: Tensor
    small_levels: Tensor
    input_factors: Tensor | None

    @classmethod
    def from_format(cls, weight: WeightFormat, device: torch.device | str = "cpu") -> "WeightCodec":
        """Tables for `weight` on `device`."""
        levels = torch.tensor(weight.levels, dtype=torch.float32, device=device)
        factors = None
        if weight.seed is not None:
            signs = torch.from_numpy(input_signs(weight.width, weight.seed) / math.sqrt(weight.rotated))
            factors = signs.to(device, torch.float32)
        return cls(weight, levels, levels.to(torch.int8).view(torch.uint8), factors)


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class PackedWeight:
    """A matrix or a stack of them, as `formats.weight` stores it.

    codes: uint8 [..., rows, width · bits / 8]. scales: bf16 or fp32 [..., rows, width / group].
    """

    codec: WeightCodec
    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        own = self.codec.format
        want = (*self.codes.shape[:-1], own.code_bytes), (*self.codes.shape[:-1], own.groups)
        if tuple(self.codes.shape) != want[0] or tuple(self.scales.shape) != want[1]:
            raise ValueError(
                f"codes {tuple(self.codes.shape)} and scales {tuple(self.scales.shape)} are not those of rows of "
                f"{own.width} at {own.bits} bits in groups of {own.group}: {want[0]} and {want[1]}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weights: [..., rows, width]."""
        return *self.codes.shape[:-1], self.codec.format.width

    @property
    def device(self) -> torch.device:
        """Of the tables; the tensors are expected there too."""
        return self.codec.levels.device

    def __getitem__(self, index: int) -> "PackedWeight":
        """One matrix of a stack, as a view."""
        return PackedWeight(self.codec, self.codes[index], self.scales[index])


def rotate_inputs(x: Tensor, weight: WeightFormat, *, inverse: bool = False) -> Tensor:
    """Inputs as a matrix of that format wants them: fp32 [..., width], or x itself where it takes them as they are.

    inverse: from the space of rotated inputs back (formats.weight.input_rotation; the same for all formats of a width
    and a seed, so that matrices with one input share it).
    """
    if weight.seed is None:
        return x
    signs, matrix = _rotation(weight.width, weight.seed, weight.rotated, x.device)
    blocks = (*x.shape[:-1], weight.width // weight.rotated, weight.rotated)
    if inverse:
        return (x.float().view(blocks) @ matrix.mT).flatten(-2) * signs
    return ((x.float() * signs).view(blocks) @ matrix).flatten(-2)


@lru_cache(maxsize=256)
def _rotation(width: int, seed: int, rotated: int, device: torch.device) -> tuple[Tensor, Tensor]:
    signs, matrix = torch.from_numpy(input_signs(width, seed)), torch.from_numpy(hadamard(rotated))
    return signs.float().to(device), matrix.float().to(device)


def round_inputs(x: Tensor, weight: WeightFormat) -> Tensor:
    """Rotated inputs as kernels of 8-bit products see them: fp32 [..., width].

    Each group of columns becomes integers, its largest 127 steps, rounded to nearest and ties to even. Of inputs like
    normal numbers that leaves 6e-5 of squared error, under a hundredth of what 4-bit weights have. Weights of 8 bits
    have less themselves, so that what is left is rounded once more, in steps of a 254th.
    """
    groups = x.float().view(*x.shape[:-1], weight.groups, weight.group)
    top = groups.abs().amax(-1, keepdim=True)
    scaled = groups * torch.where(top > 0, 127.0 / top, torch.zeros_like(top))
    whole = scaled.round()
    if weight.bits == 8:
        whole = whole + ((scaled - whole) * 254.0).round() / 254.0
    rounded: Tensor = whole * (top / 127.0)
    return rounded.flatten(-2)
