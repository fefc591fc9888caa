"""What the ops work on: a codec (how rows are coded), a stream of packed rows, and a view of a layer's cache.

All of it is tensors and numbers. Nothing here allocates, grows or decides; `kv/` owns that.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rotaryquant.formats.codebook import TRELLISES
from rotaryquant.formats.kv import BLOCK, STRIP, StreamFormat
from rotaryquant.ops.rotate import Rotation

SCALE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False, slots=True)
class Codec:
    """Tables of one stream's quantiser on one device.

    layout: of sealed strips, "key" or "value". levels: fp32 [classes · 2^bits] (256 entries -128..127 at 8 bits, empty
    at 32). boundaries: fp32 [2^bits - 1] in units of the group's root mean square, empty at 8 and 32 bits and for a
    trellis. classes: of a trellis, where a level depends on the code before it modulo this; 1 elsewhere. feedback:
    fp32 [num_kv_heads, width, width], what the error of a column adds to those of later blocks before they are coded
    (formats.feedback), or None; only writers look at it.
    """

    layout: str
    width: int
    bits: int
    scale_rule: str
    scale_group: int
    scale_dtype: torch.dtype
    unit: float
    levels: Tensor
    boundaries: Tensor
    classes: int = 1
    feedback: Tensor | None = None

    @property
    def trellis(self) -> bool:
        """Whether codes are chosen together."""
        return self.classes > 1

    @property
    def groups(self) -> int:
        """Scales per row."""
        return self.width // self.scale_group

    @property
    def code_bytes(self) -> int:
        """Bytes of codes per row."""
        return self.width * self.bits // 8

    @classmethod
    def from_format(
        cls, stream: StreamFormat, device: torch.device | str = "cpu", feedback: Tensor | None = None
    ) -> "Codec":
        """Tables for `stream` on `device`. Raises ValueError for feedback where a row has several scales."""
        if feedback is not None and stream.groups > 1:
            raise ValueError(f"feedback needs one scale a row, not scale_group={stream.scale_group}")
        book = stream.codebook
        return cls(
            stream.name,
            stream.width,
            stream.bits,
            stream.scale_rule,
            stream.scale_group,
            SCALE_DTYPES[stream.scale_dtype],
            book.unit,
            torch.tensor(book.levels, dtype=torch.float32, device=device),
            torch.tensor(book.boundaries, dtype=torch.float32, device=device),
            TRELLISES[stream.bits].classes if stream.quantizer == "trellis" else 1,
            feedback,
        )


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class PackedStream:
    """Packed rows of one stream in slabs of equally many blocks; block b lies in slab b // blocks_per_slab.

    codes: uint8 [blocks_per_slab, num_kv_heads, 128, code_bytes] each.
    scales: scale_dtype [blocks_per_slab, num_kv_heads, 128, groups] each.
    """

    codec: Codec
    blocks_per_slab: int
    codes: list[Tensor]
    scales: list[Tensor]


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class CacheView:
    """One layer's cache as attention reads it. Positions are each row's own count: left pads have none.

    Tensors may be written between calls; which tensors they are never changes.

    block_table: int32 [batch, max_blocks], block of positions [128i, 128i + 128) in column i.
    packed_lens: int32 [batch], positions [0, packed_len) have packed rows; a strip of 32 is sealed iff all its
    positions are among them. seq_lens: int32 [batch], positions held in all, the newest queries included.
    key_rotation, value_rotation: of the packed rows. means: [batch, num_kv_heads, key_width], what was taken off
    the keys before their rotation, or None.
    num_sinks: first positions whose packed rows are masked because `dense_*` holds them exactly.
    dense_keys, dense_values: [batch, num_kv_heads, dense, width], exact rows (sinks, then the tail), or None.
    dense_positions: int32 [batch, dense], the position of each exact row; below 0 or from seq_len on it is unused.
    """

    keys: PackedStream
    values: PackedStream
    block_table: Tensor
    packed_lens: Tensor
    seq_lens: Tensor
    key_rotation: Rotation
    value_rotation: Rotation
    means: Tensor | None = None
    num_sinks: int = 0
    dense_keys: Tensor | None = None
    dense_values: Tensor | None = None
    dense_positions: Tensor | None = None


def block_rows(stream: PackedStream, block: int) -> tuple[Tensor, Tensor]:
    """Codes [num_kv_heads, 128, code_bytes] and scales [num_kv_heads, 128, groups] of one block (views)."""
    slab, index = divmod(block, stream.blocks_per_slab)
    return stream.codes[slab][index], stream.scales[slab][index]


__all__ = ["BLOCK", "SCALE_DTYPES", "STRIP", "CacheView", "Codec", "PackedStream", "block_rows"]
