"""`plan`: one screen, one object, an exit status, and refusals in one line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.commands import Run, is_error


def planned(run: Run, *words: str) -> tuple[int, dict[str, Any]]:
    status, out, err = run("plan", *words, "--json")
    assert err == ""
    data: dict[str, Any] = json.loads(out)
    return status, data


def test_the_screen_of_a_model_that_fits(run: Run, model: str) -> None:
    status, out, err = run("plan", model, "--memory", "2GB", "--context", "512", "--clients", "2")
    assert (status, err) == (0, "")
    for part in ("tiny (llama):", "weights of every token", "cache of 512 tokens", "2 × ", "of 2.00 GB: fits"):
        assert part in out
    for part in ("embedding", "Attention over a 16-bit cache takes", "It fits:"):
        assert part in out
    assert max(map(len, out.splitlines())) <= 200


def test_the_screen_of_a_model_that_does_not(run: Run, model: str) -> None:
    status, out, err = run("plan", model, "--memory", "480MB", "--context", "1024")
    assert (status, err) == (1, "")
    assert "It does not fit, and no recipe, cache or number of clients makes it" in out


def test_the_object(run: Run, model: str) -> None:
    status, data = planned(run, model, "--memory", "2GB", "--context", "512")
    assert (status, data["fits"]) == (0, True)
    assert data["weight_bytes"] == sum(role["planned_bytes"] for role in data["roles"])
    assert set(data["roles"][0]["bytes_at_bits"]) == {"2", "3", "4", "8"}
    terms = ("process", "always", "experts", "caches", "prompt", "working", "compiled", "mapped")
    assert data["peak"]["peak"] == sum(data["peak"][term] for term in terms)
    assert data["sequence"]["total_bytes_16bit"] == 2 * 2 * 32 * 512 * 4
    assert planned(run, model, "--memory", "2GB")[1]["context"] == 1024  # what the model has
    status, data = planned(run, model, "--memory", "480MB", "--context", "512", "--kv", "fp16", "--disk", "7GB/s")
    assert (status, data["fits"], data["kv"]) == (1, False, "fp16")


def test_a_packed_checkpoint(run: Run, model: str, tmp_path: Path) -> None:
    out = str(tmp_path / "packed")
    assert run("quantize", model, "-o", out, "--recipe", "uniform-4")[0] == 0
    ahead = planned(run, model, "--memory", "2GB", "--context", "512", "--recipe", "uniform-4")[1]
    there = planned(run, out, "--memory", "2GB", "--context", "512")[1]
    assert ahead["weight_bytes"] == there["weight_bytes"]
    assert ahead["parameters"] == there["parameters"]
    assert ahead["peak"] == there["peak"]
    is_error(run("plan", out, "--memory", "2GB", "--recipe", "uniform-3"), 2, "packed already", "use --recipe as-is")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "the following arguments are required: --memory"),
        (("--memory", "16"), "size '16' must be a number above 0 with a unit"),
        (("--memory", "1GB", "--disk", "3GB"), "speed '3GB' must be a size per second, such as 3GB/s"),
        (("--memory", "1GB", "--context", "0"), "--context=0 must be at least 1"),
        (("--memory", "1GB", "--context", "2048"), "--context=2048: the model has 1024 positions"),
        (("--memory", "1GB", "--clients", "-1"), "--clients=-1 must be at least 1"),
        (("--memory", "1GB", "--recipe", "role-auto"), "--recipe 'role-auto' is unknown or not known beforehand"),
        (("--memory", "1GB", "--kv", "iso9"), "kv='iso9' is unknown"),
    ],
)
def test_bad_usage(run: Run, model: str, options: tuple[str, ...], said: str) -> None:
    is_error(run("plan", model, *options), 2, said)


def test_models_that_cannot_be_planned(run: Run, tmp_path: Path) -> None:
    is_error(run("plan", str(tmp_path / "nowhere"), "--memory", "1GB"), 1, "no such folder")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    is_error(run("plan", str(tmp_path / "model.gguf"), "--memory", "1GB"), 2, "use `rotaryquant inspect` for GGUF")
    (tmp_path / "config.json").write_text("[]")
    is_error(run("plan", str(tmp_path), "--memory", "1GB"), 1, "config.json: not a JSON object")
    is_error(run("plan", "org/name", "--memory", "1GB"), 1, "org/name", "cannot be read from the hub", "go online")


def test_neither_torch_nor_transformers_is_imported(model: str) -> None:
    code = (
        "import sys\n"
        "from rotaryquant.cli.main import main\n"
        f"status = main(['plan', {model!r}, '--memory', '2GB', '--context', '512', '--json'])\n"
        "print(status, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
