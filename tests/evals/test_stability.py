"""Reloading changes nothing, and would be noticed if it did."""

import argparse
from pathlib import Path

import pytest

from rotaryquant.errors import ConfigError
from rotaryquant.evals import inputs, stability
from support.commands import Run
from support.progress import Told
from support.tiny_llm import save_tiny

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)
    (folder / "text.txt").write_text(TEXT)
    return folder


def words(folder: Path, *more: str) -> list[str]:
    small = ["--context", "512", "--tokens", "200", "--steps", "5", "--threads", "1"]
    return [str(folder), "--text", str(folder / "text.txt"), *small, *more]


def arguments(folder: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    stability.add_arguments(parser)
    return parser.parse_args(words(folder, *more))


def test_variation_is_deviation_over_mean() -> None:
    assert stability.variation([1.0, 2.0, 3.0]) == pytest.approx(0.5)
    assert stability.variation([4.0, 4.0]) == 0.0


def test_a_model_loaded_again_says_the_same(folder: Path) -> None:
    told = Told()
    outcome = stability.run(arguments(folder), told)
    assert len(told.shares) == len(told.messages)
    assert told.shares == sorted(told.shares)
    assert outcome.passed
    assert [row["kv"] for row in outcome.data["results"]] == ["fp16", "iso3"]
    for row in outcome.data["results"]:
        assert len(row["ppl"]) == len(row["tokens_per_s"]) == 3
        assert row["ppl_variation"] == 0.0
        assert row["same_tokens"]
    first, second = outcome.data["results"]
    assert first["ppl"][0] != second["ppl"][0]


def test_a_model_that_changes_does_not_pass(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real, loads = inputs.load_model, []

    def drifting(*args: object) -> object:
        loaded = real(*args)  # type: ignore[arg-type]
        loads.append(loaded)
        loaded.model.lm_head.weight.data = loaded.model.lm_head.weight.data.roll(len(loads) - 1, 0)
        return loaded

    monkeypatch.setattr(inputs, "load_model", drifting)
    status, out, _ = run("eval", "stability", *words(folder))
    assert len(loads) == 3
    assert status == 1
    assert out.splitlines()[-1].split()[-1] == "no"


def test_too_little_to_compare_is_one_clear_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="reloads=1"):
        stability.run(arguments(folder, "--reloads", "1"), lambda *_: None)
