"""`bench append`: counted multiply-adds, keys, and that it prints nothing while the kernel is wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rotaryquant.bench import append, roofs
from rotaryquant.bench.append import madds_per_row
from rotaryquant.formats.rotation import hadamard_factors, paley_base
from rotaryquant.ops import native
from rotaryquant.ops.append_packed import cpu as append_cpu
from support.commands import Run, is_error

needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

SMALL = ("append", "--shapes", "4/2/64", "--repeats", "2")


@pytest.mark.parametrize(
    ("rotation", "width", "madds"),
    [
        ("isoquant", 128, 896 + 512),
        ("hadamard", 128, 896),
        ("so4", 128, 512),
        ("so3", 128, 512),
        ("dense", 128, 16_384),
        ("none", 128, 0),
        ("isoquant", 64, 6 * 64 + 4 * 64),
        ("hadamard", 96, 3 * 96 + 12 * 96),
    ],
)
def test_multiply_adds_of_a_row(rotation: str, width: int, madds: int) -> None:
    assert madds_per_row(rotation, width) == madds


@pytest.mark.parametrize("width", [64, 96, 112, 128, 160])
def test_multiply_adds_of_hadamard_are_the_entries_of_its_factors(width: int) -> None:
    """Each factor of the Kronecker product is applied to the whole row; a butterfly is one addition a value."""
    power, base = hadamard_factors(width)
    butterflies = int(np.log2(power)) * width
    inner = np.count_nonzero(paley_base(base)) // base * width if base > 1 else 0
    assert madds_per_row("hadamard", width) == butterflies + inner


def test_rows_and_their_peers(measure: Callable[..., dict[str, Any]]) -> None:
    data = measure(*SMALL)
    rows = data["rows"]
    assert [(row["size"], row["tokens"], row["rotation"]) for row in rows] == [
        (size, tokens, rotation)
        for size, tokens in (("decode", 32), ("bulk", 2048))
        for rotation in ("isoquant", "hadamard", "dense")
    ]
    wanted = "op kernel shape batch tokens threads ours_us peer peer_us ratio bytes gbps roof_fraction madds"
    for row in rows:
        assert set(row) >= set(wanted.split())
        assert row["bytes"] == 2 * 2 * (2 * 64 + 26)  # KV heads, keys and values, bf16 read, row written
        times = {peer["peer"]: peer for peer in row["peers"]}
        assert append._COPY in times
        if row["rotation"] == "dense":
            assert (row["peer"], row["peer_us"], row["ratio"]) == (None, None, None)
            assert set(times) == {append._COPY}
        else:
            assert row["peer"] == "rotation=dense"
            assert (row["peer_us"], row["ratio"]) == (times["dense"]["us"], times["dense"]["ratio"])
            assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]


def test_times_are_those_of_one_token(measure: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "interleaved", lambda calls, rounds, clock: {name: [2.0] * rounds for name in calls})
    rows = measure(*SMALL, "--rotations", "isoquant")["rows"]
    assert [row["ours_us"] for row in rows] == pytest.approx([2e6 / 32, 2e6 / 2048])
    assert [row["peer_us"] for row in rows] == pytest.approx([2e6 / 32, 2e6 / 2048])


def test_the_dense_peer_is_timed_without_a_row_of_its_own(measure: Callable[..., dict[str, Any]]) -> None:
    rows = measure(*SMALL, "--rotations", "hadamard")["rows"]
    assert [row["rotation"] for row in rows] == ["hadamard"] * 2
    assert all(row["ratio"] > 0 for row in rows)
    for row in measure("append", "--shapes", "4/2/64", "--repeats", "1", "--rotations", "hadamard")["rows"]:
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["ours_us"])


@needs_native
def test_a_wrong_kernel_is_not_timed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = append_cpu.run
    monkeypatch.setattr(append, "interleaved", lambda *args: pytest.fail("timed"))
    monkeypatch.setattr(roofs, "interleaved", lambda *args: pytest.fail("timed"))
    monkeypatch.setattr(append_cpu, "run", lambda x, *args: real(x * 1.03, *args))
    is_error(run("bench", *SMALL), 1, "append_packed, 4/2/64", "rotation=isoquant", "relative error 0.03")


def test_writes_go_round_all_positions_and_leave_what_the_check_reads() -> None:
    """The timed call is the checked op: after a whole round every position holds its own row."""
    from rotaryquant.bench.context import all_packed, random_rows
    from rotaryquant.bench.options import Shape
    from rotaryquant.config import KVCacheConfig

    shape, kv = Shape(4, 2, 64), all_packed(KVCacheConfig())
    data = random_rows(shape, 2048, 1), random_rows(shape, 2048, 2)
    stores: list[Any] = []
    real = append._stores
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(append, "_stores", lambda *args: stores.extend(found := real(*args)) or found)
        call = append._write(shape, kv, "isoquant", 32, data)
    for _ in range(2048 // 32):
        call()
    for store, x in zip(stores, data, strict=True):
        decoded = store.decode(list(range(16)), 2048)
        assert float((decoded - x[0].float()).norm() / x.float().norm()) < 0.2  # noise of 3 bits
