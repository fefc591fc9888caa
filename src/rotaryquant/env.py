"""The only reader of environment variables. `docs/environment.md` lists what is read here."""

import os
from functools import cache
from pathlib import Path


@cache
def kernel_override() -> str | None:
    """Kernel name forced for every op (`RQ_KERNEL`), or None for automatic choice; read at the first call of any op."""
    return os.environ.get("RQ_KERNEL") or None


def cpu_isa() -> str | None:
    """Instruction set forced for the native CPU kernels (`RQ_CPU_ISA`), or None for the best of this processor."""
    return os.environ.get("RQ_CPU_ISA") or None


def cache_dir() -> Path:
    """Folder for converted models (`RQ_CACHE`, else `XDG_CACHE_HOME`/rotaryquant, else ~/.cache/rotaryquant)."""
    if own := os.environ.get("RQ_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rotaryquant"


def assets_dir() -> Path | None:
    """Folder with real models and texts for tests and evaluations (`RQ_ASSETS`), or None."""
    own = os.environ.get("RQ_ASSETS")
    return Path(own) if own else None


def color_allowed() -> bool:
    """False when `NO_COLOR` is set to anything (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")
