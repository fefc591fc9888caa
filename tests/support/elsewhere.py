"""A device that is not the CPU, for machines that have none: what an accelerator would refuse is refused.

Its tensors lie in memory of the CPU, which also does what is done with them, behind a device of torch that nothing else
uses. An operation on tensors of both devices raises, as it does between a CPU and a GPU: only copies go from one to the
other, and numbers without dimensions are taken from the CPU, as there. So a tensor that somebody made without saying
where is found. Gradients are not to be had there.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyDeviceGuard

ELSEWHERE = torch.device("privateuseone", 0)
#: What the device calls itself, as a GPU has a name.
NAME = "Pretended Accelerator"

_ATEN = torch.ops.aten
_MOVES = (_ATEN.to, _ATEN._to_copy)


class MixedDevicesError(RuntimeError):
    """An operation got tensors of the CPU and of the device."""


class _There(Tensor):
    """A tensor that says it is on the device. held: its values, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "_There":
        made: _There = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=ELSEWHERE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a tensor of `elsewhere` outlived its `with` block")

    def tolist(self) -> Any:
        """The values, as of any tensor."""
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())


class Device(TorchDispatchMode):
    """What goes on there. fetched: values that were copied from it to the CPU so far."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, leaves = func.overloadpacket, tree_leaves((args, kwargs or {}))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        given = [x for x in tensors if isinstance(x, _There)]
        if packet is _ATEN.copy_:
            there = isinstance(tensors[0], _There)
        else:
            there = bool(given)
            if there and packet not in _MOVES:
                _refuse_mixed(func, tensors)
        for device in (x for x in leaves if isinstance(x, torch.device)):
            there = device.type == ELSEWHERE.type
        if given and (not there or packet is _ATEN._local_scalar_dense):
            self.fetched += given[0].numel()
        args, kwargs = tree_map_only(_There, lambda x: x.held, (args, kwargs or {}))
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        # as if below the modes of inference and gradients, which act on what is returned
        with torch.inference_mode(False), torch._C._AutoDispatchBelowAutograd():
            out = func(*args, **kwargs)
            if not there and given:
                out = tree_map_only(Tensor, torch.clone, out)  # a copy to the CPU shares no memory
            return tree_map_only(Tensor, _There, out) if there else out


def _refuse_mixed(func: Any, tensors: list[Tensor]) -> None:
    for x in tensors:
        if not isinstance(x, _There) and x.dim() > 0:
            raise MixedDevicesError(f"{func}: a tensor {tuple(x.shape)} of the CPU among others elsewhere")


@cache
def _register() -> None:
    """Tell torch as much of the device as it asks before it hands operations over."""
    module = types.ModuleType(f"torch.{ELSEWHERE.type}")
    vars(module).update(
        _lazy_init=lambda: None,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_device_name=lambda device: NAME,
    )
    torch._register_device_module(ELSEWHERE.type, module)
    torch._C._acc.register_python_privateuseone_device_guard(_DummyDeviceGuard())


@contextmanager
def elsewhere() -> Iterator[Device]:
    """Have the device `ELSEWHERE` to the end of a `with` block."""
    _register()
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(..., device=...) ends with an operation
    try:
        with Device() as device:
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
