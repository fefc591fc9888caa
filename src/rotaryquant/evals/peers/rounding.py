"""Roundings that several peers share. All take and return fp32 tensors; scales are rounded to what would be stored."""

from collections.abc import Callable

import torch
from torch import Tensor

from rotaryquant.evals.simulated import LayerCodec, Place
from rotaryquant.formats.codebook import lloyd_max
from rotaryquant.formats.kv import StreamFormat
from rotaryquant.ops.rotate import Rotation, build_rotation, rotate


class EightBits:
    """Rows at 8 bits, for peers whose own codes do not go there: uniform, step and zero per row."""

    def __init__(self, width: int) -> None:
        self.key_bits = self.value_bits = 8 + 32 / width

    def keys(self, rows: Tensor) -> Tensor:
        """Keys as they come back."""
        return ranged(rows, 8, rows.shape[-1])

    values = keys


def at_most_four(make: Callable[[int, Place], LayerCodec], bits: int, place: Place) -> LayerCodec:
    """A peer's codec at up to 4 bits, plain integers at 8."""
    return make(bits, place) if bits <= 4 else EightBits(place.width)


def half(x: Tensor) -> Tensor:
    """What 16-bit floats keep of x."""
    return x.half().float()


def ranged(rows: Tensor, bits: int, group: int, *, clip: float = 1.0) -> Tensor:
    """Asymmetric uniform codes per `group` consecutive values of the last dimension, smallest and step in fp16.

    clip: share of the range that the codes cover. Stored bits a value: bits + 32 / group.
    """
    parts = rows.reshape(*rows.shape[:-1], -1, group)
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2 * clip
    low, step = half(middle - reach), half(2 * reach / (2**bits - 1))
    codes = ((parts - low) / torch.where(step > 0, step, 1.0)).round().clamp(0, 2**bits - 1)
    return (codes * step + low).view(rows.shape)


def nearest(rows: Tensor, levels: Tensor) -> Tensor:
    """The closest of ascending `levels` to each value."""
    return levels[torch.bucketize(rows, (levels[1:] + levels[:-1]) / 2)]


def unit_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows at root mean square 1, and what they must be multiplied with: norm / √width, its norm in fp16."""
    root = rows.shape[-1] ** 0.5
    norm = half(rows.norm(dim=-1, keepdim=True))
    return rows / torch.where(norm > 0, norm, 1.0) * root, norm / root


def rotation(kind: str, place: Place, stream: str, *, signs: bool = True) -> Rotation:
    """One of ours (formats.rotation.KINDS), for peers that rotate: Hadamard or a dense random matrix."""
    asked = StreamFormat(stream, place.width, 3, "norm", kind, signs=signs)
    return build_rotation(asked, place.index, place.num_kv_heads, device=place.device)


def level_table(place: Place, bits: int) -> Tensor:
    """Lloyd-Max levels for coordinates of rotated rows at root mean square 1, ascending: fp32 [2^bits]."""
    return torch.tensor(lloyd_max(place.width, bits), dtype=torch.float32, device=place.device)


def turned(rows: Tensor, by: Rotation, *, back: bool = False) -> Tensor:
    """Rows [num_kv_heads, rows, width] rotated, or rotated back."""
    return rotate(rows[None], by, inverse=back)[0]
