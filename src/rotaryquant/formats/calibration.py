"""What a calibration found out about a model, in a file beside it: which layers the error of its codes hurts.

A safetensors file, whose metadata holds a JSON header and whose tensors hold one row a packed layer.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rotaryquant.errors import CalibrationError
from rotaryquant.formats.whole import written_whole

_FORMAT = "rotaryquant-calibration"
_VERSION = 1
#: Header fields, which say how the numbers came about.
_HEADER = ("version", "model", "name", "text", "tokens", "context", "probe_bits", "command")


@dataclass(frozen=True)
class LayerSensitivity:
    """One packed layer. index: its number in the model. width: of keys and of values.

    keys, values: KL divergence in nats that the model's predictions suffer where these rows alone have the probe's
    bits.
    """

    index: int
    num_kv_heads: int
    width: int
    keys: float
    values: float


@dataclass(frozen=True)
class Calibration:
    """All packed layers of one checkpoint.

    model: fingerprint of the checkpoint. name: what the model was called. text: fingerprint of the text. tokens: how
    many predictions were compared, in windows of `context`. probe_bits: of the rows whose effect was measured.
    command: that made the file.
    """

    model: str
    name: str
    text: str
    tokens: int
    context: int
    probe_bits: int
    command: str
    layers: tuple[LayerSensitivity, ...]


def write_calibration(path: str | Path, calibration: Calibration) -> None:
    """Write the file, which appears whole or not at all. Raises OSError where it cannot be written."""
    layers = calibration.layers
    header = {name: getattr(calibration, name) for name in _HEADER if name != "version"} | {"version": _VERSION}
    tensors = {
        "layers": np.array([[x.index, x.num_kv_heads, x.width] for x in layers], dtype=np.int32),
        "sensitivity": np.array([[x.keys, x.values] for x in layers], dtype=np.float32),
    }
    with written_whole(path) as name:
        save_file(tensors, name, metadata={"format": _FORMAT, "header": json.dumps(header)})


def read_calibration(path: str | Path) -> Calibration:
    """The calibration in a file.

    Raises CalibrationError, naming the file and what is wrong, for one that is absent, damaged or of another kind.
    """
    again = "make it again with `rotaryquant calibrate`"
    try:
        with safe_open(str(path), "numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError as error:
        raise CalibrationError(f"calibration={path}: no such file; {again}") from error
    except (SafetensorError, OSError) as error:
        raise CalibrationError(f"calibration={path}: not a readable safetensors file ({error}); {again}") from error
    if (kind := metadata.get("format")) != _FORMAT:
        raise CalibrationError(f"calibration={path}: format is {kind!r}, wanted {_FORMAT!r}; {again}")
    try:
        header: dict[str, Any] = json.loads(metadata["header"])
        if (version := header.pop("version")) != _VERSION:
            raise CalibrationError(f"calibration={path}: version is {version}, this package reads {_VERSION}; {again}")
        return Calibration(**header, layers=_layers(tensors["layers"], tensors["sensitivity"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CalibrationError):
            raise
        raise CalibrationError(f"calibration={path}: header or tensors are incomplete ({error}); {again}") from error


def _layers(sizes: Any, sensitivity: Any) -> tuple[LayerSensitivity, ...]:
    """Rows of both tensors, checked: what comes from a file decides how much is allocated later."""
    if sizes.ndim != 2 or sizes.shape[1] != 3 or len(sizes) == 0 or sensitivity.shape != (len(sizes), 2):
        raise ValueError(f"layers is {sizes.shape}, sensitivity {sensitivity.shape}; wanted [n, 3] and [n, 2]")
    if not (np.isfinite(sensitivity).all() and (sensitivity >= 0).all()):
        raise ValueError("sensitivity holds a negative or no number")
    if (sizes[:, 1:] < 1).any() or (np.diff(sizes[:, 0]) < 1).any() or sizes[0, 0] < 0:
        raise ValueError("layers are not in ascending order, or are without heads or width")
    return tuple(
        LayerSensitivity(int(index), int(heads), int(width), float(keys), float(values))
        for (index, heads, width), (keys, values) in zip(sizes, sensitivity, strict=True)
    )
