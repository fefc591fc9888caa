"""The header of a GGUF file: its metadata, its tensors, and the size that the whole file must have.

Read field by field from the file's start, so that a cut or foreign file is refused before a loader maps it.
Long arrays (vocabularies) are walked but not kept. Layout: little-endian, versions 2 and 3.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"

#: struct codes of the scalar metadata types, by type number; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

#: (values, bytes) of one block, by tensor type number, for the types whose layout is fixed.
BLOCKS: Mapping[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
}  # fmt: skip

#: Beyond these a count or a length is a damaged field: reading on would only exhaust memory.
_MAX_COUNT = 1 << 24
_MAX_TEXT = 1 << 28


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. kind: its type number. offset: from the start of the data. nbytes: in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """metadata: scalars and strings by key (arrays are left out). size: bytes that the whole file must have."""

    metadata: dict[str, str | int | float | bool]
    tensors: list[GgufTensor]
    size: int


class _Reader:
    """Typed reads that turn a short read into a ValueError."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def take(self, count: int) -> bytes:
        """Exactly `count` bytes."""
        data = self.file.read(count)
        if len(data) != count:
            raise ValueError(f"the file ends at byte {self.file.tell()}, inside its header")
        return data

    def scalar(self, code: str) -> int | float | bool:
        """One number of a struct code."""
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return value

    def count(self, limit: int = _MAX_COUNT) -> int:
        """A 64-bit count, refused above `limit`."""
        value = int(self.scalar("Q"))
        if value > limit:
            raise ValueError(f"a count of {value} before byte {self.file.tell()} is out of range")
        return value

    def text(self) -> str:
        """A string with its 64-bit length."""
        return self.take(self.count(_MAX_TEXT)).decode("utf-8", errors="replace")

    def skip_array(self) -> None:
        """Walk over an array's elements."""
        kind, count = int(self.scalar("I")), self.count(1 << 32)
        if kind in _SCALARS:
            self.file.seek(count * struct.calcsize("<" + _SCALARS[kind]), 1)
            return
        for _ in range(count):
            if kind == _STRING:
                self.take(self.count(_MAX_TEXT))
            elif kind == _ARRAY:
                self.skip_array()
            else:
                raise ValueError(f"metadata type {kind} is unknown")


def _tensor(reader: _Reader) -> GgufTensor:
    name = reader.text()
    shape = tuple(reader.count(1 << 48) for _ in range(int(reader.scalar("I"))))
    kind, offset = int(reader.scalar("I")), reader.count(1 << 62)
    if kind not in BLOCKS:
        raise ValueError(f"tensor {name} has type number {kind}, which is unknown")
    values, nbytes = BLOCKS[kind]
    return GgufTensor(name, shape, kind, offset, math.prod(shape) // values * nbytes)


def read_gguf_header(path: Path) -> GgufHeader:
    """Header of a GGUF file. Raises ValueError, saying where, for a foreign, unknown or cut header."""
    with path.open("rb") as file:
        reader = _Reader(file)
        magic = file.read(4)
        if magic != MAGIC:
            raise ValueError(f"it starts with {magic!r}, expected {MAGIC!r}: this is no GGUF file")
        version = int(reader.scalar("I"))
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is unknown; versions 2 and 3 are read")
        num_tensors, num_fields = reader.count(), reader.count()
        metadata: dict[str, str | int | float | bool] = {}
        for _ in range(num_fields):
            key, kind = reader.text(), int(reader.scalar("I"))
            if kind == _ARRAY:
                reader.skip_array()
            elif kind == _STRING:
                metadata[key] = reader.text()
            elif kind in _SCALARS:
                metadata[key] = reader.scalar(_SCALARS[kind])
            else:
                raise ValueError(f"metadata type {kind} of {key!r} is unknown")
        tensors = [_tensor(reader) for _ in range(num_tensors)]
        align = int(metadata.get("general.alignment", 32))
        if align <= 0:
            raise ValueError(f"general.alignment={align} must be above 0")
        start = -(-file.tell() // align) * align
    return GgufHeader(metadata, tensors, start + max((t.offset + t.nbytes for t in tensors), default=0))
