"""The command around the benchmarks: what it refuses, prints and writes."""

import json
from pathlib import Path

import pytest

from rotaryquant.cli import bench
from rotaryquant.cli.measurements import command_line
from support.commands import Run, is_error

SMALL = ("attention", "--lengths", "64", "--shapes", "4/2/64", "--repeats", "1")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["attention", "--shapes", "32/4"], ["--shapes", "'32/4'", "32/4/128"]),
        (["attention", "--shapes", "32/4/128,8/x/64"], ["'8/x/64'"]),
        (["attention", "--shapes", "32/0/128"], ["'32/0/128'"]),
        (["attention", "--shapes", "9/2/64"], ["9/2/64", "no multiple of 2"]),
        (["attention", "--shapes", "4/2/68"], ["4/2/68", "width=68"]),
        (["attention", "--shapes", "4/2/72"], ["4/2/72", "head width 72", "rotation=dense"]),
        (["attention", "--lengths", "512,0"], ["--lengths", "'0'", "at least 1"]),
        (["attention", "--lengths", "4K"], ["--lengths", "'4K'"]),
        (["attention", "--threads", "1,-2"], ["--threads", "'-2'"]),
        (["attention", "--repeats", "0"], ["--repeats=0"]),
        (["attention", "--kv", "iso9"], ["iso9", "iso3"]),
        (["attention", "--kv", "fp16"], ["'fp16'", "packs nothing"]),
        (["attention", "--device", "cuda"], ["device='cuda'", "cpu"]),
        (["attention", "--len", "5"], ["--len"]),
        (["attention", "-o", "/nowhere/at/all"], ["/nowhere/at is no folder"]),
        (["append", "--rotations", "isoquant,givens"], ["--rotations", "'givens'", "hadamard"]),
        (["append", "--shapes", "4/2/72"], ["4/2/72", "rotation=isoquant", "head width 72"]),
        (["append", "--device", "mps"], ["device='mps'"]),
        (["decode"], ["MODEL"]),
        (["decode", "x/y", "--depths", "-1"], ["--depths"]),
        (["decode", "x/y", "--against", "fp64"], ["--against", "'fp64'", "bf16"]),
        (["decode", "x/y", "--peers", "vllm"], ["--peers", "'vllm'", "quanto"]),
        (["decode", "x/y", "--steps", "0"], ["--steps=0"]),
        (["decode", "x/y", "--pairs", "0"], ["--pairs=0"]),
        (["decode", "x/y", "--threads", "0"], ["--threads=0"]),
        (["decode", "x/y", "--kv", "fp16"], ["packs nothing"]),
        (["decode", "x/y", "--text", "/nowhere.txt"], ["/nowhere.txt", "cannot be read"]),
        (["decode", "x/y", "--llama-gguf", "/nowhere.gguf"], ["/nowhere.gguf", "no such file"]),
        (["roofs"], ["'roofs'", "attention", "decode"]),
    ],
)
def test_wrong_options_are_one_line(run: Run, words: list[str], parts: list[str]) -> None:
    is_error(run("bench", *words), 2, *parts)


def test_a_missing_model_is_one_line(run: Run) -> None:
    is_error(run("bench", "decode", "/nowhere"), 1, "/nowhere")


@pytest.mark.parametrize("name", bench.BENCH.names)
def test_every_benchmark_explains_itself(run: Run, name: str) -> None:
    status, out, _ = run("bench", name, "--help")
    assert status == 0
    assert out.startswith(f"usage: rotaryquant bench {name}")
    for option in ("--json", "--device", "--output", "--bits" if name in ("matmul", "experts") else "--kv"):
        assert option in out
    assert run("bench")[0] == 2
    assert name in run("bench", "--help")[1]


def test_the_table_begins_with_the_ratio_and_says_how_it_was_timed(run: Run) -> None:
    status, out, _ = run("bench", *SMALL)
    lines = out.splitlines()
    assert status == 0
    table = next(index for index, line in enumerate(lines) if line.split()[:1] == ["ratio"])
    assert float(lines[table + 1].split()[0]) > 0
    assert any("1 interleaved round, 1 thread: process CPU time; ratio is peer over ours" in line for line in lines)
    assert any(line.startswith("roofs") for line in lines[:table])


def test_output_is_written_twice(run: Run, tmp_path: Path) -> None:
    prefix = tmp_path / "found"
    status, out, _ = run("bench", *SMALL, "--json", "-o", str(prefix))
    assert status == 0
    assert json.loads(prefix.with_suffix(".json").read_text()) == json.loads(out)
    text = prefix.with_suffix(".md").read_text()
    assert "rotaryquant bench attention --lengths 64" in text
    header = next(line for line in text.splitlines() if line.startswith("| ratio |"))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert len({line.count("|") for line in rows}) == 1
    assert "kernel" in header


def test_the_command_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    (tmp_path / "text.txt").write_text("x")
    words = [str(tmp_path / "my model"), "--json", "-o", "/a/b", "--kv", "iso3,sinks=0", f"--text={tmp_path}/text.txt"]
    wanted = "rotaryquant bench decode 'my model' --kv iso3,sinks=0 --text=text.txt"
    assert command_line("bench", ["decode", *words]) == wanted
    assert command_line("bench", ["decode", *words, "--output=/c", "-o/d"]) == wanted
