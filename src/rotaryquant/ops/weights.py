"""What the ops on weights work on: a codec (how a matrix is coded) and a packed matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rotaryquant.formats.weight import WeightFormat


@dataclass(frozen=True, eq=False, slots=True)
class WeightCodec:
    """Tables of a weight format on one device.

    levels: fp32 [classes · 2^bits], what codes stand for, of a trellis after each class of the code before.
    small_levels: the same as int8, in the bytes of uint8.
    """

    format: WeightFormat
    levels: Tensor
    small_levels: Tensor

    @classmethod
    def from_format(cls, weight: WeightFormat, device: torch.device | str = "cpu") -> "WeightCodec":
        """Tables for `weight` on `device`."""
        levels = torch.tensor(weight.levels, dtype=torch.float32, device=device)
        return cls(weight, levels, levels.to(torch.int8).view(torch.uint8))


@dataclass(frozen=True, eq=False, slots=True)
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

    def __getitem__(self, index: int) -> "PackedWeight":
        """One matrix of a stack, as a view."""
        return PackedWeight(self.codec, self.codes[index], self.scales[index])
