"""One layer's cache: exact rows first, packed blocks behind them.

New tokens are staged exactly. Once they may be packed (never before their row's pads are known), they move into
blocks. `tail.packed_end` says which tokens are due; when they move is decided here alone:
- with a tail, due tokens are packed when the next token arrives; without one, at once;
- while a prompt is being read, its newest chunk stays exact; in deferred mode the whole prompt does.
"""

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotaryquant.config import KVCacheConfig
from rotaryquant.formats.codebook import relative_error
from rotaryquant.formats.kv import BLOCK
from rotaryquant.kv import heap, protect
from rotaryquant.kv.accounting import LayerBits
from rotaryquant.kv.blocks import Row
from rotaryquant.kv.dense import DenseRows
from rotaryquant.kv.modes import editable_tensors
from rotaryquant.kv.rows import PackedRows
from rotaryquant.kv.tail import next_packing, packed_end
from rotaryquant.ops.dispatch import Bound
from rotaryquant.ops.packed_attention import Options
from rotaryquant.ops.streams import CacheView

_log = logging.getLogger(__name__)


def _tensor(array: NDArray[np.float32] | NDArray[np.float64], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like)


class PackedLayer(PackedRows):
    """Keys and values of one full-attention layer for a batch of sequences.

    config: how to keep them. layer: its number in the model, which seeds its rotations. max_tokens: if given,
    room for that many columns is taken at the first update and never grows. slow: bool [key_width], coordinates
    that RoPE hardly turns, over which a mean may be removed; None for all.
    """

    def __init__(
        self, config: KVCacheConfig, layer: int, max_tokens: int | None = None, slow: Tensor | None = None
    ) -> None:
        super().__init__(layer, max_tokens)
        self.config = config
        self.fits = config.key_fit, config.value_fit
        self.slow = slow
        self.columns = 0  # padded length of the batch
        self.dense = DenseRows(config.sinks)
        self.finding: protect.Finding | None = None
        self.prefilling = False  # a prompt is declared as being read (deferred mode keeps all of it exact)
        self.pads_known = False
        self.exact_newest = False  # the newest columns belong to a prompt chunk
        self._fresh = 0  # columns of the newest update
        self._query_energy: Tensor | None = None  # running sum of |q|², [num_kv_heads]
        self._unmeasured: list[Tensor] = []  # queries still to be added to it
        self._query_rows = 0
        self._scale = 1.0
        self._key_noise: float | None = None  # known once the keys have a format
        self.prepared: tuple[Options, Bound] | None = None  # what attention on the view asks, and the op for it
        self._view: CacheView | None = None
        self._seq_lens: NDArray[np.int32] = np.zeros(0, np.int32)  # memory of the view's
        self._due = 0  # staged columns up to which nothing has to be packed, as far as is known
        self._step_shapes: tuple[torch.Size, torch.Size] | None = None  # of the last keys and values that were accepted

    # ---- what the model sees -------------------------------------------------------------------------------

    def update(self, keys: Tensor, values: Tensor) -> None:
        """Stage the keys and values of new columns.

        keys, values: [batch, num_kv_heads, columns, width] after RoPE. Raises ValueError where batch, heads or
        widths differ from what the layer holds, or `max_tokens` would be exceeded.
        """
        if (keys.shape, values.shape) != self._step_shapes or self.max_tokens is not None:
            self._check_shapes(keys, values)
            self._step_shapes = keys.shape, values.shape
        if not self.rows:
            self.rows = [Row() for _ in range(keys.shape[0])]
        prompt = self.prefilling or self.columns == 0
        if self.dense.end >= self._due and not (self.prefilling and self.config.prefill == "deferred"):
            self.pack_ready()
        self.exact_newest = prompt
        self.dense.append(keys, values)
        self._fresh = keys.shape[2]
        self.columns += self._fresh

    def settle(self, pads: list[int] | None) -> None:
        """Tell the layer the left pads of each row, after `update` and before `view`.

        Raises ValueError if they differ from those of earlier columns.
        """
        if pads is not None:
            self._settle_pads(pads)
        self.pads_known = True
        if not self.dense.placed:
            self._place()
        if not self.config.tail and not self.exact_newest:
            self.pack_ready()

    def _settle_pads(self, pads: list[int]) -> None:
        before = self.columns - self._fresh
        for index, pad in enumerate(pads):
            row = self.rows[index]
            if pad == row.pad:
                continue
            if row.pad < before:
                raise ValueError(
                    f"layer {self.layer}: attention_mask gives row {index} {pad} left pads, but the cache was filled "
                    f"with {row.pad}; pass the mask of the whole sequence, padded on the left"
                )
            row.pad = pad  # a row without tokens so far may still turn out to be padded further
            self.dense.placed = False
            self._due = 0

    def observe(self, queries: Tensor, scale: float) -> None:
        """Let protection see queries [batch, num_heads, rows, key_width] while a row waits for its first packing."""
        for row in self.rows:
            if row.packed_len == 0:
                break
        else:
            return
        self._unmeasured.append(queries.detach())
        self._scale = scale
        if queries.shape[2] > 1 or len(self._unmeasured) == BLOCK:  # steps of one token are measured together
            self._measure_queries()

    @editable_tensors
    def _measure_queries(self) -> None:
        if not self._unmeasured:
            return
        queries = torch.cat(self._unmeasured, 2)
        self._unmeasured = []
        batch, heads, rows, _ = queries.shape
        kv_heads = self.dense.staged()[0].shape[1]
        grouped = queries.float().view(batch, kv_heads, heads // kv_heads, rows, -1)
        if (fit := self.fits[0]) is not None:  # as they meet the codes
            grouped = grouped @ _tensor(fit.dual, grouped).mT[:, None]
        energy = grouped.square().sum((0, 3, 4)).amax(-1)
        self._query_energy = energy if self._query_energy is None else self._query_energy + energy
        self._query_rows += batch * rows

    def reconfigure(self, config: KVCacheConfig) -> None:
        """Keep rows differently from now on, with as many sinks. Raises ValueError once rows are packed."""
        if self.keys is not None or config.sinks != self.config.sinks:
            raise ValueError(f"layer {self.layer}: packed rows and sinks stay as they were made")
        self.config, self._due = config, 0
        self.fits = config.key_fit, config.value_fit

    def begin_prefill(self) -> None:
        """Declare that the updates to come are one prompt."""
        self.prefilling = True

    @editable_tensors
    def end_prefill(self) -> None:
        """The prompt is over: pack what may be packed."""
        self.prefilling = False
        self.exact_newest = False
        self.pack_ready()

    def seq_lens(self) -> list[int]:
        """Tokens of each row, its pads not counted."""
        return [max(0, self.columns - row.pad) for row in self.rows]

    @property
    def key_noise(self) -> float:
        """Relative squared error of packed keys by which attention corrects their logits, 0 for none."""
        if self.keys is None:
            return 0.0
        if self._key_noise is None:
            packed, correctable = self.keys.format, self.keys.format.bits <= 4 and self.keys.format.groups == 1
            error = relative_error(packed.width, packed.bits, packed.quantizer) if correctable else 0.0
            self._key_noise = self.config.correct * error * self.keys.error_gain
        return self._key_noise

    def view(self) -> CacheView:
        """What attention reads, until the next `update`. Only for a layer that has packed rows."""
        assert self.keys is not None
        assert self.values is not None
        held, view = self.dense, self._view
        # stores, means and packed lengths change with the table, values and positions with the exact keys
        if view is None or view.block_table is not self._table or view.dense_keys is not held.keys:
            self.prepared = None
            view = self._view = CacheView(
                self.keys.packed,
                self.values.packed,
                self._table,
                torch.tensor([row.packed_len for row in self.rows], dtype=torch.int32),
                torch.zeros(len(self.rows), dtype=torch.int32),
                self.keys.reading,
                self.values.reading,
                self.means,
                self.config.sinks,
                held.keys,
                held.values,
                held.positions if held.keys is not None else None,
            )
            self._seq_lens = view.seq_lens.numpy()
        for index, row in enumerate(self.rows):
            self._seq_lens[index] = self.columns - row.pad
        return view

    # ---- packing -------------------------------------------------------------------------------------------

    def pack_ready(self) -> None:
        """Move every staged token that may be packed into blocks, and drop its exact copy."""
        if not self.pads_known or self.dense.count == 0:
            return
        begins = [row.packed_len for row in self.rows]
        ends = [
            max(row.packed_len, packed_end(self.config, max(0, self.dense.end - row.pad), fresh=row.packed_len == 0))
            for row in self.rows
        ]
        if begins != ends:
            self._pack(begins, ends)
        self._due = min(row.pad + next_packing(self.config, row.packed_len) for row in self.rows)

    @editable_tensors
    def _pack(self, begins: list[int], ends: list[int]) -> None:
        """Move positions [begins, ends) of each row from the staged columns into blocks."""
        keys, values = self.dense.staged()
        self._decide_formats(keys, values, begins, ends)
        assert self.keys is not None
        assert self.values is not None
        self.take_blocks(ends)
        self._choose_means(keys, begins, ends)
        self.write(keys, values, self.dense.start, begins, ends)
        for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            row = self.rows[index]
            row.packed_len = end
            if begin < self.config.sinks and end > begin:
                self.dense.keep_sinks(index, row.pad, begin, min(end, self.config.sinks))
        self.dense.release(min(row.pad + row.packed_len for row in self.rows))
        self._place()
        if self.prefilling:  # only a streamed prompt is packed while it is read
            heap.give_back()

    def _choose_means(self, keys: Tensor, begins: list[int], ends: list[int]) -> None:
        """Fix the mean of rows whose first block is about to be packed: the fit's, or a dominating one of their own."""
        assert self.keys is not None
        fit = self.keys.fit
        if not self.config.mean and fit is None:
            return
        if self.means is None:
            shape = (len(self.rows), keys.shape[1], keys.shape[3])
            self.means = torch.zeros(shape, dtype=torch.bfloat16, device=keys.device)
        for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if begin == 0 and end > 0:
                block = self._first_block(keys, index)
                self.means[index] = (self._mean(block)[0] if fit is None else _tensor(fit.mean, block)).bfloat16()

    def _mean(self, block: Tensor) -> tuple[Tensor, int]:
        return protect.dominating_mean(block, self.config.tau, self.slow)

    def _first_block(self, keys: Tensor, index: int) -> Tensor:
        """Staged keys of a row's first block after its sinks, fp32 [num_kv_heads, up to 128, width]."""
        first = self.rows[index].pad - self.dense.start
        block = keys[index, :, first : first + BLOCK].float()
        return block[:, min(self.config.sinks, block.shape[1] // 2) :]

    def _decide_formats(self, keys: Tensor, values: Tensor, begins: list[int], ends: list[int]) -> None:
        """Judge rows before their first packing; the first of them also fix the keys' bits and open the stores."""
        self._measure_queries()
        new = [i for i, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin == 0 and end > 0]
        if new and (self.keys is None or self._query_energy is not None):
            bits = self.config.key_bits if self.keys is None else self.keys.format.bits
            finding = self._judge(keys, new, bits)
            if self.keys is None:
                self.finding = finding
            elif finding.action == "exposed":
                self.finding = finding
                _log.warning(
                    "layer %d: rows %s joined with keys that err by %.2g nats per logit at the %d bits chosen before",
                    self.layer, new, finding.logit_error, bits,
                )  # fmt: skip
        if self.keys is None:
            assert self.finding is not None
            key_format, value_format = self.config.stream_formats(keys.shape[-1], values.shape[-1])
            key_format = key_format.with_bits(self.finding.bits)
            blocks = sum(-(-end // BLOCK) for end in ends)
            self.open_stores(key_format, value_format, keys.shape[1], keys.device, blocks)

    def _judge(self, keys: Tensor, rows: list[int], bits: int) -> protect.Finding:
        """What protection says of the worst of the given rows at `bits`."""
        energies, heads = [], 0
        for index in rows:
            block, fit = self._first_block(keys, index), self.fits[0]
            if fit is not None:
                block = (block - _tensor(fit.mean, block)[:, None, :]) @ _tensor(fit.balance, block).mT
            elif self.config.mean:
                mean, removed = self._mean(block)
                block, heads = block - mean[:, None, :], max(heads, removed)
            energies.append(block.square().sum(-1).mean(1))
        return protect.judge(
            layer=self.layer,
            mean_heads=heads,
            query_energy=self._query_energy / self._query_rows if self._query_energy is not None else None,
            key_energy=torch.stack(energies).amax(0),
            scale=self._scale,
            width=keys.shape[-1],
            bits=bits,
            quantizer=self.config.quantizer_of(bits),
            limit=self.config.max_logit_error,
            may_boost=self.config.protect and self.keys is None,
        )

    # ---- editing -------------------------------------------------------------------------------------------

    @editable_tensors
    def crop(self, columns: int) -> None:
        """Forget the newest `columns` columns; packed rows that stay are not coded again."""
        if columns < 0:
            raise ValueError(f"columns={columns} to crop must not be negative")
        self.columns = max(0, self.columns - columns)
        self._fresh = 0
        for index, row in enumerate(self.rows):
            seq_len = max(0, self.columns - row.pad)
            self.truncate(row, seq_len)
            self.dense.drop_sinks(index, seq_len)
        self.dense.crop(self.columns)
        self._due = 0
        self._publish_table()

    @editable_tensors
    def select(self, index: Tensor) -> None:
        """Keep rows `index` (int64 [new_batch], repeats allowed) in that order; rows that repeat share blocks."""
        self._measure_queries()  # they are as many rows as the batch had
        self.select_rows(index)
        self._due, self._step_shapes = 0, None
        self.dense.select(index.to(self.dense.keys.device) if self.dense.keys is not None else index)

    def reset(self) -> None:
        """Forget everything, keep the configuration."""
        self.__init__(self.config, self.layer, self.max_tokens, self.slow)  # type: ignore[misc]

    def require_settled(self) -> None:
        """Raise ValueError if newest columns still wait for their pads (between `update` and attention)."""
        if self.rows and not self.pads_known:
            raise ValueError(
                f"layer {self.layer}: its newest keys have not been attended yet; finish the forward first"
            )

    def place_all(self) -> None:
        """Recompute which exact rows are read, and publish the block table, after rows were put in from outside."""
        self._place()
        self._publish_table()

    def _place(self) -> None:
        self.dense.place([row.pad for row in self.rows], [row.packed_len for row in self.rows])

    def _check_shapes(self, keys: Tensor, values: Tensor) -> None:
        if keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"layer {self.layer}: keys {tuple(keys.shape)} and values {tuple(values.shape)} must be "
                f"[batch, num_kv_heads, columns, width] and agree in all but width"
            )
        if self.rows and keys.shape[0] != len(self.rows):
            raise ValueError(f"layer {self.layer}: batch {keys.shape[0]}, but the cache holds {len(self.rows)} rows")
        if self.dense.keys is not None and self.dense.values is not None:
            for name, new, held in (("keys", keys, self.dense.keys), ("values", values, self.dense.values)):
                if new.shape[1] != held.shape[1] or new.shape[3] != held.shape[3]:
                    raise ValueError(
                        f"layer {self.layer}: {name} have {new.shape[1]} heads of {new.shape[3]}, the cache holds "
                        f"{held.shape[1]} of {held.shape[3]}"
                    )
        if self.max_tokens is not None and self.columns + keys.shape[2] > self.max_tokens:
            raise ValueError(
                f"layer {self.layer}: {self.columns} + {keys.shape[2]} tokens exceed max_tokens={self.max_tokens}"
            )

    # ---- accounting ----------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes held for this layer, all tensors by storage."""
        return self.packed_nbytes + self.dense.nbytes

    def stored(self) -> LayerBits | None:
        """What one sequence stores here, by its formats; None before anything is packed."""
        if self.keys is None or self.values is None:
            return None
        means = 0 if self.means is None else int((self.means[0] != 0).any(-1).sum()) * self.keys.format.width
        return LayerBits(
            self.keys.format, self.values.format, self.keys.num_kv_heads, self.config.sinks, self.config.tail, means
        )
