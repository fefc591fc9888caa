"""`eval ruler` from its options to its report, on a tiny random model."""

import json
from pathlib import Path

import pytest

from rotaryquant.evals.retrieval.tasks import TASKS
from support.commands import Run, is_error
from support.tiny_llm import save_tiny

FILLER = "\n".join(f"Line {number} says something plain about rain. It goes on for a while." for number in range(200))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


def test_every_task_has_a_cell(folder: Path, tmp_path: Path, run: Run) -> None:
    text = tmp_path / "filler.txt"
    text.write_text(FILLER, encoding="utf-8")
    status, out, _ = run(
        "eval", "ruler", str(folder), "--text", str(text), "--context", "4096", "--questions", "1", "--threads", "1",
        "--plot", str(tmp_path / "grid.png"), "--json",
    )  # fmt: skip
    data = json.loads(out)
    assert status == 1
    assert [row["row"] for row in data["results"]] == list(TASKS)
    assert {row["row"]: row["questions"] for row in data["results"]} == {
        "single": 1, "multi-key": 4, "multi-value": 4, "multi-query": 4, "tracking": 2, "common": 4,
    }  # fmt: skip
    reads = {row["row"]: row["packed_reads_per_answer"] for row in data["results"]}
    # two and three turns read as much more
    assert reads["multi-value"] > 1.5 * reads["multi-key"]
    assert reads["multi-query"] > 2.5 * reads["multi-key"]
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_task_is_one_line(folder: Path, run: Run) -> None:
    is_error(run("eval", "ruler", str(folder), "--text", "x", "--tasks", "single,poem"), 2, "'poem'", "multi-key")
