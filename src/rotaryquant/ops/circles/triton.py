"""All classes to end with at once, four circles to a program (`native/triton/circles.py`)."""

import importlib
import importlib.util

import torch
from torch import Tensor

from rotaryquant.formats.codebook import CYCLE

#: Circles that a program searches: their sums over pairs of classes fill its registers.
_TOGETHER = 4

#: Codes that may lead from one class to another: their choice is kept in two bits.
_BRANCHES = 4


def _interpreted() -> bool:
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def missing() -> str | None:
    """Why no Triton program can run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; pip install triton"
    if not torch.cuda.is_available() and not _interpreted():
        return "no CUDA device here; TRITON_INTERPRET=1 runs it in Triton's interpreter, for tests"
    return None


def unsupported(x: Tensor, levels: Tensor) -> str | None:
    """Why this kernel cannot take the call, or None."""
    if x.is_cpu and not _interpreted():
        return "x is on the CPU, this kernel reads GPU memory"
    classes, codes = levels.shape
    if classes not in (4, 8) or codes > _BRANCHES * classes:
        return (
            f"{classes} classes of {codes} codes (there are 4 or 8, with up to {_BRANCHES} codes from one to another)"
        )
    return None


def run(x: Tensor, levels: Tensor) -> Tensor:
    """Codes int64 [circles, CYCLE]."""
    search = importlib.import_module("rotaryquant.native.triton.circles").search
    x, levels = x.contiguous(), levels.contiguous()
    classes, codes = levels.shape
    out = torch.empty_like(x)
    if len(x):
        grid = (-(-len(x) // _TOGETHER),)
        search[grid](x, levels, out, len(x), classes, codes, classes.bit_length() - 1, CYCLE, _TOGETHER)
    return out
