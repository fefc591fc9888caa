"""`rotaryquant doctor`: what this installation has, what it lacks, and how to mend it."""

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from rotaryquant import env
from rotaryquant.cli.common import parser
from rotaryquant.cli.screen import print_json, print_table
from rotaryquant.cli.sizes import show_bytes

#: Ranges that the package declares (pyproject.toml): lowest version, first one too new or None.
PYTHON = ((3, 11), None)
TORCH = ((2, 11), None)
TRANSFORMERS = ((5, 24), (5, 25))

_INSTALL_EXTRA = "pip install 'rotaryquant[hf]'"
_ENOUGH_MEMORY = 2_000_000_000

Version = tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """One line. state: ok, warn (works, with a limit) or fail. fix: empty where all is well."""

    check: str
    state: str
    found: str
    fix: str = ""


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status: 1 where a check failed."""
    args = parser("doctor", "Check this installation; exit status 1 where something is broken.").parse_args(words)
    findings = [check() for check in CHECKS]
    failed = any(finding.state == "fail" for finding in findings)
    if args.json:
        print_json({"ok": not failed, "checks": [asdict(finding) for finding in findings]})
    else:
        print_table([(f.check, f.state, f.found + (f"; {f.fix}" if f.fix else "")) for f in findings])
    return 1 if failed else 0


def parse_version(text: str) -> Version:
    """Leading numbers of a version: 2.13.0+cpu gives (2, 13, 0)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def in_range(version: Version, low: Version, high: Version | None) -> bool:
    """Whether low <= version < high."""
    return version >= low and (high is None or version < high)


def _show_range(low: Version, high: Version | None) -> str:
    text = ">=" + ".".join(map(str, low))
    return text if high is None else f"{text},<" + ".".join(map(str, high))


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    found = platform.python_version()
    if not in_range(sys.version_info[:3], *PYTHON):
        return Finding("python", "fail", found, f"use Python {_show_range(*PYTHON)}")
    return Finding("python", "ok", found)


def _package(name: str, wanted: tuple[Version, Version | None] | None, fix: str, state: str = "fail") -> Finding:
    """A package that must be there, in a range where one is given."""
    found = _installed(name)
    if found is None:
        return Finding(name, state, "not installed", f"run `{fix}`")
    if wanted is not None and not in_range(parse_version(found), *wanted):
        return Finding(name, "fail", f"{found} is outside {_show_range(*wanted)}", f"run `{fix}`")
    return Finding(name, "ok", found)


def _torch() -> Finding:
    return _package("torch", TORCH, f"pip install 'torch{_show_range(*TORCH)}'")


def _transformers() -> Finding:
    return _package("transformers", TRANSFORMERS, f"pip install 'transformers{_show_range(*TRANSFORMERS)}'")


def _native() -> Finding:
    if _installed("torch") is None:
        return Finding("native kernels", "fail", "need torch", "see torch")
    from rotaryquant.errors import ConfigError
    from rotaryquant.ops import native

    try:
        if reason := native.missing():
            return Finding("native kernels", "warn", f"slow reference kernels run instead: {reason}")
    except ConfigError as error:  # of RQ_CPU_ISA
        return Finding("native kernels", "fail", str(error))
    return Finding("native kernels", "ok", f"ready, instruction set {native.instruction_set()}")


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads() -> Finding:
    if _installed("torch") is None:
        return Finding("threads", "fail", "need torch", "see torch")
    import torch

    threads, cores = torch.get_num_threads(), _cores()
    found = f"{threads} of torch on {cores} cores"
    if threads > cores:
        return Finding("threads", "warn", found, f"set OMP_NUM_THREADS={cores} or pass --threads {cores}")
    return Finding("threads", "ok", found)


def _memory() -> Finding:
    free = _available_memory()
    if free is None:
        return Finding("memory", "warn", "this system does not say how much is free")
    if free < _ENOUGH_MEMORY:
        return Finding("memory", "warn", f"{show_bytes(free)} available", "close programs or use a smaller model")
    return Finding("memory", "ok", f"{show_bytes(free)} available")


def _available_memory() -> int | None:
    """Bytes that new work can take, None where the system does not say."""
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    names = os.sysconf_names
    if "SC_AVPHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _cache_folder() -> Finding:
    folder = env.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding("cache folder", "fail", f"{folder}: {error.strerror}", "set RQ_CACHE to a folder you may write")
    return Finding("cache folder", "ok", str(folder))


def _default_model() -> Finding:
    if _installed("transformers") is None or _installed("huggingface_hub") is None:
        return Finding("default model", "fail", "needs transformers", f"run `{_INSTALL_EXTRA}`")
    from rotaryquant.errors import ModelFileError
    from rotaryquant.integrations.sources import EMBEDDED, embedded_folder
    from rotaryquant.weights.headers import read_folder

    try:
        read_folder(embedded_folder())
    except ModelFileError as error:
        return Finding("default model", "fail", str(error), "reinstall the package: pip install --force-reinstall "
                       "--no-deps rotaryquant")  # fmt: skip
    return Finding("default model", "ok", EMBEDDED)


def _hub() -> Finding:
    return _package("huggingface_hub", None, _INSTALL_EXTRA)


def _gguf() -> Finding:
    return _package("gguf", None, _INSTALL_EXTRA)


def _accelerate() -> Finding:
    return _package("accelerate", None, _INSTALL_EXTRA)


def _rich() -> Finding:
    return _package("rich", None, _INSTALL_EXTRA, state="warn")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python, _torch, _transformers, _hub, _gguf, _accelerate, _rich, _native, _threads, _memory, _cache_folder,
    _default_model,
)  # fmt: skip
