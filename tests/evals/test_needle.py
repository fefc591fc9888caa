"""`eval needle` from its options to its report, on a tiny random model."""

import json
from pathlib import Path
from typing import Any

import pytest

from rotaryquant.evals.retrieval import grid, measure
from rotaryquant.evals.retrieval.questions import Score
from support.commands import Run, is_error
from support.tiny_llm import byte_tokenizer, save_tiny

FILLER = "\n".join(f"Line {number} says something plain about rain. It goes on for a while." for number in range(200))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "filler.txt"
    path.write_text(FILLER, encoding="utf-8")
    return path


def words(folder: Path, text: Path, *more: str) -> list[str]:
    return ["eval", "needle", str(folder), "--text", str(text), "--threads", "1", *more]


def test_a_run_reports_every_cell_and_is_no_pass_without_one_that_counts(
    folder: Path, text: Path, tmp_path: Path, run: Run
) -> None:
    prefix, picture = tmp_path / "needle", tmp_path / "grid.png"
    status, out, _ = run(
        *words(folder, text, "--context", "1024,768", "--depths", "100,0", "--questions", "3", "--needles", "2"),
        "--kv", "iso3", "--kv", "int4,sinks=4,tail=48", "-o", str(prefix), "--plot", str(picture),
    )  # fmt: skip
    assert status == 1
    assert "kv=iso3: no cell of 4 counts, so that nothing is shown; this is not a pass" in out
    assert "4 facts in each context, 2 at each depth, all of them asked" in out
    data = json.loads(prefix.with_suffix(".json").read_text())
    assert data["passed"] is False
    assert data["needles"] == 2
    assert data["form"] == "chat"
    assert data["contexts"] == [768, 1024]
    places = [(row["kv"], row["context"], row["row"]) for row in data["results"]]
    assert places == [
        (kv, length, depth)
        for kv in ("iso3", "int4,sinks=4,tail=48")
        for length in (768, 1024)
        for depth in ("0%", "100%")
    ]
    for row in data["results"]:
        assert (row["questions"], row["contexts"], row["verdict"]) == (4, 2, "too few questions")
        assert row["packed_reads_per_answer"] > 0
        assert 3 < row["bits_per_value"] < 8
    assert set(data["seconds_per_question"]) == {"fp16", "iso3", "int4,sinks=4,tail=48"}
    assert "too few questions" in prefix.with_suffix(".md").read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_passes_exits_with_0_and_one_that_does_not_with_1(
    folder: Path, text: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rule that this model can meet, and answers that are what the cache makes of them."""
    monkeypatch.setattr(grid, "QUESTIONS", 2)
    monkeypatch.setattr(grid, "CONTEXTS", 1)
    rights: list[bool] = []
    monkeypatch.setattr(measure, "score", lambda question, answers: Score(float(rights[0]), rights.pop(0)))
    short = words(folder, text, "--context", "768", "--depths", "paper", "--questions", "4")
    rights[:] = [True] * 8
    status, out, _ = run(*short)
    assert status == 0
    assert "kv=iso3: passes; 1 of 1 cells count" in out
    assert "4 facts in each context, 4 at each depth" in out
    rights[:] = [True] * 4 + [True, True, False, True]
    status, out, _ = run(*short)
    assert status == 1
    assert "kv=iso3: does not pass: 1 reach down to -3 points or further" in out
    rights[:] = [False] * 4  # and no more: packed caches are not asked what the 16-bit one cannot do
    status, out, _ = run(*short, "--kv", "iso4", "--kv", "iso3", "--json", "--plot", str(tmp_path / "grid.png"))
    assert status == 1
    cells = json.loads(out)["results"]
    assert [(cell["kv"], cell["verdict"]) for cell in cells] == [(kv, "not discriminating") for kv in ("iso4", "iso3")]
    assert not any(key in cell for cell in cells for key in ("accuracy", "difference_low", "bits_per_value"))
    assert json.loads(out)["passed"] is False
    rights[:] = [False] * 4
    status, out, _ = run(*short)
    assert status == 1
    assert "no cell of 1 counts" in out
    assert "not discriminating" in out


def test_a_model_without_a_template_is_asked_to_continue(text: Path, tmp_path: Path, run: Run) -> None:
    plain = save_tiny(tmp_path / "plain", byte_tokenizer(template=None), max_position_embeddings=2048)
    found: list[Any] = []
    for seed in ("1", "1", "2"):
        _, out, _ = run(
            *words(plain, text, "--context", "768", "--depths", "50", "--questions", "1", "--seed", seed, "--json")
        )
        found.append(json.loads(out))
    assert found[0]["form"] == "cloze"
    assert found[0]["results"] == found[1]["results"]
    assert found[0]["results"] != found[2]["results"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--context", "100"], "--context '100': wanted numbers of at least 512"),
        (["--context", "1k"], "--context '1k'"),
        (["--context", "4096"], "this model has 2048 positions"),
        (["--depths", "50,101"], "--depths '101': wanted numbers of 0 to 100"),
        (["--depths", "middle"], "--depths 'middle'"),
        (["--needles", "0"], "needles=0 at 5 depths"),
        (["--needles", "9"], "a context holds 1 to 40 facts"),
        (["--questions", "0"], "questions=0"),
        (["--batch", "0"], "batch=0"),
        (["--kv", "fp16"], "--kv fp16: the 16-bit cache is what others are compared with"),
        (["--kv", "iso9"], "iso9"),
        (["--context", "768", "--form", "poem"], "--form 'poem'"),
        (["--plot", "/nowhere/at/all.png"], "is no folder"),
    ],
)
def test_wrong_options_are_one_line(folder: Path, text: Path, run: Run, more: list[str], message: str) -> None:
    is_error(run(*words(folder, text, *more)), 2, message)
