"""What evaluations and benchmarks share: a text that is read, data and a table that are handed back, provenance."""

import datetime
import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

import rotaryquant
from rotaryquant.errors import ConfigError


class Progress(Protocol):
    """Told what is under way, and which share of all is done, 0 to 1, where that is known."""

    def __call__(self, message: str, share: float | None = None) -> None:
        """Say so."""


@dataclass(frozen=True)
class Picture:
    """A plot of a measurement. width, height: inches. draw: puts it into an empty matplotlib figure."""

    width: float
    height: float
    draw: Callable[[Any], None]


@dataclass(frozen=True)
class Outcome:
    """Result of one measurement.

    data: plain values, the JSON object. headers, rows: a table of the same. lines: what else to say above it.
    passed: False where what was measured was to be judged and does not pass. picture: for `--plot`.
    """

    data: dict[str, Any]
    headers: list[str]
    rows: list[list[str]]
    lines: list[str] = field(default_factory=list)
    passed: bool = True
    picture: Picture | None = None


def model_name(model: str | None) -> str:
    """A model as a report names it: a hub id whole, of a path its last part, since folders differ by machine."""
    if model is None:
        return "glm4moe-70m"
    return Path(model).resolve().name if Path(model).exists() else model


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Machine, date and versions that produced a number; packages that are not installed are left out.

    device: that the model was on, as torch names it.
    """
    return {
        "machine": _processor(),
        "device": device_name(device),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "rotaryquant": rotaryquant.__version__,
            **{name: version for name in ("torch", "transformers") if (version := installed(name)) is not None},
        },
    }


def device_name(device: str) -> str:
    """What an accelerator is called, where torch knows ("NVIDIA H200"); else how torch names the device ("cpu")."""
    given = torch.device(device)
    name = None if given.type == "cpu" else getattr(torch.get_device_module(given), "get_device_name", None)
    return str(given) if name is None else str(name(given))


def installed(package: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def text_fingerprint(text: str) -> str:
    """By which a file knows the text that it was made from."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_text(path: Path) -> str:
    """The whole file as one string. Raises ConfigError where it is absent, empty or not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: cannot be read as UTF-8 text ({error})") from error
    if not text.strip():
        raise ConfigError(f"--text {path}: the file is empty")
    return text


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
