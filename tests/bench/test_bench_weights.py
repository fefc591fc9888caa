"""`bench matmul` and `bench experts`: rows and peers, bytes that are read, and no number while a kernel is wrong."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from rotaryquant.bench import devices, roofs
from rotaryquant.ops import native
from rotaryquant.ops.dequant_matmul import cpu as products_cpu
from support.commands import Run, is_error

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

MATMUL = ("matmul", "--shapes", "24x256,8x128", "--batch", "1,3", "--repeats", "2")
EXPERTS = ("experts", "--shapes", "4x32x64/2", "--batch", "1,3", "--repeats", "2")

WANTED = ("op", "kernel", "shape", "batch", "tokens", "threads", "ours_us", "peer", "peer_us", "ratio", "bytes", "gbps")


@pytest.fixture(autouse=True)
def _few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "COLD_BYTES", 1 << 16)


def test_products_of_every_size_and_batch(measure: Callable[..., dict[str, Any]]) -> None:
    rows = measure(*MATMUL)["rows"]
    assert [(row["shape"], row["bits"], row["batch"]) for row in rows] == list(
        product(("24x256", "8x128"), (2, 4), (1, 3))
    )
    for row in rows:
        assert set(row) >= set(WANTED)
        height, width = map(int, row["shape"].split("x"))
        assert row["bytes"] == height * (width * row["bits"] // 8 + 2 * width // 128)
        assert row["gbps"] == pytest.approx(row["bytes"] / row["ours_us"] / 1e3)
        assert {peer["peer"] for peer in row["peers"]} == {"torch bf16", "torch fp32"}
        assert row["peer_us"] == min(peer["us"] for peer in row["peers"])


def test_layers_read_the_experts_that_are_hit(measure: Callable[..., dict[str, Any]]) -> None:
    rows = measure(*EXPERTS, "--bits", "2")["rows"]
    assert [(row["shape"], row["batch"]) for row in rows] == [("4x32x64/2", 1), ("4x32x64/2", 3)]
    one = 64 * (16 + 2) + 64 * (8 + 2)  # codes and one scale a row of both products
    for row in rows:
        assert set(row) >= {*WANTED, "residency", "experts_hit"}
        assert row["residency"] == "memory"
        assert row["bytes"] == round(one * row["experts_hit"])
        assert row["peer"] == "torch bf16 looped"
    assert rows[0]["experts_hit"] == 2
    assert 2 <= rows[1]["experts_hit"] <= 4


@needs_native
@pytest.mark.parametrize(("words", "op"), [(MATMUL, "dequant_matmul"), (EXPERTS, "expert_matmul")])
def test_a_wrong_kernel_is_not_timed(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], op: str
) -> None:
    real = products_cpu.multiply
    monkeypatch.setattr(devices, "interleaved", lambda *args: pytest.fail("timed"))
    monkeypatch.setattr(roofs, "measure_roofs", lambda threads: {})
    monkeypatch.setattr(products_cpu, "multiply", lambda *args: real(*args) * 1.03)
    status, out, err = run("bench", *words)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"error: {op}, 2 bits, 1 token: relative error 0.0")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["matmul", "--shapes", "24"], ["--shapes", "'24'", "4096x2048"]),
        (["matmul", "--shapes", "24x0"], ["'24x0'"]),
        (["matmul", "--shapes", "24x20"], ["rows of 20"]),
        (["matmul", "--bits", "5"], ["--bits 5"]),
        (["matmul", "--grid", "round"], ["--grid", "'round'", "trellis"]),
        (["matmul", "--batch", "0"], ["--batch", "'0'"]),
        (["experts", "--shapes", "4x32x64"], ["'4x32x64'", "128x768x2048/8"]),
        (["experts", "--device", "mps"], ["device='mps'", "cuda"]),
    ],
)
def test_wrong_options_are_one_line(run: Run, words: list[str], parts: list[str]) -> None:
    is_error(run("bench", *words), 2, *parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_named(run: Run) -> None:
    is_error(run("bench", "matmul", "--device", "cuda"), 2, "no CUDA device here")


@pytest.mark.parametrize("name", ["matmul-h200", "experts-h200"])
def test_results_of_the_gpu_are_whole(name: str) -> None:
    data = json.loads((RESULTS / f"{name}.json").read_text())
    assert data["device"] == "NVIDIA H200"
    assert all(set(row) >= set(WANTED) and row["kernel"] == "triton" for row in data["rows"])
    assert (RESULTS / f"{name}.md").exists()
