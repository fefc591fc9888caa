"""The ablation on a tiny model: every part, named by what took its place, against the base."""

import argparse
from pathlib import Path

import pytest

from rotaryquant.config import parse_kv
from rotaryquant.errors import ConfigError
from rotaryquant.evals import ablate
from support.tiny_llm import save_tiny


def arguments(folder: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ablate.add_arguments(parser)
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 40)
    return parser.parse_args(
        [
            str(folder),
            "--text",
            str(text),
            "--context",
            "512",
            "--tokens",
            "250",
            "--threads",
            "1",
            "--any-baseline",
            *words,
        ]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


def test_every_part_is_changed_alone() -> None:
    specs = ablate.specs_of("iso3")
    base = parse_kv("iso3")
    assert next(iter(specs)) == "iso3"
    for spec, config in list(specs.items())[1:]:
        changed = [
            field for field in ("rotation", "inverse", "signs", "scale", "mean", "correct", "sinks", "tail", "seed")
            if getattr(config, field) != getattr(base, field)
        ]  # fmt: skip
        assert len(changed) == 1, spec
        assert changed[0] in spec
    assert len(specs) == 1 + sum(map(len, ablate.CHANGES.values()))


def test_what_the_base_lacks_already_is_left_out() -> None:
    assert list(ablate.specs_of("iso3-strict", ["tail", "mean", "rotation", "scale"])) == [
        "iso3-strict",
        *(f"iso3-strict,rotation={kind}" for kind in ("none", "so3", "so4", "hadamard", "dense")),
        "iso3-strict,scale=mse",
        "iso3-strict,scale=norm",
    ]


def test_the_table_is_relative_to_the_base(folder: Path) -> None:
    said: list[str] = []
    outcome = ablate.run(arguments(folder, "--parts", "inverse,rotation"), said.append)
    rows = {row["kv"]: row for row in outcome.data["results"]}
    assert rows["iso3"]["against_base"]["ratio"] == 1.0
    assert rows["iso3,inverse=off"]["kld_mean"] > 3 * rows["iso3"]["kld_mean"]
    assert [row[0] for row in outcome.rows] == [
        "iso3", "inverse=off", "rotation=none", "rotation=so3", "rotation=so4", "rotation=hadamard", "rotation=dense"
    ]  # fmt: skip
    assert float(outcome.rows[1][4]) > 3
    assert all(row["packed_reads"] == rows["iso3"]["packed_reads"] > 0 for row in rows.values())
    assert said[0] == "window 1 of 1: iso3"


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--parts", "wheels"], "--parts 'wheels' is unknown; valid: rotation, "), (["--kv", "fp16"], "packs nothing")],
)
def test_nothing_to_take_apart_is_one_clear_error(folder: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ablate.run(arguments(folder, *words), print)
