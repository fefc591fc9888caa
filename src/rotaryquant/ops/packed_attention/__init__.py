"""Attention on packed keys and values: scores on the codes, fp32 softmax, accumulation on the codes."""

from typing import NamedTuple

import torch
from torch import Tensor

from rotaryquant.ops import dispatch
from rotaryquant.ops.streams import CacheView

KERNELS = ("cpu", "reference")


class Options(NamedTuple):
    """What calls on one layer have in common; `packed_attention` says what each means."""

    scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sink_logits: Tensor | None = None
    key_noise: float = 0.0
    inverse: bool = True
    q_dtype: torch.dtype | None = None
    p_dtype: torch.dtype | None = None

    def same_as(self, other: "Options") -> bool:
        """Whether all agree; sink logits are one tensor, not two with the same values."""
        return self is other or (self.sink_logits is other.sink_logits and self == other)


def packed_attention(
    q: Tensor,
    view: CacheView,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    mask: Tensor | None = None,
    key_noise: float = 0.0,
    inverse: bool = True,
    q_dtype: torch.dtype | None = None,
    p_dtype: torch.dtype | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Attention of the newest queries of each row over its whole cache, without rebuilding a key or value.

    Each query is rotated once for the packed rows, and what they add to its output is rotated back once.
    q: [batch, num_heads, rows, key_width], any float dtype. Query i of row b stands at position seq_lens[b] - rows +
    i; a query at a negative position (a pad) gets zeros, and so does one that may see nothing. The view's means add
    q·mean to q·k of packed rows.
    scale: factor on q·k. causal: hide later positions. window: if > 0, see only the last `window` positions.
    softcap: if > 0, logits become softcap·tanh(logit/softcap). sink_logits: fp32 [num_heads], a logit that only
    the softmax's denominator sees. mask: bool [batch, 1 or num_heads, rows, >= max(seq_lens)], False hides; its column
    is the row's own position.
    key_noise: if > 0, relative squared error |k - k̂|²/|k|² of packed keys, by which their logits are corrected: a
    logit whose code noise has variance v counts exp(v/2) too much on average, so v/2 is taken off before mean and
    soft cap, v = scale²·(|q|²·|k̂|² - (q·k̂)²)·key_noise/width. |k̂|² is taken from the row's scale, as
    width·(scale of the row / unit of the codebook)²; needs one scale a row and a codebook with a unit.
    inverse: rotate the packed part of the output back; False leaves it rotated, to see that this is felt.
    q_dtype, p_dtype: float32, bfloat16 or int8, the precision at which queries (per row and head) and
    probabilities meet the codes. None: the kernel's own. The reference computes in float32; cpu rounds queries to
    int8 (to 15 bits where keys have 8) and probabilities to a byte of the largest among the keys taken together, or
    to two where those weigh more than 1/64 of the sum so far (docs/kernels.md).
    Returns [batch, num_heads, rows, value_width] in q's dtype; sums are fp32.
    """
    options = Options(scale, causal, window, softcap, sink_logits, key_noise, inverse, q_dtype, p_dtype)
    _check(q, view, options)
    result: Tensor = dispatch.run("packed_attention", kernel, q, view, options, mask)
    return result


def prepare(q: Tensor, view: CacheView, options: Options) -> dispatch.Bound:
    """The op for calls (q, view, options, None) that differ from this one in q alone, all on one device.

    Raises ValueError as `packed_attention` does.
    """
    _check(q, view, options)
    return dispatch.Bound("packed_attention", "auto", q, view, options, None)


def _check(q: Tensor, view: CacheView, options: Options) -> None:
    heads, shape, codec = view.key_rotation.num_kv_heads, q.shape, view.keys.codec
    if len(shape) != 4 or shape[3] != codec.width:
        raise ValueError(f"q {tuple(shape)} must be [batch, num_heads, rows, {codec.width}]")
    if shape[1] % heads:
        raise ValueError(f"num_heads={shape[1]} is not a multiple of num_kv_heads={heads}")
    if options.key_noise > 0 and (codec.groups > 1 or codec.unit == 0):
        raise ValueError(f"key_noise={options.key_noise}: needs keys with one scale a row and at most 4 bits")
