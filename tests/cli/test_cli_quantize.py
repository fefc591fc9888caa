"""`quantize`, and what others make of its folder."""

import json
from pathlib import Path

import pytest

from support.commands import Run


def test_quantise_inspect_and_answer(run: Run, model: str, tmp_path: Path) -> None:
    out = str(tmp_path / "packed")
    status, shown, _ = run("quantize", model, "-o", out, "--recipe", "uniform-4", "--json")
    data = json.loads(shown)
    assert status == 0
    assert data["bytes"] == sum(row["nbytes"] for row in data["roles"])
    rows = {row["role"]: row for row in data["roles"]}
    assert rows["attention"]["bits"] < 5.1
    assert 0 < rows["attention"]["relative_error"] < 0.02
    assert rows["norm"]["relative_error"] == 0
    status, shown, _ = run("generate", out, "--prompt", "the", "--max-tokens", "3", "--json")
    assert status == 0
    status, shown, _ = run("inspect", out, "--json")
    assert status == 0
    assert json.loads(shown)["parameters"] == data["parameters"]


def test_the_table_and_what_is_said_of_a_wrong_input(run: Run, model: str, tmp_path: Path) -> None:
    status, shown, err = run("quantize", model, "-o", str(tmp_path / "a"), "--grid", "normal", "--no-rotation")
    assert status == 0
    assert "bits a weight" in shown
    assert "Use it as MODEL" in shown
    for options, said in (
        (("--recipe", "role-5"), "recipe 'role-5' is unknown; valid: role-4-2-8"),
        (("--grid", "cubic"), "grid='cubic' is unknown; valid: normal, trellis, uniform"),
        (("--group", "100"), "group=100 is unknown; valid: 32, 64, 128"),
        (("--method", "spqr"), "method='spqr' is unknown; valid: rtn, gptq, awq"),
        (("--method", "awq"), "--method awq wants --calibration FILE"),
        (("--method", "gptq"), "--method gptq wants --calibration FILE"),
        (("--calibration", str(tmp_path)), "--calibration is for --method gptq and awq and for --recipe role-auto"),
        (("--recipe", "role-auto"), "--recipe role-auto wants --size BYTES and --calibration FILE"),
        (("--size", "3MB"), "--size is for --recipe role-auto; recipe 'role-4-2-8' has the bits it has"),
        (("--sensitivity", "x"), "--sensitivity is for --recipe role-auto"),
        (("--recipe", "role-auto", "--size", "many"), "size 'many' must be a number above 0 with a unit"),
    ):
        status, _, err = run("quantize", model, "-o", str(tmp_path / "b"), *options)
        assert status == 2
        assert said in err
    assert not (tmp_path / "b").exists()
    status, _, err = run("quantize", str(tmp_path / "nowhere"), "-o", str(tmp_path / "b"))
    assert status == 1
    assert "no such folder" in err


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_text_says_what_errors_cost(run: Run, model: str, tmp_path: Path, method: str) -> None:
    (tmp_path / "text").write_text("the cat sat on the mat and looked at the dog who ran after a ball " * 400)
    options = ("--method", method, "--calibration", str(tmp_path / "text"), "--tokens", "4000", "--json")
    status, shown, err = run("quantize", model, "-o", str(tmp_path / "packed"), *options)
    assert status == 0, err
    data = json.loads(shown)
    assert (data["method"], data["starved_experts"]) == (method, {})
    lines = (tmp_path / "packed" / "quantization-log.jsonl").read_text().splitlines()
    samples = {line["role"]: line["samples"] for line in map(json.loads, lines)}
    assert samples["attention"] >= 4000
    assert samples["norm"] == 0
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert config["method"] == method
    assert len(config["text"]) >= 8
    status, shown, _ = run("inspect", str(tmp_path / "packed"), "--json")
    assert json.loads(shown)["parameters"] == data["parameters"]
    assert json.loads(shown)["weight_bytes"] == data["bytes"]
    status, shown, err = run("generate", str(tmp_path / "packed"), "--prompt", "the", "--max-tokens", "3", "--json")
    assert status == 0, err
    status, _, err = run("quantize", model, "-o", str(tmp_path / "packed2"), *options[:4], "--tokens", "9000000")
    assert status == 2
    assert "the text has" in err


@pytest.mark.usefixtures("run")
def test_kurtosis_of_packed_weights_is_refused(run: Run, model: str, tmp_path: Path) -> None:
    run("quantize", model, "-o", str(tmp_path / "packed"))
    status, _, err = run("inspect", str(tmp_path / "packed"), "--kurtosis")
    assert status != 0
    assert "not quantised yet" in err


def test_bits_are_chosen_under_a_size(run: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the cat sat on the mat and looked at the dog who ran after a ball " * 600)
    options = ("--recipe", "role-auto", "--calibration", str(tmp_path / "text"), "--tokens", "2000")
    kept = tmp_path / "kept.jsonl"
    sizes, files = [], []
    for size in ("60KB", "90KB"):
        out = tmp_path / size
        status, shown, err = run("quantize", model, "-o", str(out), *options, "--size", size, "--sensitivity",
                                 str(kept), "--json")  # fmt: skip
        assert status == 0, err
        assert json.loads(shown)["recipe"] == "role-auto"
        sizes.append((out / "model.safetensors").stat().st_size)
        files.append(kept.read_text())
    assert files[0] == files[1]
    assert 0.8 * 60_000 < sizes[0] <= 60_000
    assert sizes[0] < sizes[1] <= 90_000
    status, _, err = run("quantize", model, "-o", str(tmp_path / "none"), *options, "--size", "1KB")
    assert status == 2
    assert "size=1,000 bytes is below" in err
    assert "measuring" not in err
    assert not (tmp_path / "none").exists()
