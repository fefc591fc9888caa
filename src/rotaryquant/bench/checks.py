"""No number without a check: what is about to be timed must agree with the reference, and its kernel is named."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rotaryquant.errors import RotaryQuantError
from rotaryquant.ops import dispatch, native
from rotaryquant.ops.packed_attention import packed_attention
from rotaryquant.ops.streams import CacheView

#: Tokens of a check: whole blocks, a sealed strip and an open one behind them.
CHECK_TOKENS = 300

#: Largest relative error. Kernels round probabilities to bytes; queries are rounded alike on both sides.
LIMIT = 2e-2


class CheckError(RotaryQuantError):
    """A kernel that is about to be timed computes something else than its reference."""


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| over all values; infinite where either is not finite."""
    if not (torch.isfinite(got).all() and torch.isfinite(want).all()):
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm())


def require_close(what: str, got: Tensor, want: Tensor) -> float:
    """Their relative error. Raises CheckError, naming what was compared, where it is over `LIMIT`."""
    error = relative_error(got, want)
    if not error <= LIMIT:
        raise CheckError(
            f"{what}: relative error {error:.3g} against the reference, at most {LIMIT:g} is allowed; nothing was timed"
        )
    return error


def check_attention(what: str, query: Tensor, view: CacheView, *, scale: float, key_noise: float) -> float:
    """Relative error of `packed_attention` on this cache. query: [batch, num_heads, rows, key_width].

    The reference rounds queries as the kernels do: to int8, where keys have at most 4 bits. Raises CheckError.
    """
    rounding = torch.int8 if view.keys.codec.bits <= 4 else None
    attend = partial(packed_attention, query, view, scale=scale, key_noise=key_noise, q_dtype=rounding)
    return require_close(what, attend(), attend(kernel="reference"))


def kernel_of(op: str, call: Callable[[], object]) -> str:
    """Kernel that ran `op` in a call, of compiled ones with the instruction set: "cpu/v4", "reference"."""
    before = dict(dispatch.calls)
    call()
    for (name, kernel), count in dispatch.calls.items():
        if name == op and count > before.get((name, kernel), 0):
            return f"cpu/{native.instruction_set()}" if kernel == "cpu" else kernel
    raise CheckError(f"the call meant to time {op} never reached it")
