"""The fused write: subtract the mean, rotate, quantize, pack, and store into cache blocks."""

from torch import Tensor

from rotaryquant.ops import dispatch
from rotaryquant.ops.rotate import Rotation
from rotaryquant.ops.streams import PackedStream

KERNELS = ("cpu", "reference")


def append_packed(
    x: Tensor,
    rotation: Rotation,
    stream: PackedStream,
    block_table: Tensor,
    src_begin: Tensor,
    counts: Tensor,
    dst_begin: Tensor,
    mean: Tensor | None = None,
    *,
    kernel: str = "auto",
) -> int:
    """Write rows src_begin[b] .. src_begin[b] + counts[b] of row b of x at positions dst_begin[b] onwards.

    x: [batch, num_kv_heads, rows, width], any float dtype, last dimension contiguous.
    block_table: int32 [batch, max_blocks]; src_begin, counts, dst_begin: int32 [batch], on the CPU.
    mean: fp32 [batch, num_kv_heads, width] subtracted before the rotation, or None.
    Positions below dst_begin[b] must be packed already. A strip of 32 rows that this call fills is left sealed, any
    other that it touches open. Returns batch_row · num_kv_heads + head of the first non-finite row met, or
    -1; the blocks' contents are then unspecified from dst_begin on.
    """
    result: int = dispatch.run(
        "append_packed", kernel, x, rotation, stream, block_table, src_begin, counts, dst_begin, mean
    )
    return result
