"""The exact rows of a layer: the first tokens (sinks) and everything that is not packed yet (the tail).

One buffer holds both: slots [0, num_sinks) for sinks, then one slot per staged column. A column is a place in
the padded batch, a position is a row's own count; they differ by the row's left pads.
"""

import numpy as np
import torch
from torch import Tensor

from rotaryquant.formats.kv import BLOCK
from rotaryquant.kv.modes import making
from rotaryquant.ops.dispatch import Bound
from rotaryquant.ops.stage import prepare


def _round_up(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


class DenseRows:
    """Exact keys and values of `batch` rows, staged columns [start, start + count).

    keys, values: [batch, num_kv_heads, num_sinks + capacity, width] in the model's dtype.
    positions: int32 [batch, num_sinks + capacity], each slot's position, -1 where nothing may be read from it. Slots
    that no column fills yet have the position that one would get. placed: whether that is so since the last move.
    """

    def __init__(self, num_sinks: int) -> None:
        self.num_sinks = num_sinks
        self.start = 0
        self.count = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.positions: Tensor = torch.zeros(0, 0, dtype=torch.int32)
        self.placed = False
        self._stage: Bound | None = None  # the op that fills slots of the buffers with rows of these dtypes
        self._staged_dtypes: tuple[torch.dtype, torch.dtype] | None = None

    @property
    def end(self) -> int:
        """Column after the last staged one."""
        return self.start + self.count

    @property
    def capacity(self) -> int:
        """Columns the buffer can hold."""
        return 0 if self.keys is None else self.keys.shape[2] - self.num_sinks

    def _resize(self, like_keys: Tensor, like_values: Tensor, first: int, columns: int, capacity: int) -> None:
        """Move staged columns [first, first + columns) (relative to start) into a buffer of `capacity`."""
        batch, heads = like_keys.shape[:2]
        sinks = self.num_sinks
        new = []
        for old, like in ((self.keys, like_keys), (self.values, like_values)):
            buffer = like.new_empty(batch, heads, sinks + capacity, like.shape[-1])
            if old is not None:
                buffer[:, :, :sinks] = old[:, :, :sinks]
                buffer[:, :, sinks : sinks + columns] = old[:, :, sinks + first : sinks + first + columns]
            else:
                buffer[:, :, :sinks] = 0
            new.append(buffer)
        positions = torch.full((batch, sinks + capacity), -1, dtype=torch.int32)
        if self.keys is not None:
            positions[:, :sinks] = self.positions[:, :sinks]
            positions[:, sinks : sinks + columns] = self.positions[:, sinks + first : sinks + first + columns]
        self.keys, self.values, self.positions = new[0], new[1], positions
        self.placed, self._stage = False, None

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Stage new columns.

        keys, values: [batch, num_kv_heads, columns, width], without a graph. A full buffer grows to the next multiple
        of 128, and wants `place` before it is read.
        """
        columns = keys.shape[2]
        needed = self.count + columns
        if self.keys is None or needed > self.capacity:
            with making(self.keys):
                self._resize(keys, values, 0, self.count, _round_up(needed))
        assert self.keys is not None
        assert self.values is not None
        begin = self.num_sinks + self.count
        if self._stage is None or self._staged_dtypes != (keys.dtype, values.dtype):
            self._stage = prepare(keys, values, self.keys, self.values)
            self._staged_dtypes = keys.dtype, values.dtype
        self._stage(keys, values, self.keys, self.values, begin)
        self.count = needed

    def place(self, pads: list[int], packed_lens: list[int]) -> None:
        """Set the positions of all columns' slots: column minus pads, -1 for pads and packed rows."""
        held, size = self.positions.numpy(), self.capacity
        for row, (pad, packed) in enumerate(zip(pads, packed_lens, strict=True)):
            hidden = min(max(pad + packed - self.start, 0), size)  # columns that pads or packed rows take
            slots = held[row, self.num_sinks :]
            slots[:hidden] = -1
            first = self.start + hidden - pad
            slots[hidden:] = np.arange(first, first + size - hidden)
        self.placed = True

    def keep_sinks(self, row: int, pad: int, begin: int, end: int) -> None:
        """Copy positions [begin, end) of a batch row from its staged columns into its sink slots."""
        assert self.keys is not None
        assert self.values is not None
        offset = self.num_sinks + pad - self.start
        for buffer in (self.keys, self.values):
            buffer[row, :, begin:end] = buffer[row, :, offset + begin : offset + end]
        self.positions[row, begin:end] = torch.arange(begin, end, dtype=torch.int32)

    def drop_sinks(self, row: int, seq_len: int) -> None:
        """Forget a row's sinks at positions from `seq_len` on."""
        slots = self.positions[row, : self.num_sinks]
        slots[slots >= seq_len] = -1

    def release(self, start: int) -> None:
        """Forget staged columns before `start` and give their memory back."""
        drop = start - self.start
        if drop <= 0 or self.keys is None or self.values is None:
            return
        kept = self.count - drop
        self._resize(self.keys, self.values, drop, kept, _round_up(kept))
        self.start, self.count = start, kept

    def crop(self, end: int) -> None:
        """Forget staged columns from `end` on."""
        self.count = max(0, min(self.count, end - self.start))
        self.start = min(self.start, end)
        self.placed = False  # rows may have lost packed positions too

    def select(self, index: Tensor) -> None:
        """Rows `index` of the batch, in that order."""
        if self.keys is None or self.values is None:
            return
        self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)
        self.positions = self.positions.index_select(0, index.cpu())

    def restore(self, keys: Tensor, values: Tensor, positions: Tensor, start: int, count: int) -> None:
        """Take over buffers written by an earlier instance: num_sinks + count slots."""
        self.keys, self.values, self.positions = keys, values, positions
        self.start, self.count = start, count
        self._stage = None

    def join(self, parts: list[tuple["DenseRows", int]]) -> None:
        """Take over the rows of several instances, each shifted by a number of columns; call `place` afterwards."""
        parts = [(part, shift) for part, shift in parts if part.keys is not None and part.values is not None]
        if not parts:
            return
        self.start = min(part.start + shift for part, shift in parts)
        self.count = max(part.end + shift for part, shift in parts) - self.start
        slots = self.num_sinks + _round_up(self.count)
        merged = []
        for name in ("keys", "values"):
            buffers = []
            for part, shift in parts:
                old: Tensor = getattr(part, name)
                new = old.new_zeros(old.shape[0], old.shape[1], slots, old.shape[3])
                new[:, :, : self.num_sinks] = old[:, :, : self.num_sinks]
                begin = self.num_sinks + part.start + shift - self.start
                new[:, :, begin : begin + part.count] = old[:, :, self.num_sinks : self.num_sinks + part.count]
                buffers.append(new)
            merged.append(torch.cat(buffers))
        self.keys, self.values = merged
        self.positions = torch.full((self.keys.shape[0], slots), -1, dtype=torch.int32)
        sinks = [part.positions[:, : self.num_sinks] for part, _ in parts]
        self.positions[:, : self.num_sinks] = torch.cat(sinks)

    def staged(self, first: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of staged columns from `first` on (views)."""
        assert self.keys is not None
        assert self.values is not None
        slots = slice(self.num_sinks + first, self.num_sinks + self.count)
        return self.keys[:, :, slots], self.values[:, :, slots]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, by storage."""
        tensors = [t for t in (self.keys, self.values) if t is not None]
        return sum(t.untyped_storage().nbytes() for t in tensors)
