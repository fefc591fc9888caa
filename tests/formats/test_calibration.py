"""Calibration files: what was written comes back, and what cannot be used is refused with its name and a way out."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rotaryquant.errors import CalibrationError
from rotaryquant.formats.calibration import (
    Calibration,
    LayerSensitivity,
    StreamCost,
    read_calibration,
    write_calibration,
)
from rotaryquant.formats.fit import Fit


def fit(heads: int, width: int) -> Fit:
    """Directions of different weight and length, numbers that 16 bits hold."""
    metric = np.stack([np.diag(1 + head + np.arange(width) % 4) for head in range(heads)])
    return Fit(metric, metric[:, ::-1, ::-1] / 2, np.arange(heads * width).reshape(heads, width))


LAYERS = (
    LayerSensitivity(
        0, 2, 64, StreamCost((0.5, 0.125), (0.25, 0.0625), fit(2, 64)), StreamCost((1, 0.5), (2, 3), fit(2, 64))
    ),
    LayerSensitivity(3, 1, 128, StreamCost((0, 0), (0, 0), fit(1, 128)), StreamCost((1.5, 0), (0, 8), fit(1, 128))),
)
MADE = Calibration("abc", "tiny", "def", 2048, 1024, (2, 3), "rotaryquant calibrate tiny", LAYERS)
HEADER = {
    "version": 4, "model": "abc", "name": "tiny", "text": "def", "tokens": 1, "context": 2, "probe_bits": [2, 3],
    "command": "made",
}  # fmt: skip


def parts(*streams: str) -> dict[str, Any]:
    """Tensors of the fits of these streams."""
    one = fit(2, 64)
    return {f"{stream}.{part}": getattr(one, part) for stream in streams for part in ("metric", "balance", "mean")}


def written(
    path: Path, *, sizes: Any = None, costs: Any = None, fits: Any = None, kind: str = "", **header: Any
) -> Path:
    """A file that differs from a good one in what is named. fits: parts of that of layer 1's keys."""
    tensors = {
        "layers": np.array([[0, 2, 64], [1, 2, 64]], np.int32) if sizes is None else np.array(sizes, np.int32),
        "costs": np.ones((2, 2, 2, 2), np.float32) if costs is None else np.array(costs, np.float32),
    }
    tensors |= parts("0.keys", "0.values", "1.keys", "1.values")
    tensors |= {f"1.keys.{part}": np.asarray(array, np.float32) for part, array in (fits or {}).items()}
    metadata = {"format": kind or "rotaryquant-calibration", "header": json.dumps(HEADER | header)}
    save_file(tensors, path, metadata=metadata)
    return path


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    write_calibration(tmp_path / "side.safetensors", MADE)
    made = read_calibration(tmp_path / "side.safetensors")
    assert made == MADE
    for got, want in zip(made.layers, LAYERS, strict=True):
        for which in ("metric", "balance", "mean"):
            assert np.array_equal(getattr(got.keys.fit, which), getattr(want.keys.fit, which))
            assert np.array_equal(getattr(got.values.fit, which), getattr(want.values.fit, which))
    assert [path.name for path in tmp_path.iterdir()] == ["side.safetensors"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "side.safetensors"
    write_calibration(path, MADE)

    def full(*args: object, **kwargs: object) -> None:
        Path(str(args[1])).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("rotaryquant.formats.calibration.save_file", full)
    with pytest.raises(OSError, match="no space"):
        write_calibration(path, dataclasses.replace(MADE, tokens=1))
    assert read_calibration(path) == MADE
    assert [entry.name for entry in tmp_path.iterdir()] == ["side.safetensors"]


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"gone.safetensors: no such file; .*rotaryquant calibrate"):
        read_calibration(tmp_path / "gone.safetensors")


@pytest.mark.parametrize("content", [b"", b"text", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "side").write_bytes(content)
    with pytest.raises(CalibrationError, match="not a readable safetensors file"):
        read_calibration(tmp_path / "side")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write_calibration(tmp_path / "side", MADE)
    whole = (tmp_path / "side").read_bytes()
    (tmp_path / "side").write_bytes(whole[:-4])
    with pytest.raises(CalibrationError, match="not a readable"):
        read_calibration(tmp_path / "side")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "rotaryquant-kv"}, "format is 'rotaryquant-kv'"),
        ({"version": 1}, "version is 1, this package reads 4"),
        ({"fits": {"metric": np.zeros((2, 64, 63))}}, r"1\.keys\.metric is"),
        ({"fits": {"balance": np.zeros((1, 64, 64))}}, r"1\.keys\.balance is"),
        ({"fits": {"mean": np.zeros((2, 63))}}, r"1\.keys\.mean is"),
        ({"fits": {"metric": np.full((2, 64, 64), np.nan)}}, r"1\.keys\.metric holds no number"),
        ({"fits": {"mean": np.full((2, 64), np.inf)}}, r"1\.keys\.mean holds no number"),
        ({"fits": {"metric": np.stack([np.triu(np.ones((64, 64)))] * 2)}}, "not symmetric"),
        ({"fits": {"balance": np.stack([np.triu(np.ones((64, 64)))] * 2)}}, "not symmetric"),
        ({"fits": {"metric": np.stack([-np.eye(64)] * 2)}}, r"1\.keys\.metric has a negative eigenvalue"),
        ({"fits": {"balance": np.stack([np.eye(64), -np.eye(64)])}}, r"1\.keys\.balance is no positive definite"),
        ({"fits": {"balance": np.zeros((2, 64, 64))}}, r"1\.keys\.balance is no positive definite"),
        ({"fits": {"balance": np.stack([np.diag([1.0] * 63 + [1e-4])] * 2)}}, "that can be undone"),
        ({"surplus": 1}, "incomplete"),
        ({"sizes": [[0, 2, 64]]}, "wanted"),
        ({"sizes": [[1, 2, 64], [0, 2, 64]]}, "ascending"),
        ({"sizes": [[0, 0, 64], [1, 2, 64]]}, "without heads"),
        ({"costs": np.full((2, 2, 2, 2), np.nan)}, "negative or no number"),
        ({"costs": np.full((2, 2, 2, 2), -1.0)}, "negative or no number"),
        ({"costs": np.ones((1, 2, 2, 2))}, "wanted"),
        ({"costs": np.ones((2, 2, 2, 1))}, r"wanted \[n, 3\] and \[n, 2, 2, 2\]"),
        ({"probe_bits": [3, 2]}, "probe_bits is"),
        ({"probe_bits": []}, r"wanted \[n, 3\] and \[n, 2, 2, 0\]"),
        ({"probe_bits": 2}, "incomplete"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=says):
        read_calibration(written(tmp_path / "side", **change))
    assert read_calibration(written(tmp_path / "good")).layers[1].index == 1


@pytest.mark.parametrize("missing", ["model", "probe_bits"])
def test_a_header_without_a_field_is_refused(missing: str, tmp_path: Path) -> None:
    tensors = {"layers": np.array([[0, 2, 64]], np.int32), "costs": np.ones((1, 2, 2, 2), np.float32)}
    tensors |= parts("0.keys", "0.values")
    header = {key: value for key, value in HEADER.items() if key != missing}
    save_file(tensors, tmp_path / "side", metadata={"format": "rotaryquant-calibration", "header": json.dumps(header)})
    with pytest.raises(CalibrationError, match=missing):
        read_calibration(tmp_path / "side")
