"""`inspect`, `kernels` and `doctor`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rotaryquant.cli.doctor import PYTHON, TORCH, TRANSFORMERS, Finding, in_range, parse_version
from support.assets import REPOSITORY
from support.commands import Run
from support.kernels import force_kernel


def test_inspect_reads_headers_alone(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    status, out, _ = run("inspect", model, "--json", "--kv", "iso3-strict")
    data = json.loads(out)
    assert status == 0
    assert data["parameters"] > 0
    assert [layer["packable"] for layer in data["layers"]] == [True, True]
    assert data["kv_bytes_per_token_16bit"] == 256
    row = (32 * 3 // 8 + 2) * 2 * 2  # codes and scale, K and V, two layers
    assert data["kv_bytes_per_token_packed"] == row
    assert data["contexts"] == [{"tokens": 1024, "bytes_16bit": 1024 * 256, "bytes_stored": 1024 * row}]
    status, out, _ = run("inspect", model)
    assert status == 0
    assert "0-1" in out
    assert "1,024" in out


def test_inspect_tells_what_tensors_are_for(run: Run, model: str) -> None:
    status, out, _ = run("inspect", model, "--json", "--kurtosis")
    data = json.loads(out)
    rows = {row["role"]: row for row in data["roles"]}
    assert status == 0
    assert sum(row["parameters"] for row in rows.values()) == data["parameters"]
    assert sum(row["nbytes"] for row in rows.values()) == data["weight_bytes"]
    assert rows["attention"]["tensors"] == 4 * len(data["layers"])
    assert isinstance(rows["attention"]["kurtosis"], float)
    assert rows["norm"]["kurtosis"] is None
    assert [row["kurtosis"] for row in json.loads(run("inspect", model, "--json")[1])["roles"]] == [None] * len(rows)
    shown = run("inspect", model, "--kurtosis")[1]
    assert "kurtosis" in shown
    assert "kurtosis" not in run("inspect", model)[1]


def test_inspect_refuses_a_tensor_of_which_nobody_knows(run: Run, model: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "odd"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.mlp.mystery.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    status, _, err = run("inspect", str(folder))
    assert status == 1
    assert "tensor 'model.layers.0.mlp.mystery.weight': no rule says what it is for" in err


def test_inspect_a_gguf_file(run: Run, tmp_path: Path) -> None:
    from support.tiny_gguf import write_gguf

    status, out, _ = run("inspect", str(write_gguf(tmp_path / "tiny.gguf")), "--json", "--kv", "fp16")
    data = json.loads(out)
    assert status == 0
    assert (data["family"], data["max_context"], data["kv"]) == ("llama", 512, "fp16")
    assert data["contexts"][-1]["bytes_16bit"] == data["contexts"][-1]["bytes_stored"]
    assert {"embedding", "attention", "dense MLP", "norm"} <= {row["role"] for row in data["roles"]}
    status, _, err = run("inspect", str(tmp_path / "tiny.gguf"), "--kurtosis")
    assert status == 2
    assert "--kurtosis reads safetensors" in err


def test_kernels_lists_every_op_and_kernel(run: Run) -> None:
    from rotaryquant.ops.dispatch import explain

    _, out, _ = run("kernels", "--json")
    data = json.loads(out)
    assert [(row["op"], row["kernel"], row["reason"] or "ready") for row in data["kernels"]] == explain()
    _, out, _ = run("kernels")
    assert len(out.splitlines()) >= len(explain()) + 1


def test_a_forced_kernel_is_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    force_kernel(monkeypatch, "reference")
    assert "RQ_KERNEL=reference" in run("kernels")[1]
    assert json.loads(run("kernels", "--json")[1])["forced"] == "reference"


def test_doctor_tells_state_and_fix(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RQ_CACHE", str(tmp_path / "cache"))
    status, out, _ = run("doctor", "--json")
    checks = {check["check"]: check for check in json.loads(out)["checks"]}
    assert status == (1 if any(check["state"] == "fail" for check in checks.values()) else 0)
    assert checks["cache folder"]["state"] == "ok"
    (tmp_path / "file").touch()
    monkeypatch.setenv("RQ_CACHE", str(tmp_path / "file"))
    status, out, _ = run("doctor")
    assert status == 1
    assert "set RQ_CACHE to a folder you may write" in out


def test_doctor_notices_a_version_out_of_range(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from rotaryquant.cli import doctor

    monkeypatch.setattr(doctor, "_installed", lambda name: "5.25.0" if name == "transformers" else "9.9")
    finding = doctor._transformers()
    assert finding == Finding(
        "transformers", "fail", "5.25.0 is outside >=5.24,<5.25", "run `pip install 'transformers>=5.24,<5.25'`"
    )


def test_doctor_checks_the_ranges_that_the_package_declares() -> None:
    declared = (REPOSITORY / "pyproject.toml").read_text()

    def show(low: tuple[int, ...], high: tuple[int, ...] | None) -> str:
        return ">=" + ".".join(map(str, low)) + ("" if high is None else ",<" + ".".join(map(str, high)))

    assert f'requires-python = "{show(*PYTHON)}"' in declared
    assert f'"torch{show(*TORCH)}"' in declared
    assert f'"transformers{show(*TRANSFORMERS)}"' in declared


@pytest.mark.parametrize(
    ("text", "version"), [("2.13.0+cpu", (2, 13, 0)), ("5.24.0.dev0", (5, 24, 0)), ("5.24rc1", (5, 24)), ("x", ())]
)
def test_versions(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version


def test_ranges() -> None:
    assert in_range((5, 24, 9), (5, 24), (5, 25))
    assert not in_range((5, 25), (5, 24), (5, 25))
    assert not in_range((5, 9), (5, 24), None)
