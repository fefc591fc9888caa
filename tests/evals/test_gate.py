"""The gate fails what must not go out, above all what still sounds fluent."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rotaryquant.evals import gate
from rotaryquant.evals.gate import Limits, is_json, judge, repetition
from rotaryquant.evals.peers import parse_spec
from rotaryquant.evals.prompts import PROMPTS, GatePrompt
from rotaryquant.evals.simulated import Peer, Simulation
from rotaryquant.evals.teacher_forcing import PathError
from rotaryquant.integrations.transformers.checkpoints import Loaded
from support.commands import Run, is_error
from support.models import tiny
from support.progress import Told
from support.tiny_llm import byte_tokenizer, save_tiny

PLAIN, JSON = GatePrompt("plain", "?"), GatePrompt("data", "?", json=True)
FINE: dict[str, Any] = {
    "repetition": 0.1, "exact_repetition": 0.1, "json": True, "exact_json": True, "kld_mean": 0.01
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return Loaded("tiny", Path(), tiny(max_position_embeddings=2048), byte_tokenizer())


def arguments(folder: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    gate.add_arguments(parser)
    return parser.parse_args([str(folder), "--threads", "1", *words])


def test_repetition_is_the_share_of_runs_said_before() -> None:
    assert repetition([1, 2, 3, 4, 5, 6, 7, 8]) == 0.0
    assert repetition([]) == repetition([1, 2, 3, 4]) == 0.0
    assert repetition([1, 2, 3, 4] * 2) == pytest.approx(1 / 5)  # 1234 again, of five runs
    assert repetition([7] * 100) == pytest.approx(96 / 97)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"a": [1, 2]}', True),
        ('  [1, {"b": null}]\n', True),
        ('```json\n{"a": 1}\n```', True),
        ('```\n{"a": 1}\n```', True),
        ('{"a": 1', False),
        ('Here you are: {"a": 1}', False),
        ('{"a": 1} {"b": 2}', False),
        ("3", False),
        ("", False),
        ("{'a': 1}", False),
    ],
)
def test_json_is_one_value_and_nothing_else(text: str, wanted: bool) -> None:
    assert is_json(text) is wanted


@pytest.mark.parametrize(
    ("prompt", "change", "strict", "reasons"),
    [
        (PLAIN, {}, True, []),
        (PLAIN, {"repetition": 0.3}, False, ["repetition 0.30 > 0.22"]),
        (PLAIN, {"repetition": 0.3, "exact_repetition": 0.35}, False, []),
        (PLAIN, {"repetition": 0.3, "exact_repetition": 0.35}, True, ["repetition 0.30 > 0.22"]),
        (PLAIN, {"json": False}, True, []),
        (JSON, {"json": False}, False, ["not JSON"]),
        (JSON, {"json": False, "exact_json": False}, False, []),
        (JSON, {"json": False, "exact_json": False}, True, ["not JSON"]),
        (PLAIN, {"kld_mean": 0.06}, False, ["divergence 0.060 > 0.05"]),
        (JSON, {"kld_mean": 0.06, "repetition": 0.9, "json": False}, False,
         ["repetition 0.90 > 0.22", "not JSON", "divergence 0.060 > 0.05"]),
    ],
)  # fmt: skip
def test_what_an_answer_may_not_do(
    prompt: GatePrompt, change: dict[str, Any], strict: bool, reasons: list[str]
) -> None:
    assert judge(prompt, FINE | change, Limits(strict=strict)) == reasons


def test_there_are_twelve_prompts_of_both_kinds() -> None:
    assert len({prompt.name for prompt in PROMPTS}) == len({prompt.text for prompt in PROMPTS}) == 12
    assert sum(prompt.json for prompt in PROMPTS) == 4


def test_the_answer_is_that_of_greedy_generation(loaded: Loaded) -> None:
    ids = gate.prompt_ids(loaded, PROMPTS[0])
    said = gate.answer(loaded, ids, None, 30)
    wanted = loaded.model.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False)[0, len(ids) :].tolist()
    ends = [i for i, token in enumerate(wanted) if token in loaded.end_ids]
    assert said.ids == (wanted[: ends[0]] if ends else wanted)
    assert said.ended == bool(ends)


class _Swapped:
    """Values of the other half of a row: fluent nonsense."""

    key_bits = value_bits = 16.0

    def keys(self, rows: Tensor) -> Tensor:
        return rows

    def values(self, rows: Tensor) -> Tensor:
        return rows.roll(rows.shape[-1] // 2, -1)


def test_a_damaged_cache_fails_by_divergence_alone(loaded: Loaded) -> None:
    """Neither repetition nor JSON would tell."""
    plain = parse_spec("int8,sinks=0,tail=0")
    assert isinstance(plain, Simulation)
    damaged = Simulation(Peer("swapped", "nowhere", "a test", lambda place: _Swapped()), plain.config)
    good, bad = (gate.one_prompt(loaded, PROMPTS[1], kv, 40, Limits(divergence=1e-3)) for kv in (plain, damaged))
    assert good["reasons"] == []
    assert [reason.split()[0] for reason in bad["reasons"]] == ["divergence"]
    assert bad["kld_mean"] > 20 * good["kld_mean"]
    assert bad["packed_reads"] == good["packed_reads"] > 0


def test_the_verdict_is_over_tokens_and_sets_the_exit_status(folder: Path, run: Run) -> None:
    words = ("eval", "gate", str(folder), "--tokens", "12", "--threads", "1", "--repetition", "1")
    status, out, _ = run(*words, "--divergence", "5")
    assert status == 0
    assert out.splitlines()[0].endswith("kv=iso3: passes")
    status, out, _ = run(*words, "--divergence", "1e-9")
    assert status == 1
    assert "does not pass: " in out.splitlines()[0]
    told = Told()
    data = gate.run(arguments(folder, "--tokens", "12", "--divergence", "5", "--repetition", "1"), told).data
    assert told.advanced()
    total = sum(row["exact_tokens"] for row in data["results"])
    assert data["kld_mean"] == pytest.approx(
        sum(row["kld_mean"] * row["exact_tokens"] for row in data["results"]) / total
    )
    assert data["passed"] is True


def test_answers_that_read_nothing_packed_are_no_verdict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "PROMPTS", (GatePrompt("short", "Hi"),))
    with pytest.raises(PathError, match="no answer was long enough to read packed rows"):
        gate.run(arguments(folder, "--tokens", "5"), lambda *_: None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv", "fp16"], "packs nothing"),
        (["--tokens", "0"], "tokens=0"),
        (["--repetition", "1.5"], "repetition=1.5"),
        (["--divergence", "0"], "divergence=0"),
        (["--kv", "iso9"], "peers: int2"),
    ],
)
def test_wrong_options_are_one_line(run: Run, words: list[str], message: str) -> None:
    is_error(run("eval", "gate", "/nowhere", *words), 2, message)
