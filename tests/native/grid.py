"""The cases these tests run: those of tests/ops, and all widths and bit counts at lengths around strips and blocks."""

import importlib
from functools import cache, partial
from typing import Any

import pytest
from cases import Case, append_packed, packed_attention

from rotaryquant.formats.kv import StreamFormat
from rotaryquant.ops import dispatch

WIDTHS, BITS = (64, 80, 128, 256), (2, 3, 4, 8)
LENGTHS = (1, 31, 33, 127, 129, 300)


def _steps() -> tuple[tuple[int, ...], ...]:
    """Row i of the batch gets its length in i + 1 calls, each up to the next length of the list."""
    increments = [end - begin for begin, end in zip((0, *LENGTHS), LENGTHS, strict=False)]
    rows = [[*increments[: i + 1], *([0] * (len(LENGTHS) - i - 1))] for i in range(len(LENGTHS))]
    return tuple(zip(*rows, strict=True))


def append(name: str, spec: append_packed.Spec) -> Case:
    """One case of the fused write."""
    options: dict[str, Any] = {"name": name, "spec": spec}
    return Case(name, partial(append_packed.run, **options), partial(append_packed.compare, **options))


def attention(name: str, spec: packed_attention.Spec) -> Case:
    """One case of attention."""
    options: dict[str, Any] = {"name": name, "spec": spec}
    return Case(name, partial(packed_attention.run, **options), partial(packed_attention.compare, **options))


def _appends() -> list[Case]:
    streams = [
        StreamFormat(name, width, bits, rule)
        for name, rule in (("key", "score"), ("value", "value"))
        for width in WIDTHS
        for bits in BITS
    ]
    streams += [
        StreamFormat(name, 80, bits, rule, quantizer="trellis")
        for name, rule in (("key", "score"), ("value", "value"))
        for bits in (2, 3, 4)
    ]
    return [
        append(
            f"grid, {s.name}, {s.bits} bits of {s.width}, {s.quantizer}",
            append_packed.Spec(s, _steps(), mean=s.name == "key"),
        )
        for s in streams
    ]


def _attentions() -> list[Case]:
    return [
        attention(
            f"grid, {bits} bits of {width}",
            packed_attention.Spec(
                LENGTHS,
                kv_heads=2,
                group=3,
                keys=packed_attention.key(width, bits),
                values=packed_attention.value(width, bits),
                tail=5,
                sinks=4,
                key_noise=0.0 if bits == 8 else 0.05,
            ),
        )
        for width in WIDTHS
        for bits in BITS
    ]


def cases(op: str) -> list[Case]:
    """The cases of one op."""
    found: list[Case] = importlib.import_module(f"cases.{op}").CASES
    own = {"append_packed": _appends, "packed_attention": _attentions}.get(op)
    return found if own is None else [*found, *own()]


def parameters() -> list[Any]:
    """(op, case) of every op."""
    return [pytest.param(op, case, id=f"{op}-{case.name}") for op in dispatch.OPS for case in cases(op)]


@cache
def expected(case: Case) -> Any:
    """What the reference makes of a case."""
    return case.run("reference")
