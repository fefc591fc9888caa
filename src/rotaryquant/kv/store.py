"""The bytes of one layer's packed keys and values: slabs that grow without copying what they hold."""

import math
import mmap

import torch
from torch import Tensor

from rotaryquant.formats.feedback import feedback_of
from rotaryquant.formats.fit import Fit
from rotaryquant.formats.kv import BLOCK, STRIP, StreamFormat
from rotaryquant.ops.append_packed import append_packed
from rotaryquant.ops.pack import seal, unpack, unseal
from rotaryquant.ops.quantize import dequantize
from rotaryquant.ops.rotate import Rotation, build_rotation, fitted_rotations, rotate
from rotaryquant.ops.streams import Codec, PackedStream, block_rows


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in memory of their own.

    On the CPU they come as pages from the system, not from the heap: slabs outlive the activations around them, and
    would leave the heap full of holes (a 16,384-token prompt grew by 245 MB for a cache of 26 MB).
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class StreamStore:
    """Packed rows of one stream (keys or values) of one layer.

    format: how rows are stored. rotation: of rows that are written. reading: of queries and sums that meet them, the
    same but for a fitted stream. packed: the slabs as ops read them. fit: the space that rows are coded in and what
    their errors cost there, by which codes are chosen, or None. error_gain: that cost over what it would be if each
    code were chosen for itself.
    """

    def __init__(
        self,
        stream_format: StreamFormat,
        layer: int,
        num_kv_heads: int,
        device: torch.device,
        slab_blocks: int,
        fit: Fit | None = None,
    ) -> None:
        self.format = stream_format
        self.num_kv_heads = num_kv_heads
        self.device = device
        self.fit = fit
        self.rotation: Rotation
        self.reading: Rotation
        if fit is None:
            self.rotation = self.reading = build_rotation(stream_format, layer, num_kv_heads, device=device)
        elif fit.shape != (num_kv_heads, stream_format.width):
            raise ValueError(f"layer {layer}: a fit of {fit.shape}, the rows are {num_kv_heads, stream_format.width}")
        else:
            self.rotation, self.reading = fitted_rotations(stream_format, layer, fit, device)
        fed = None if fit is None else feedback_of(stream_format, layer, fit)
        factors, self.error_gain = (None, 1.0) if fed is None else (torch.from_numpy(fed[0]).to(device), fed[1])
        self.packed = PackedStream(Codec.from_format(stream_format, device, factors), slab_blocks, [], [])

    def reserve(self, num_blocks: int) -> None:
        """Add slabs until block ids below `num_blocks` exist."""
        codec, size = self.packed.codec, self.packed.blocks_per_slab
        while len(self.packed.codes) * size < num_blocks:
            shape = (size, self.num_kv_heads, BLOCK)
            codes = _zeros((*shape, codec.code_bytes), torch.uint8, self.device)
            scales = _zeros((*shape, codec.groups), codec.scale_dtype, self.device)
            self.packed.codes.append(codes)
            self.packed.scales.append(scales)

    def append(
        self, x: Tensor, table: Tensor, src_begin: Tensor, counts: Tensor, dst_begin: Tensor, mean: Tensor | None
    ) -> int:
        """Pack rows of x into blocks; see `ops.append_packed`."""
        return append_packed(x, self.rotation, self.packed, table, src_begin, counts, dst_begin, mean)

    def copy_block(self, source: int, target: int, origin: "StreamStore | None" = None) -> None:
        """Copy one block's bytes within this store, or from `origin`."""
        for new, old in zip(block_rows(self.packed, target), block_rows((origin or self).packed, source), strict=True):
            new.copy_(old)

    def reopen(self, block: int, strip: int) -> None:
        """Turn a sealed strip of a block back into canonical rows, in place."""
        codes, _ = block_rows(self.packed, block)
        rows = codes[:, strip * STRIP : (strip + 1) * STRIP]
        rows.copy_(unseal(rows, self.format.bits, self.format.width, self.format.name))

    def canonical(self, block: int, filled: int) -> tuple[Tensor, Tensor]:
        """Canonical codes [num_kv_heads, filled, code_bytes] and scales of a block's first rows (copies)."""
        codes, scales = block_rows(self.packed, block)
        rows = unseal(codes[:, :filled], self.format.bits, self.format.width, self.format.name)
        return rows, scales[:, :filled].clone()

    def load_block(self, block: int, codes: Tensor, scales: Tensor) -> None:
        """Store canonical rows [num_kv_heads, filled, code_bytes] as a block, its full strips sealed."""
        filled = codes.shape[1]
        block_codes, block_scales = block_rows(self.packed, block)
        block_codes[:, :filled] = seal(codes, self.format.bits, self.format.width, self.format.name)
        block_scales[:, :filled] = scales

    def decode(self, blocks: list[int], count: int) -> Tensor:
        """Rows [0, count) in the original space, mean not added: fp32 [num_kv_heads, count, width]."""
        codec, parts = self.packed.codec, []
        for index, block in enumerate(blocks):
            filled = min(BLOCK, count - index * BLOCK)
            if filled > 0:
                codes, scales = self.canonical(block, filled)
                parts.append(dequantize(unpack(codes, codec.bits, codec.width), scales, codec))
        if not parts:
            return torch.zeros(self.num_kv_heads, 0, codec.width, device=self.device)
        return rotate(torch.cat(parts, 1)[None], self.reading, inverse=True)[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the slabs, by storage."""
        slabs = [*self.packed.codes, *self.packed.scales]
        return sum(slab.untyped_storage().nbytes() for slab in slabs)
