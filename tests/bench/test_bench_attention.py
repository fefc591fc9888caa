"""`bench attention`: its keys, its arithmetic, and that it prints nothing while the kernel is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rotaryquant.bench import attention, context, peers, roofs
from rotaryquant.bench.checks import CHECK_TOKENS, CheckError, check_attention, kernel_of, require_close
from rotaryquant.bench.options import Shape
from rotaryquant.config import parse_kv
from rotaryquant.ops import native
from rotaryquant.ops.packed_attention import cpu as attention_cpu
from rotaryquant.ops.packed_attention import packed_attention
from support.commands import Run, is_error
from support.kernels import force_kernel

needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

SMALL = ("attention", "--lengths", "200,64", "--shapes", "4/2/64", "--repeats", "2")

#: What scripts depend on.
KEYS = set(
    "op kernel shape batch tokens threads ours_us peer peer_us ratio bytes gbps roof_fraction".split()  # noqa: SIM905
)


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention_cpu.run
    monkeypatch.setattr(attention_cpu, "run", lambda *args, **options: real(*args, **options) * 1.03)


def test_the_promised_keys(measure: Callable[..., dict[str, Any]]) -> None:
    data = measure(*SMALL, "--threads", "2,1")
    assert {"machine", "device", "date", "versions", "roof_gbps", "rows"} <= set(data)
    assert data["device"] == "cpu"
    assert [(row["threads"], row["tokens"]) for row in data["rows"]] == [(1, 64), (1, 200), (2, 64), (2, 200)]
    for row in data["rows"]:
        assert set(row) >= KEYS
        assert row["clock"] == ("process CPU time" if row["threads"] == 1 else "wall clock")
        assert row["check_error"] < 2e-2
    assert data["command"].startswith("rotaryquant bench attention --lengths 200,64")


def test_a_row_counts_what_it_reads(measure: Callable[..., dict[str, Any]]) -> None:
    data = measure(*SMALL)
    for row in data["rows"]:
        assert row["shape"] == "4/2/64"
        assert row["bytes"] == row["tokens"] * 2 * 2 * (64 * 3 // 8 + 2)  # heads, keys and values, codes and scale
        assert row["gbps"] == pytest.approx(row["bytes"] / row["ours_us"] / 1e3)
        assert row["madds"] == 2 * row["tokens"] * 4 * 64
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]


def test_the_peer_is_the_fastest_and_all_are_named(measure: Callable[..., dict[str, Any]]) -> None:
    row = measure(*SMALL)["rows"][0]
    names = {f"sdpa {dtype} {form}" for dtype in ("bf16", "fp32") for form in ("gqa", "folded", "expanded")}
    assert {peer["peer"] for peer in row["peers"]} == names
    best = min(row["peers"], key=lambda peer: peer["us"])
    assert (row["peer"], row["peer_us"], row["ratio"]) == (best["peer"], best["us"], best["ratio"])


def test_a_ratio_is_the_peers_time_over_ours(measure: Callable[..., dict[str, Any]]) -> None:
    """Of one round, so that medians are the samples."""
    for row in measure("attention", "--lengths", "64", "--shapes", "4/2/64", "--repeats", "1")["rows"]:
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["ours_us"])
        for peer in row["peers"]:
            assert peer["ratio"] == pytest.approx(peer["us"] / row["ours_us"])
        if row["roof_us"] is not None:
            assert row["roof_fraction"] == pytest.approx(row["roof_us"] / row["ours_us"])


@needs_native
def test_the_roof_is_the_larger_of_both(measure: Callable[..., dict[str, Any]]) -> None:
    for row in measure(*SMALL)["rows"]:
        assert row["kernel"] == f"cpu/{native.module().instruction_set()}"
        bound = {"stream": row["bytes"] / row["stream_gbps"] / 1e3, "dot": row["madds"] / row["dot_gmadds"] / 1e3}
        assert row["roof"] == max(bound, key=lambda name: bound[name])
        # medians of the same samples, of which rates take the reciprocal
        assert row["roof_us"] == pytest.approx(max(bound.values()), rel=1e-6)
        assert row["roof_fraction"] > 0


def test_without_compiled_kernels_there_is_no_roof(
    measure: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    force_kernel(monkeypatch, "reference")
    monkeypatch.setattr(roofs, "missing", lambda: "no compiler")
    data = measure(*SMALL)
    assert (data["roof_gbps"], data["roof_missing"]) == (None, "no compiler")
    assert {row["kernel"] for row in data["rows"]} == {"reference"}
    assert all(row["roof_fraction"] is None for row in data["rows"])


@needs_native
def test_a_wrong_kernel_is_not_timed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "interleaved", lambda *args: pytest.fail("timed"))
    monkeypatch.setattr(roofs, "interleaved", lambda *args: pytest.fail("timed"))
    broken(monkeypatch)
    is_error(
        run("bench", *SMALL),
        1,
        "packed_attention, 4/2/64, kv=iso3",
        "relative error 0.0",
        "at most 0.02",
        "nothing was timed",
    )


def test_peers_that_disagree_are_not_timed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = peers.scaled_dot_product_attention

    def lame(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return real(query, *args, **options) * (1.1 if "enable_gqa" in options else 1.0)

    monkeypatch.setattr(peers, "scaled_dot_product_attention", lame)
    is_error(run("bench", *SMALL), 1, "peers, 4/2/64", "relative error")


@pytest.mark.parametrize("spec", ["iso3", "iso2", "iso4", "k4v3", "key_bits=8,value_bits=8", "turbo3"])
def test_contexts_are_packed_whole_and_right(spec: str) -> None:
    kv = parse_kv(spec)
    assert kv is not None
    made = context.random_context(Shape(4, 2, 64), CHECK_TOKENS, kv)
    assert made.view.packed_lens.tolist() == made.view.seq_lens.tolist() == [CHECK_TOKENS]
    assert made.view.dense_positions is None or made.view.dense_positions.numel() == 0
    assert (made.key_noise > 0) == (kv.correct > 0 and kv.key_bits <= 4)
    assert check_attention("x", made.query, made.view, scale=made.scale, key_noise=made.key_noise) < 2e-2
    exact = torch.nn.functional.scaled_dot_product_attention(
        made.query, made.keys.float(), made.values.float(), scale=made.scale, enable_gqa=True
    )
    got = packed_attention(made.query, made.view, scale=made.scale, key_noise=made.key_noise)
    assert float((got - exact).norm() / exact.norm()) < 0.7  # noise of 2 bits; rows of another head would give 1.4


def test_expanded_copies_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_memory_bytes", lambda: 4 * 2 * 3 * 64 * 4 * 100 - 1)
    keys = torch.zeros(1, 1, 100, 64)
    calls, left_out = peers.sdpa_forms(torch.zeros(1, 3, 1, 64), keys, keys, 0.125)
    assert list(calls) == ["gqa", "folded"]
    assert "over a quarter of this machine's memory" in left_out["expanded"]


def test_nothing_but_numbers_is_close() -> None:
    good = torch.ones(4)
    assert require_close("x", good, good) == 0
    for bad in (good * 1.03, good * torch.nan, good * torch.inf):
        with pytest.raises(CheckError, match="x: relative error"):
            require_close("x", bad, good)


def test_a_call_that_misses_its_op_is_found() -> None:
    with pytest.raises(CheckError, match="never reached"):
        kernel_of("packed_attention", lambda: None)
