"""The packed part of a layer: which row holds which blocks, and the bytes in them."""

import torch
from torch import Tensor

from rotaryquant.errors import NonFiniteError
from rotaryquant.formats.fit import Fit
from rotaryquant.formats.kv import BLOCK, STRIP, StreamFormat
from rotaryquant.kv.blocks import BlockPool, Row, slab_blocks
from rotaryquant.kv.store import StreamStore


class PackedRows:
    """Packed keys and values of a batch of sequences in one layer.

    layer: its number in the model, which seeds its rotations. max_tokens: if given, room for that many columns is
    taken at once and never grows. rows: pads, packed length and blocks of each sequence. keys, values: their bytes,
    None until something is packed. fits: the spaces that they are coded in, or None. means: bf16 [batch,
    num_kv_heads, key_width] removed from the keys, zero where none is. decompress_calls: how often rows were rebuilt
    (never by attention).
    """

    def __init__(self, layer: int, max_tokens: int | None = None) -> None:
        self.layer = layer
        self.max_tokens = max_tokens
        self.rows: list[Row] = []
        self.keys: StreamStore | None = None
        self.values: StreamStore | None = None
        self.means: Tensor | None = None
        self.decompress_calls = 0
        self.fits: tuple[Fit | None, Fit | None] = (None, None)
        self._pool = BlockPool()
        self._table = torch.zeros(0, 0, dtype=torch.int32)

    @property
    def batch_size(self) -> int:
        """Rows of the batch, 0 before the first update."""
        return len(self.rows)

    def all_staged(self) -> bool:
        """Whether everything that attention reads is staged: nothing lies in blocks."""
        for row in self.rows:  # noqa: SIM110 - every layer of every step asks: no generator
            if row.packed_len:
                return False
        return True

    def open_stores(
        self,
        key_format: StreamFormat,
        value_format: StreamFormat,
        num_kv_heads: int,
        device: torch.device,
        first_blocks: int,
    ) -> None:
        """Create the stores for packed rows in these formats; `first_blocks` of them are about to be used."""
        slab = slab_blocks(first_blocks)
        if self.max_tokens is not None:
            slab = len(self.rows) * -(-self.max_tokens // BLOCK)
        args = (self.layer, num_kv_heads, device, slab)
        self.keys = StreamStore(key_format, *args, self.fits[0])
        self.values = StreamStore(value_format, *args, self.fits[1])

    def take_blocks(self, ends: list[int]) -> None:
        """Make sure each row owns writable blocks up to its end, and publish the block table."""
        assert self.keys is not None
        assert self.values is not None
        copies = [pair for row, end in zip(self.rows, ends, strict=True) for pair in self._pool.writable(row, end)]
        for store in (self.keys, self.values):
            store.reserve(self._pool.num_blocks)
            for source, target in copies:
                store.copy_block(source, target)
        self._publish_table()

    def _publish_table(self) -> None:
        width = max((len(row.blocks) for row in self.rows), default=0)
        padded = [row.blocks + [0] * (width - len(row.blocks)) for row in self.rows]
        self._table = torch.tensor(padded, dtype=torch.int32).reshape(len(self.rows), width)

    def write(self, keys: Tensor, values: Tensor, start: int, begins: list[int], ends: list[int]) -> None:
        """Pack positions [begins, ends) of each row into its blocks.

        keys, values: [batch, num_kv_heads, columns, width], exact rows whose first column is column `start`.
        Raises NonFiniteError naming layer, head and batch row.
        """
        assert self.keys is not None
        assert self.values is not None
        spans = list(zip(self.rows, begins, ends, strict=True))
        counts = torch.tensor([end - begin for _, begin, end in spans], dtype=torch.int32)
        source = torch.tensor(
            [begin + row.pad - start if end > begin else 0 for row, begin, end in spans], dtype=torch.int32
        )
        target = torch.tensor(begins, dtype=torch.int32)
        means = self.means.float() if self.means is not None else None
        for store, x, what, mean in ((self.keys, keys, "keys", means), (self.values, values, "values", None)):
            bad = store.append(x, self._table, source, counts, target, mean)
            if bad >= 0:
                index, head = divmod(bad, store.num_kv_heads)
                raise NonFiniteError(
                    f"layer {self.layer}, KV head {head}, batch row {index}: the {what} hold NaN or infinity (or "
                    f"exceed the range of the scale); check the model's dtype and inputs"
                )

    def truncate(self, row: Row, seq_len: int) -> None:
        """Forget a row's packed positions from `seq_len` on; what stays is not coded again."""
        if not self._pool.truncate(row, seq_len):
            return
        index, filled = divmod(seq_len, BLOCK)
        assert self.keys is not None
        assert self.values is not None
        block = row.blocks[index]
        copy = self._pool.replace(row, index) if self._pool.is_shared(block) else None
        for store in (self.keys, self.values):
            if copy is not None:
                store.reserve(self._pool.num_blocks)
                store.copy_block(*copy)
            store.reopen(row.blocks[index], filled // STRIP)

    def select_rows(self, index: Tensor) -> None:
        """Keep rows `index` in that order; rows that repeat share blocks."""
        chosen = [self._pool.fork(self.rows[i]) for i in index.tolist()]
        for row in self.rows:
            self._pool.release_row(row)
        self.rows = chosen
        if self.means is not None:
            self.means = self.means.index_select(0, index.to(self.means.device))
        self._publish_table()

    def decode_keys(self, row: int) -> Tensor:
        """Packed keys of a batch row as attention means them, mean added: fp32 [num_kv_heads, packed, width]."""
        assert self.keys is not None
        self.decompress_calls += 1
        decoded = self.keys.decode(self.rows[row].blocks, self.rows[row].packed_len)
        return decoded if self.means is None else decoded + self.means[row, :, None, :].float()

    def decode_values(self, row: int) -> Tensor:
        """Packed values of a batch row, fp32 [num_kv_heads, packed, width]."""
        assert self.values is not None
        self.decompress_calls += 1
        return self.values.decode(self.rows[row].blocks, self.rows[row].packed_len)

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the slabs and means, by storage."""
        stores = [s.nbytes for s in (self.keys, self.values) if s is not None]
        return sum(stores) + (self.means.untyped_storage().nbytes() if self.means is not None else 0)
