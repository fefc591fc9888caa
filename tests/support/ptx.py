"""What a few instructions of PTX do, for machines without a GPU: a text is run line by line on arrays of words."""

import re

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MASK = np.uint64(0xFFFFFFFF)


def run(text: str, inputs: list[Words], outputs: int) -> list[Words]:
    """Outputs $0, $1, ... of a block of assembly. inputs: those that follow, arrays of words in uint64."""
    names = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    body = text.strip().removeprefix("{").removesuffix("}")
    for line in filter(None, (part.strip() for part in body.split(";"))):
        if line.startswith(".reg"):
            continue
        word, rest = line.split(None, 1)
        if word == "mov.b64":
            found = re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest)
            assert found, line
            low, high, source = found.groups()
            names[low], names[high] = names[source] & _MASK, names[source] >> np.uint64(32)
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        values = [names[s] if s in names else np.uint64(int(s, 0)) for s in sources]
        names[target] = _INSTRUCTIONS[word](*values) & _MASK
    return [names[f"${i}"] for i in range(outputs)]


def _permute(a: Words, b: Words, selector: Words) -> Words:
    both = a | b << np.uint64(32)
    total = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint64)
    for i in range(4):
        nibble = selector >> np.uint64(4 * i) & np.uint64(15)
        byte = both >> (np.uint64(8) * (nibble & np.uint64(7))) & np.uint64(0xFF)
        sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
        total |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return total


def _and_or(a: Words, b: Words, c: Words, table: Words) -> Words:
    assert int(table) == 0xEA, "the only table that is known here is (a & b) | c"
    return a & b | c


_INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "shf.l.wrap.b32": lambda low, high, n: (high << n) | (low >> (np.uint64(32) - n)),
    "shf.r.wrap.b32": lambda low, high, n: (low >> n) | (high << (np.uint64(32) - n)),
    "lop3.b32": _and_or,
    "prmt.b32": _permute,
    "shfl.sync.idx.b32": lambda held, lane, *_: held[lane & np.uint64(31)],  # held: of 32 threads
}
