"""Keep new exact rows: copy them into the buffers that hold a layer's tail."""

from torch import Tensor

from rotaryquant.ops import dispatch

KERNELS = ("cpu", "reference")


def prepare(
    keys: Tensor, values: Tensor, held_keys: Tensor, held_values: Tensor, *, kernel: str = "auto"
) -> dispatch.Bound:
    """The op for tensors of these dtypes and devices, to be called as (keys, values, held_keys, held_values, slot).

    It copies keys and values of new columns into slots [slot, slot + columns). keys, values: [batch, num_kv_heads,
    columns, width], any float dtype. held_keys, held_values: [batch, num_kv_heads, slots, width], which may have been
    made in another of torch's modes. Where columns pass the slots a call raises ValueError or RuntimeError.
    """
    return dispatch.Bound("stage", kernel, keys, values, held_keys, held_values, 0)
