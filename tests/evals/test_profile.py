"""The profile of a decode step: parts that add up, hooks that go away, and advice that follows the share."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from rotaryquant.evals import profile
from support.commands import Run, is_error
from support.models import tiny
from support.tiny_llm import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


def test_time_of_children_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 4.0, 9.0, 10.0])
    monkeypatch.setattr(profile.time, "process_time", lambda: next(now))  # tests run on one thread
    watch = profile._Watch(torch.device("cpu"))
    watch.enter()  # attention from 0 to 10
    for _ in range(2):  # its projections from 1 to 3 and from 4 to 9
        watch.enter()
        watch.leave("weights")
    watch.leave("attention")
    assert watch.spent == {"weights": 7.0, "attention": 3.0}


def test_hooks_go_away_even_after_an_error() -> None:
    model = tiny()
    with pytest.raises(RuntimeError, match="on purpose"), profile.watched(model):
        raise RuntimeError("on purpose")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_experts_and_their_layers_are_counted_once() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.up(x))

    model = nn.Module()
    model.experts, model.down = Experts(), nn.Linear(4, 4)
    with profile.watched(model) as watch:
        model.down(model.experts(torch.zeros(1, 4)))
    assert set(watch.spent) == {"experts", "weights"}


def test_parts_add_up_to_the_step(folder: Path, run: Run) -> None:
    status, out, _ = run("eval", "profile", str(folder), "--context", "600", "--steps", "6", "--threads", "1", "--json")
    assert status == 0
    data = json.loads(out)
    assert [row["kv"] for row in data["results"]] == ["fp16", "iso3"]
    for row in data["results"]:
        parts = [row[f"{part}_ms"] for part in ("attention", "weights", "experts", "rest")]
        assert sum(parts) == pytest.approx(row["step_ms"], rel=0.25)  # medians need not add up exactly
        assert min(parts[0], parts[1], parts[3]) > 0
        assert parts[2] == 0
    assert data["attention_share"] == data["results"][0]["attention_ms"] / data["results"][0]["step_ms"]
    assert f"{data['attention_share']:.0%} of a step after 600 tokens" in data["advice"]


def test_advice_follows_the_share() -> None:
    step = {"step": 10.0, "attention": 1.0}
    assert "10% of a step after 100 tokens with a 16-bit cache, not above the 20%" in profile.advice(
        step, step, "iso3", 100
    )
    busy = {"step": 20.0, "attention": 11.0}
    said = profile.advice(busy, step, "iso3", 100)
    assert "55% of a step" in said
    assert "here it pays; measured, a step with kv=iso3 is 2.00 times as fast" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv", "fp16"], "packs nothing"),
        (["--context", "0"], "context=0"),
        (["--context", "2040", "--steps", "30"], "need 2071 positions, the model has 2048"),
    ],
)
def test_wrong_options_are_one_line(folder: Path, run: Run, words: list[str], message: str) -> None:
    is_error(run("eval", "profile", str(folder), *words), 2, message)
