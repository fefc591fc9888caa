"""The ablation on a tiny model: every part, named by what took its place, against the base."""

import argparse
from pathlib import Path

import pytest

from rotaryquant.config import parse_kv
from rotaryquant.errors import ConfigError
from rotaryquant.evals import ablate
from rotaryquant.evals.facts import CONTEXT
from support.progress import Told
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
    said = Told()
    outcome = ablate.run(arguments(folder, "--parts", "inverse,rotation"), said)
    rows = {row["kv"]: row for row in outcome.data["results"]}
    assert rows["iso3"]["against_base"]["ratio"] == 1.0
    assert rows["iso3,inverse=off"]["kld_mean"] > 3 * rows["iso3"]["kld_mean"]
    assert [row[0] for row in outcome.rows] == [
        "iso3", "inverse=off", "rotation=none", "rotation=so3", "rotation=so4", "rotation=hadamard", "rotation=dense"
    ]  # fmt: skip
    assert float(outcome.rows[1][4]) > 3
    assert outcome.rows[0][5] == "1.00..1.00"
    assert rows["iso3"]["kld_of_base"] == 1.0
    share = rows["iso3,inverse=off"]["kld_of_base"]
    assert share == pytest.approx(rows["iso3,inverse=off"]["kld_mean"] / rows["iso3"]["kld_mean"], rel=1e-3)
    (line,) = [line for line in outcome.lines if line.startswith("without random SO(4) blocks")]
    assert line.endswith((", no difference within the interval", ", better", ", worse"))
    assert all(row["packed_reads"] == rows["iso3"]["packed_reads"] > 0 for row in rows.values())
    assert said.messages[0] == "window 1 of 1: iso3"


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [((0.9, 1.1), "no difference within the interval"), ((0.7, 0.9), "better"), ((1.1, 2), "worse")],
)
def test_a_verdict_is_the_interval_s(interval: tuple[float, float], verdict: str) -> None:
    row = {"kld_of_base": sum(interval) / 2, "kld_of_base_low": interval[0], "kld_of_base_high": interval[1]}
    assert ablate._verdict(row).endswith(f" of the base's, {verdict}")


def test_a_calibration_text_adds_learned_blocks_and_errors_of_codes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablate, "CALIBRATION_TOKENS", 4 * CONTEXT)
    monkeypatch.setattr(ablate, "_SEEDS", range(3))
    (tmp_path / "other.txt").write_text("".join(chr(97 + number * number % 26) for number in range(5 * CONTEXT)))
    said = Told()
    words = ["--parts", "rotation,signs", "--calibration", str(tmp_path / "other.txt")]
    outcome = ablate.run(arguments(folder, *words), said)
    rows = {row["kv"]: row for row in outcome.data["results"]}
    learned, base = rows["iso3,so4-learned"], rows["iso3"]
    assert list(rows)[-1] == "iso3,so4-learned"
    assert learned["bits_per_value"] == base["bits_per_value"]
    assert learned["packed_reads"] == base["packed_reads"] > 0
    assert learned["kld_mean"] != base["kld_mean"]
    assert learned["key_error"] < base["key_error"]
    assert learned["value_error"] < base["value_error"]
    assert 0.01 < base["value_error"] < 0.06
    assert outcome.headers[-2:] == ["key error", "value error"]
    assert outcome.rows[0][-2:] == ["1.000", "1.000"]
    assert outcome.rows[-1][0] == "so4-learned"
    share = outcome.data["random_blocks_value_error"]
    assert share["low"] <= share["ratio"] <= share["high"]
    assert any(line.startswith("with learned SO(4) blocks in place of random ones: kld ") for line in outcome.lines)
    assert any(line.startswith("random SO(4) blocks after Hadamard and signs, over 3 seeds") for line in outcome.lines)
    assert said.messages[:3] == ["calibration on 4,096 tokens", "learning SO(4) blocks", "errors of codes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calibration", "text.txt"], "is the text that is scored; use another"),
        (["--calibration", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["--calibration", "text.txt", "--kv", "turbo3"], "kv=turbo3: blocks are learned for rotation=isoquant"),
    ],
)
def test_a_calibration_that_cannot_be_is_one_clear_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    made = arguments(folder, *words)
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=message):
        ablate.run(made, print)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--parts", "wheels"], "--parts 'wheels' is unknown; valid: rotation, "), (["--kv", "fp16"], "packs nothing")],
)
def test_nothing_to_take_apart_is_one_clear_error(folder: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ablate.run(arguments(folder, *words), print)
