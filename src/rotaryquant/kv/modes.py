"""Caches outlive the mode they were filled in: a prompt read under `torch.inference_mode()` is cropped outside it."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from rotaryquant.kv.dense import DenseRows

_P = ParamSpec("_P")
_R = TypeVar("_R")


class HoldsRows(Protocol):
    """Something with exact rows, by which the mode of its tensors is known."""

    dense: DenseRows


_S = TypeVar("_S", bound=HoldsRows)


def editable_tensors(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Run a method so that what it stores can be edited later in any mode.

    A tensor made under `torch.inference_mode()` cannot be written outside it, so none is made there; what a deep copy
    under that mode has made all the same is edited in it.
    """

    @functools.wraps(method)
    def run(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        held = self.dense.keys
        inference = held is not None and held.is_inference()
        if torch.is_inference_mode_enabled() == inference and not torch.is_grad_enabled():
            return method(self, *args, **kwargs)  # entering the mode one is in costs as much as a small kernel
        with torch.inference_mode(inference), torch.no_grad():
            return method(self, *args, **kwargs)

    return run
