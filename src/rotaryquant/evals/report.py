"""What a measurement hands back: data for programs, a table for people, and where and when it was made."""

import datetime
import platform
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import rotaryquant


@dataclass(frozen=True)
class Outcome:
    """Result of one measurement.

    data: plain values, the JSON object. headers, rows: a table of the same. lines: what else to say above it.
    """

    data: dict[str, Any]
    headers: list[str]
    rows: list[list[str]]
    lines: list[str] = field(default_factory=list)


def model_name(model: str | None) -> str:
    """A model as a report names it: a hub id whole, of a path its last part, since folders differ by machine."""
    if model is None:
        return "SmolLM2-135M-Instruct"
    return Path(model).resolve().name if Path(model).exists() else model


def provenance() -> dict[str, Any]:
    """Machine, date and versions that produced a number."""
    return {
        "machine": _processor(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "rotaryquant": rotaryquant.__version__,
            **{name: metadata.version(name) for name in ("torch", "transformers")},
        },
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
