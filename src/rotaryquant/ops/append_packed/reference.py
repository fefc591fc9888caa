"""The fused write as its separate steps, through their references."""

import torch
from torch import Tensor

from rotaryquant.ops.pack import reference as pack
from rotaryquant.ops.quantize import reference as quantize
from rotaryquant.ops.rotate import Rotation
from rotaryquant.ops.rotate import reference as rotate
from rotaryquant.ops.streams import BLOCK, STRIP, PackedStream, block_rows


def unsupported(
    x: Tensor,
    rotation: Rotation,
    stream: PackedStream,
    block_table: Tensor,
    src_begin: Tensor,
    counts: Tensor,
    dst_begin: Tensor,
    mean: Tensor | None,
) -> str | None:
    """Takes every call."""
    return None


def run(
    x: Tensor,
    rotation: Rotation,
    stream: PackedStream,
    block_table: Tensor,
    src_begin: Tensor,
    counts: Tensor,
    dst_begin: Tensor,
    mean: Tensor | None,
) -> int:
    """Batch row by batch row, block by block."""
    codec = stream.codec
    for b, (begin, count, start) in enumerate(
        zip(src_begin.tolist(), counts.tolist(), dst_begin.tolist(), strict=True)
    ):
        rows = x[b : b + 1, :, begin : begin + count].float()
        finite = torch.isfinite(rows).all(-1).all(-1)[0]
        if not bool(finite.all()):
            return b * x.shape[1] + int((~finite).nonzero()[0])
        if mean is not None:
            rows = rows - mean[b, :, None, :]
        codes, scales = quantize.run(rotate.run(rows, rotation, False), codec)
        packed = pack.run("pack", codes, codec.bits, codec.width, codec.layout)[0]
        if not bool(torch.isfinite(scales.float()).all()):
            bad = (~torch.isfinite(scales.float())).nonzero()[0]
            return b * x.shape[1] + int(bad[1])
        done = 0
        while done < count:
            block, offset = divmod(start + done, BLOCK)
            take = min(BLOCK - offset, count - done)
            block_codes, block_scales = block_rows(stream, int(block_table[b, block]))
            block_codes[:, offset : offset + take] = packed[:, done : done + take]
            block_scales[:, offset : offset + take] = scales[0, :, done : done + take]
            strips = slice(offset // STRIP * STRIP, (offset + take) // STRIP * STRIP)  # full now, and not before
            block_codes[:, strips] = pack.run("seal", block_codes[:, strips], codec.bits, codec.width, codec.layout)
            done += take
    return -1
