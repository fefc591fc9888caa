"""Cases that every kernel of an op must pass against the op's reference, one file an op."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rotaryquant.formats.codebook import CYCLE, FINE
from rotaryquant.formats.kv import BLOCK, StreamFormat
from rotaryquant.ops.quantize import reference as quantize_reference
from rotaryquant.ops.streams import Codec, PackedStream

GUARD = 64
GUARD_BYTE = 0xA5


@dataclass(frozen=True)
class Case:
    """One call of an op.

    run: kernel name -> outcome, from the same inputs each time. compare: (outcome, the reference's outcome),
    raises AssertionError.
    """

    name: str
    run: Callable[[str], Any]
    compare: Callable[[Any, Any], None]


def generator(name: str) -> torch.Generator:
    """Random numbers that depend on the case's name alone."""
    return torch.Generator().manual_seed(int.from_bytes(name.encode(), "little") % 2**31)


def boundary_distance(y: Tensor, codec: Codec) -> Tensor:
    """Distance of each √g·y_i/‖y‖ of a group from the nearest code boundary; same shape as y.

    Of a trellis: of the circle's closest coordinate from where it is rounded to the other of two integers.
    """
    z = y.double().unflatten(-1, (codec.groups, codec.scale_group))
    rms = z.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-300)
    if codec.bits == 8:
        step = z.abs().amax(-1, keepdim=True).clamp_min(1e-300) / 127
        fraction = (z / step + 0.5) % 1.0
        distance = torch.minimum(fraction, 1 - fraction) * step / rms
    elif codec.trellis:
        step = codec.unit / FINE
        fraction = (z / rms / step + 0.5) % 1.0
        circles = (torch.minimum(fraction, 1 - fraction) * step).unflatten(-1, (-1, CYCLE))
        distance = circles.amin(-1, keepdim=True).expand_as(circles).flatten(-2)
    else:
        distance = (z[..., None] / rms[..., None] - codec.boundaries.double()).abs().amin(-1)
    return distance.flatten(-2)


def assert_codes_equal(got: Tensor, want: Tensor, y: Tensor, codec: Codec) -> None:
    """Equal codes in the sense of DESIGN section 3; y are the rotated values that were coded."""
    different = got != want
    assert bool((boundary_distance(y, codec)[different] < 1e-5).all()), "codes differ away from any boundary"
    assert int(different.sum()) <= max(1, different.numel() // 10_000), "too many codes differ at boundaries"


def assert_scales_equal(got: Tensor, want: Tensor) -> None:
    """Within one unit in the last place of the 16-bit type."""
    assert got.dtype == want.dtype
    steps = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert bool((steps <= 1).all())


def boundaries_of(codec: Codec) -> Tensor:
    """Rows [n, width] with every boundary of the codec hit from just below and just above, and ties at zero."""
    if codec.bits == 8 or codec.trellis:
        return torch.zeros(0, codec.width)
    offsets = torch.cat([codec.boundaries + 1e-3, codec.boundaries - 1e-3, torch.zeros(1)])
    y = offsets.repeat(-(-codec.width // len(offsets)))[: codec.width]
    # two large coordinates bring the root mean square of each group to 1
    y = y.view(codec.groups, -1).clone()
    rest = codec.scale_group - y[:, 2:].square().sum(-1)
    y[:, 0], y[:, 1] = (rest / 2).clamp_min(0).sqrt(), -(rest / 2).clamp_min(0).sqrt()
    return y.view(1, -1)


def quantize_by_reference(y: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Codes and scales of y as the reference gives them."""
    return quantize_reference.run(y, codec)


class GuardedStream:
    """A packed stream of poisoned slots (0xFF codes, NaN scales) with guard bytes around each slab."""

    def __init__(
        self,
        stream_format: StreamFormat,
        num_blocks: int,
        heads: int,
        blocks_per_slab: int = 2,
        codec: Codec | None = None,
    ) -> None:
        codec = codec or Codec.from_format(stream_format)
        self._buffers: list[Tensor] = []
        codes, scales = [], []
        for _ in range(-(-num_blocks // blocks_per_slab)):
            shape = (blocks_per_slab, heads, BLOCK)
            codes.append(self._slab((*shape, codec.code_bytes), torch.uint8))
            scales.append(self._slab((*shape, codec.groups), codec.scale_dtype))
            scales[-1].fill_(torch.nan)
            codes[-1].fill_(0xFF)
        self.stream = PackedStream(codec, blocks_per_slab, codes, scales)

    def _slab(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.full((size + 2 * GUARD,), GUARD_BYTE, dtype=torch.uint8)
        self._buffers.append(buffer)
        return buffer[GUARD : GUARD + size].view(dtype).view(shape)

    def guards_intact(self) -> bool:
        """Whether no byte before or behind a slab has changed."""
        return all(
            bool((buffer[:GUARD] == GUARD_BYTE).all() and (buffer[-GUARD:] == GUARD_BYTE).all())
            for buffer in self._buffers
        )
