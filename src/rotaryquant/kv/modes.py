"""Caches outlive the mode they were filled in: a prompt read under `torch.inference_mode()` is cropped outside it.

A tensor made under that mode cannot be written outside it, so none is made there; what a deep copy under the mode has
made all the same is edited in it. Entering a mode costs as much as a small kernel, so it is left where it is right.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")
_AS_IT_IS = nullcontext()


class HoldsRows(Protocol):
    """Something with exact rows, by which the mode of its tensors is known."""

    dense: Any


_S = TypeVar("_S", bound=HoldsRows)


def making(held: Tensor | None) -> AbstractContextManager[None]:
    """The mode in which tensors that live beside `held` are made."""
    inference = held is not None and held.is_inference()
    if torch.is_inference_mode_enabled() == inference and not torch.is_grad_enabled():
        return _AS_IT_IS
    return _modes(inference)


@contextmanager
def _modes(inference: bool) -> Iterator[None]:
    with torch.inference_mode(inference), torch.no_grad():
        yield


def editable_tensors(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Run a method so that what it stores can be edited later in any mode."""

    @functools.wraps(method)
    def run(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with making(self.dense.keys):
            return method(self, *args, **kwargs)

    return run
