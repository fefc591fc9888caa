"""A safetensors file written tensor by tensor, each once it is there, and taken up again where a stop left it.

Names, dtypes and shapes are known before the first number is: so the header is written first, and the data follow in
its order. Until all of them are there the file ends in `.partial`; beside it stands how many tensors are whole. A file
of that state is continued or begun anew, and never taken for a checkpoint.
"""

import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from rotaryquant.errors import ModelFileError
from rotaryquant.weights.headers import DTYPE_BITS

#: Dtypes that are written, by the name that safetensors files use.
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip

#: Data begin at a multiple of this.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    """A tensor that a file is to hold. dtype: as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class ShardWriter:
    """Writes the entries of one file in their order. A context manager; `finish` makes it a whole file.

    path: of the whole file. done: tensors that are there already, from a run that was stopped.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path, self._entries = path, list(entries)
        self._partial, self._state = path.with_name(path.name + ".partial"), path.with_name(path.name + ".state")
        self._header = _header(entries)
        self.done = self._find_done()
        self._file = self._partial.open("r+b" if self.done else "w+b")
        if not self.done:
            self._file.write(self._header)
        self._file.seek(self._end(self.done))
        self._file.truncate()

    def _end(self, count: int) -> int:
        return len(self._header) + sum(entry.nbytes for entry in self._entries[:count])

    def _find_done(self) -> int:
        """Whole tensors of a file that was begun with this very header."""
        try:
            done = int(json.loads(self._state.read_text())["done"])
            with self._partial.open("rb") as file:
                same = file.read(len(self._header)) == self._header
            there = self._partial.stat().st_size
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return done if same and 0 <= done <= len(self._entries) and there >= self._end(done) else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Write the next tensors; they count as there once all of them are on disk.

        Raises ModelFileError where they are not the next entries, or the disk has no room.
        """
        wanted = self._entries[self.done : self.done + len(tensors)]
        for entry, tensor in zip(wanted, tensors, strict=True):
            if (DTYPES[entry.dtype], entry.shape) != (tensor.dtype, tuple(tensor.shape)):
                raise ModelFileError(f"{self.path}: {entry} was planned, {tensor.dtype} {tuple(tensor.shape)} came")
        try:
            for tensor in tensors:
                self._file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            self._file.flush()
            os.fsync(self._file.fileno())
            self.done += len(tensors)
            write_whole(self._state, json.dumps({"done": self.done}))
        except OSError as error:
            left = sum(entry.nbytes for entry in self._entries[self.done :])
            raise ModelFileError(
                f"{self._partial}: {error.strerror or error}; {left:,} bytes of this file are still to come. "
                f"Make room and run the same command again: it goes on from here"
            ) from error

    def finish(self) -> None:
        """Make it a whole file under its own name. Raises ModelFileError where tensors are missing."""
        if self.done < len(self._entries):
            raise ModelFileError(f"{self.path}: {len(self._entries) - self.done} tensors were not written")
        self._file.close()
        self._partial.replace(self.path)
        self._state.unlink(missing_ok=True)


def header_bytes(entries: Sequence[Entry]) -> int:
    """Bytes of a file in front of its data."""
    return len(_header(entries))


def _header(entries: Sequence[Entry]) -> bytes:
    """The header of a file: its length, and JSON padded with blanks."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        table[entry.name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [end, end + entry.nbytes],
        }  # fmt: skip
        end += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
