"""Both copies in one call, which costs a decode step less than the four of torch that they would take."""

import torch
from torch import Tensor

from rotaryquant.ops import native
from rotaryquant.ops.native import missing as missing


def unsupported(keys: Tensor, values: Tensor, held_keys: Tensor, held_values: Tensor, slot: int) -> str | None:
    """Why the native kernel cannot take this call, or None."""
    for name, x, held in (("keys", keys, held_keys), ("values", values, held_values)):
        if x.dtype != held.dtype or x.dtype not in native.FLOATS:
            return f"{name} are {x.dtype}, held ones {held.dtype}; this kernel copies floats as they are"
    return native.not_on_cpu(keys=keys, values=values, held_keys=held_keys, held_values=held_values)


def run(keys: Tensor, values: Tensor, held_keys: Tensor, held_values: Tensor, slot: int) -> None:
    """See the op's docstring."""
    native.module().stage(keys, values, held_keys, held_values, slot, torch.get_num_threads())
