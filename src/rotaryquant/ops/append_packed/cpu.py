"""The fused write: each row is read once and its bytes are written once, sealed where its strip gets full."""

import torch
from torch import Tensor

from rotaryquant.ops import native
from rotaryquant.ops.native import missing as missing
from rotaryquant.ops.rotate import Rotation
from rotaryquant.ops.streams import PackedStream


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
    """Why the native kernel cannot take this call, or None."""
    return (
        native.rows_reason("x", x)
        or native.rotation_reason(rotation)
        or native.stream_reason("stream", stream)
        or native.not_on_cpu(
            block_table=block_table,
            src_begin=src_begin,
            counts=counts,
            dst_begin=dst_begin,
            mean=mean,
            feedback=stream.codec.feedback,
        )
    )


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
    """Write the rows; see the op's docstring. Raises ValueError where a range passes x, the table or the slabs."""
    table, begin, count, start = (t.contiguous() for t in (block_table, src_begin, counts, dst_begin))
    mean = None if mean is None else mean.float().contiguous()
    bad: int = native.module().append(
        x=x,
        rotation=native.rotation(rotation),
        stream=native.stream(stream),
        block_table=table,
        src_begin=begin,
        counts=count,
        dst_begin=start,
        mean=mean,
        feedback=stream.codec.feedback,
        threads=torch.get_num_threads(),
    )
    return bad
