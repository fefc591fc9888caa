"""Perplexity at several contexts agrees with what fidelity says of the same windows."""

import argparse
from pathlib import Path

import pytest

from rotaryquant.errors import ConfigError
from rotaryquant.evals import fidelity, perplexity
from support.progress import Told
from support.tiny_llm import save_tiny

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    (folder / "text.txt").write_text(TEXT)
    return folder


def arguments(module: object, folder: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    return parser.parse_args([str(folder), "--text", str(folder / "text.txt"), "--threads", "1", *words])


def test_it_is_what_fidelity_measures(folder: Path) -> None:
    words = ("--kv", "iso3", "--kv", "kivi2,sinks=4", "--tokens", "500")
    told = Told()
    found = perplexity.run(arguments(perplexity, folder, *words, "--context", "512,1024"), told).data
    assert told.advanced()
    for context in (512, 1024):
        args = arguments(fidelity, folder, *words, "--context", str(context), "--any-baseline")
        told = Told()
        wanted = fidelity.run(args, told).data
        assert told.advanced()
        rows = {row["kv"]: row for row in found["results"] if row["context"] == context}
        assert rows["fp16"]["ppl"] == pytest.approx(wanted["ppl_ref"], rel=1e-5)
        assert rows["fp16"]["ppl_ratio"] == 1.0
        for row in wanted["results"]:
            assert rows[row["kv"]]["ppl"] == pytest.approx(row["ppl"], rel=1e-5)
            assert rows[row["kv"]]["ppl_ratio"] == pytest.approx(row["ppl_ratio"], rel=1e-5)
            assert rows[row["kv"]]["tokens"] == row["tokens"]


def test_the_table_has_a_column_for_each_context(folder: Path) -> None:
    outcome = perplexity.run(arguments(perplexity, folder, "--tokens", "100", "--context", "512,600"), lambda *_: None)
    assert outcome.headers == ["kv", "context 512", "context 600"]
    assert [row[0] for row in outcome.rows] == ["fp16", "iso3"]
    assert all(len(row) == 3 for row in outcome.rows)
    assert outcome.rows[0][1].endswith("(1.0000)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", "512,4K"], "--context '4K'"),
        (["--context", "100"], "--context '100': wanted numbers of at least 512"),
        (["--context", ""], "--context ''"),
        (["--tokens", "0"], "tokens=0"),
        (["--tokens", "99999"], "99999"),
        (["--kv", "iso9"], "peers: int2"),
    ],
)
def test_wrong_options_are_one_clear_error(folder: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        perplexity.run(arguments(perplexity, folder, *words), lambda *_: None)
