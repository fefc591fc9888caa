"""A soak sees what it is for: growth, failures and drift."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rotaryquant.evals import soak
from rotaryquant.integrations.transformers.session import Session
from support.commands import Run, is_error
from support.tiny_llm import save_tiny

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 60
GOOD: dict[str, Any] = {
    "failures": [],
    "drift": 0.0,
    "rss_slope_mb_per_hour": 0.2,
    "device_slope_mb_per_hour": None,
    "seconds": 7200.0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    (folder / "text.txt").write_text(TEXT)
    return folder


def words(folder: Path, *more: str) -> list[str]:
    return [
        "eval",
        "soak",
        str(folder),
        "--text",
        str(folder / "text.txt"),
        "--longest",
        "600",
        "--threads",
        "1",
        *more,
    ]


def test_slope_is_that_of_the_line_after_the_warm_up() -> None:
    seconds = [float(at) for at in range(0, 7200, 60)]
    sizes = [500.0 - at if at < 1000 else 300.0 + 2.0 * at / 3600 for at in seconds]
    assert soak.slope_per_hour(seconds, sizes) == pytest.approx(2.0, rel=1e-6)
    assert soak.slope_per_hour([], []) == soak.slope_per_hour([0.0, 1.0], [5.0, 9.0]) == 0.0


@pytest.mark.parametrize(("samples", "kept"), [(0, 0), (1, 1), (500, 500), (501, 251), (2400, 480)])
def test_a_report_keeps_samples_at_equal_distances(samples: int, kept: int) -> None:
    given = [(at + 0.04, 900.0 + at) for at in range(samples)]
    found = soak.thinned(given)
    assert len(found) == kept
    step = -(-samples // 500) or 1
    assert [at for at, _ in found] == [float(at) for at in range(0, samples, step)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"failures": ["round 3: ValueError: x"]}, "1 rounds failed, the first: round 3: ValueError: x"),
        ({"drift": 1e-6}, "moved by 1.0e-06"),
        ({"rss_slope_mb_per_hour": 1.5}, "memory grew by 1.5 MB an hour, more than 1"),
        ({"rss_slope_mb_per_hour": 90.0, "seconds": 60.0}, None),
        ({"rss_slope_mb_per_hour": None}, None),
        ({"device_slope_mb_per_hour": 0.9}, None),
        ({"device_slope_mb_per_hour": 1.5}, "the device's memory grew by 1.5 MB an hour, more than 1"),
    ],
)
def test_what_does_not_pass(change: dict[str, Any], reason: str | None) -> None:
    found = soak.judge(GOOD | change, 1.0)
    assert (found == []) if reason is None else (len(found) == 1 and reason in found[0])


@pytest.mark.parametrize("kv", ["iso3", "fp16", "iso3-strict"])
def test_a_short_soak_passes(folder: Path, run: Run, kv: str) -> None:
    status, out, _ = run(*words(folder, "--kv", kv, "--seconds", "2", "--json"))
    assert status == 0
    data = json.loads(out)
    assert data["reasons"] == []
    assert 1 <= len(data["rss_mb"]) <= 500
    assert [at for at, _ in data["rss_mb"]] == sorted(at for at, _ in data["rss_mb"])


def test_failures_are_counted_and_the_soak_goes_on(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = Session.step, []

    def sometimes(self: Session, token: int) -> torch.Tensor:
        steps.append(token)
        logits = real(self, token)
        return logits * torch.nan if len(steps) % 40 == 0 else logits

    monkeypatch.setattr(Session, "step", sometimes)
    status, out, _ = run(*words(folder, "--seconds", "2"))
    assert status == 1
    assert "rounds failed, the first: round " in out
    assert "ValueError: logits are not finite after" in out


def test_a_model_that_drifts_does_not_pass(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = soak._score, []

    def drifting(*args: Any) -> float:
        calls.append(args)
        return real(*args) * (1 + 1e-7 * len(calls))

    monkeypatch.setattr(soak, "_score", drifting)
    monkeypatch.setattr(soak, "_PROBE_EVERY", 1)
    status, out, _ = run(*words(folder, "--seconds", "1"))
    assert len(calls) > 1
    assert status == 1
    assert "the probe's likelihood moved by" in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seconds", "0"], "seconds=0"),
        (["--longest", "100"], "longest=100"),
        (["--longest", "3000"], "longest=3000: the model has 2048 positions"),
        (["--longest", "9000"], "shorter than the 9000 tokens"),
    ],
)
def test_wrong_options_are_one_line(folder: Path, run: Run, more: list[str], message: str) -> None:
    is_error(run(*words(folder, *more)), 2, message)
