"""What a calibration found out about a model, in a file beside it: in which layers the error of codes hurts, and in
which space it hurts least.

A safetensors file, whose metadata holds a JSON header. Tensor "layers" has index, KV heads and width of each packed
layer, "costs" what its keys and its values cost, "INDEX.keys.PART" and "INDEX.values.PART" the fits of layer INDEX.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rotaryquant.errors import CalibrationError
from rotaryquant.formats.fit import Fit
from rotaryquant.formats.whole import written_whole

_FORMAT = "rotaryquant-calibration"
_VERSION = 4
#: Parts of a fit.
_FIT = ("metric", "balance", "mean")
#: Largest eigenvalue of a balance over its smallest; those that `balanced` makes stay below a tenth of it.
_WIDEST = 1000.0
#: Header fields, which say how the numbers came about.
_HEADER = ("version", "model", "name", "text", "tokens", "context", "probe_bits", "command")


@dataclass(frozen=True)
class StreamCost:
    """What coded rows of the keys or the values of one layer cost.

    plain, fitted: KL divergence in nats that the model's predictions suffer where these rows alone have few bits, one
    for each of the probes' bits: coded as they are, each code for itself, and coded as the fit says.
    """

    plain: tuple[float, ...]
    fitted: tuple[float, ...]
    fit: Fit = field(repr=False)


@dataclass(frozen=True)
class LayerSensitivity:
    """One packed layer. index: its number in the model. width: of keys and of values."""

    index: int
    num_kv_heads: int
    width: int
    keys: StreamCost
    values: StreamCost


@dataclass(frozen=True)
class Calibration:
    """All packed layers of one checkpoint.

    model: fingerprint of the checkpoint. name: what the model was called. text: fingerprint of the text. tokens: how
    many predictions were compared, in windows of `context`. probe_bits: of the rows whose effect was measured,
    ascending; empty where only fits were made. command: that made the file.
    """

    model: str
    name: str
    text: str
    tokens: int
    context: int
    probe_bits: tuple[int, ...]
    command: str
    layers: tuple[LayerSensitivity, ...]


def write_calibration(path: str | Path, calibration: Calibration) -> None:
    """Write the file, which appears whole or not at all. Raises OSError where it cannot be written."""
    layers = calibration.layers
    header = {name: getattr(calibration, name) for name in _HEADER if name != "version"} | {"version": _VERSION}
    tensors = {
        "layers": np.array([[x.index, x.num_kv_heads, x.width] for x in layers], dtype=np.int32),
        "costs": np.array([[(y.plain, y.fitted) for y in (x.keys, x.values)] for x in layers], dtype=np.float32),
    }
    for layer in layers:
        for which, stream in (("keys", layer.keys), ("values", layer.values)):
            tensors |= {f"{layer.index}.{which}.{part}": getattr(stream.fit, part) for part in _FIT}
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
        probes = header["probe_bits"] = tuple(map(int, header["probe_bits"]))
        if sorted(set(probes)) != list(probes) or min(probes, default=1) < 1:
            raise ValueError(f"probe_bits is {list(probes)}, wanted ascending numbers of bits")
        return Calibration(**header, layers=_layers(tensors, len(probes)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CalibrationError):
            raise
        raise CalibrationError(f"calibration={path}: header or tensors are incomplete ({error}); {again}") from error


def _layers(tensors: dict[str, Any], probes: int) -> tuple[LayerSensitivity, ...]:
    """All layers, checked: what comes from a file decides how much is allocated later."""
    sizes, costs = tensors["layers"], tensors["costs"]
    if sizes.ndim != 2 or sizes.shape[1] != 3 or len(sizes) == 0 or costs.shape != (len(sizes), 2, 2, probes):
        raise ValueError(f"layers is {sizes.shape}, costs {costs.shape}; wanted [n, 3] and [n, 2, 2, {probes}]")
    if not (np.isfinite(costs).all() and (costs >= 0).all()):
        raise ValueError("costs holds a negative or no number")
    if (sizes[:, 1:] < 1).any() or (np.diff(sizes[:, 0]) < 1).any() or sizes[0, 0] < 0:
        raise ValueError("layers are not in ascending order, or are without heads or width")

    def stream(index: int, heads: int, width: int, which: int) -> StreamCost:
        plain, fitted = (tuple(map(float, row)) for row in costs[index, which])
        name = f"{sizes[index, 0]}.{('keys', 'values')[which]}"
        return StreamCost(plain, fitted, _fit(tensors, name, heads, width))

    return tuple(
        LayerSensitivity(
            *(int(index), int(heads), int(width)),
            *(stream(number, int(heads), int(width), which) for which in range(2)),
        )
        for number, (index, heads, width) in enumerate(sizes)
    )


def _fit(tensors: dict[str, Any], name: str, heads: int, width: int) -> Fit:
    """The fit of that name. Raises ValueError where it is not one of so many heads and values."""
    metric, balance, mean = (tensors[f"{name}.{part}"].astype(np.float32) for part in _FIT)
    for part, found, shape in (
        ("metric", metric, (heads, width, width)),
        ("balance", balance, (heads, width, width)),
        ("mean", mean, (heads, width)),
    ):
        if found.shape != shape:
            raise ValueError(f"{name}.{part} is {found.shape}, wanted {shape}")
        if not np.isfinite(found).all() or (len(shape) == 3 and not np.array_equal(found, found.transpose(0, 2, 1))):
            raise ValueError(f"{name}.{part} holds no number, or is not symmetric")
    if np.linalg.eigvalsh(metric).min() < -0.01 * width:  # its mean is 1, and 16 bits round it
        raise ValueError(f"{name}.metric has a negative eigenvalue: an error cannot cost less than none")
    sizes = np.linalg.eigvalsh(balance.astype(np.float64))
    if sizes.min() <= 0 or (sizes.max(-1) > _WIDEST * sizes.min(-1)).any():
        raise ValueError(f"{name}.balance is no positive definite matrix that can be undone")
    return Fit(metric, balance, mean)
