"""Which kernel runs an op: the first of its `KERNELS` that can, or exactly the one asked for.

A kernel is a file beside the op's `__init__.py` with two functions: `unsupported(*args)`, the reason it cannot take
this call or None, and `run(*args)`. `missing()` is optional: the reason it cannot run on this machine at all.
"""

import importlib
import logging
from collections import Counter
from functools import cache
from types import ModuleType
from typing import Any

import torch

from rotaryquant import env
from rotaryquant.errors import UnsupportedKernelError

#: Every op, in the order of the flow; `rotaryquant kernels` prints them.
OPS = (
    "stage", "rotate", "circles", "quantize", "pack", "append_packed", "packed_attention", "dequant_matmul",
    "expert_matmul",
)  # fmt: skip

#: Calls per (op, kernel); not counted while a graph is being compiled.
calls: Counter[tuple[str, str]] = Counter()
#: Automatic choices that had to pass over a kernel of this machine because of the call's arguments.
fallbacks: Counter[tuple[str, str]] = Counter()

_log = logging.getLogger(__name__)
_loaded: dict[tuple[str, str], ModuleType] = {}
_missing: dict[tuple[str, str], str | None] = {}


@cache
def kernels_of(op: str) -> tuple[str, ...]:
    """The op's kernels, best first: the names of the files beside its `__init__.py`."""
    names: tuple[str, ...] = importlib.import_module(f"rotaryquant.ops.{op}").KERNELS
    return names


def _load(op: str, name: str) -> ModuleType:
    key = (op, name)
    if key not in _loaded:
        _loaded[key] = importlib.import_module(f"rotaryquant.ops.{op}.{name}")
    return _loaded[key]


def missing(op: str, name: str) -> str | None:
    """Why kernel `name` of `op` cannot run on this machine, or None."""
    key = (op, name)
    if key not in _missing:
        probe = getattr(_load(op, name), "missing", None)
        _missing[key] = probe() if probe is not None else None
    return _missing[key]


def select(op: str, kernel: str, *args: Any) -> tuple[str, ModuleType]:
    """Name and module of the kernel that will take this call.

    kernel: "auto", or a name from the op's `KERNELS`. Raises UnsupportedKernelError with the reason where the named
    kernel cannot take the call, and ValueError for a name the op does not have.
    """
    names = kernels_of(op)
    if kernel == "auto":
        kernel = env.kernel_override() or "auto"
    if kernel != "auto":
        if kernel not in names:
            raise ValueError(f"kernel={kernel!r}: op {op} has {', '.join(names)}")
        module = _load(op, kernel)
        if reason := missing(op, kernel) or module.unsupported(*args):
            raise UnsupportedKernelError(f"kernel={kernel!r} cannot run {op}: {reason}; use kernel='auto'")
        return kernel, module
    reasons: list[str] = []
    for name in names:
        reason = _missing[op, name] if (op, name) in _missing else missing(op, name)
        if reason is None:
            module = _load(op, name)
            reason = module.unsupported(*args)
            if reason is None:
                return name, module
            _count_fallback(op, name, reason)
        reasons.append(f"{name}: {reason}")
    raise UnsupportedKernelError(f"no kernel can run {op}: {'; '.join(reasons)}")


def _count_fallback(op: str, name: str, reason: str) -> None:
    if torch.compiler.is_compiling():
        return
    fallbacks[op, name] += 1
    if fallbacks[op, name] == 1:
        _log.warning("%s: kernel %s passed over: %s (said once, counted)", op, name, reason)


def run(op: str, kernel: str, *args: Any) -> Any:
    """Run `op` with the chosen kernel and count the call."""
    name, module = select(op, kernel, *args)
    if not torch.compiler.is_compiling():
        calls[op, name] += 1
    return module.run(*args)


class Bound:
    """An op on the kernel that would take one call, for many calls like it; each is counted.

    Between a decode step's layers nothing stays in the caches close by, so that choosing anew costs more than some
    kernels do. Calls are alike where they agree in everything that a kernel's `unsupported` looks at.
    """

    __slots__ = ("_counted", "_run")

    def __init__(self, op: str, kernel: str, *args: Any) -> None:
        name, module = select(op, kernel, *args)
        self._counted, self._run = (op, name), module.run

    def __call__(self, *args: Any) -> Any:
        """Run and count it, without another look at whether the kernel can."""
        calls[self._counted] += 1
        return self._run(*args)


def explain() -> list[tuple[str, str, str]]:
    """Rows (op, kernel, "ready" or why not) for every kernel of every op."""
    return [(op, name, missing(op, name) or "ready") for op in OPS for name in kernels_of(op)]
