"""Attention on packed keys and values: scores on the codes, fp32 softmax, accumulation on the codes."""

import torch
from torch import Tensor

from rotaryquant.ops import dispatch
from rotaryquant.ops.streams import CacheView

KERNELS = ("cpu", "reference")


def packed_attention(
    q: Tensor,
    q_rotated: Tensor,
    view: CacheView,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    key_bias: Tensor | None = None,
    mask: Tensor | None = None,
    key_noise: float = 0.0,
    q_dtype: torch.dtype | None = None,
    p_dtype: torch.dtype | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attention of the newest queries of each row over its whole cache, without rebuilding a key or value.

    q: fp32 [batch, num_heads, rows, key_width], read for the exact rows. q_rotated: the same in the keys'
    rotated space, read for the packed rows. Query i of row b stands at position seq_lens[b] - rows + i; a query
    at a negative position (a pad) gets zeros, and so does one that may see nothing.
    scale: factor on q·k. causal: hide later positions. window: if > 0, see only the last `window` positions.
    softcap: if > 0, logits become softcap·tanh(logit/softcap). sink_logits: fp32 [num_heads], a logit that only
    the softmax's denominator sees. key_bias: fp32 [batch, num_heads, rows], q·mean, added to q·k of packed rows
    before scale. mask: bool [batch, 1 or num_heads, rows, >= max(seq_lens)], False hides; its column is the
    row's own position.
    key_noise: if > 0, relative squared error |k - k̂|²/|k|² of packed keys, by which their logits are corrected: a
    logit whose code noise has variance v counts exp(v/2) too much on average, so v/2 is taken off before bias and
    soft cap, v = scale²·(|q|²·|k̂|² - (q·k̂)²)·key_noise/width. |k̂|² is taken from the row's scale, as
    width·(scale of the row / unit of the codebook)²; needs one scale a row and a codebook with a unit.
    q_dtype, p_dtype: float32, bfloat16 or int8, the precision at which queries (per row and head) and
    probabilities meet the codes. None: the kernel's own. The reference computes in float32; cpu rounds queries to
    int8 (to 15 bits where keys have 8) and probabilities to 7 bits of their block's largest, or to 14 where the block
    weighs more than 1/64 of the sum so far.
    Returns (out of packed values, still rotated; out of exact values or None where the view has none), both fp32
    [batch, num_heads, rows, value_width]; the attention output is inverse_rotate(first) + second.
    """
    if q.dim() != 4 or q.shape != q_rotated.shape:
        raise ValueError(f"q {tuple(q.shape)} and q_rotated {tuple(q_rotated.shape)} must be equal and 4-D")
    heads = view.keys.codes[0].shape[1] if view.keys.codes else None
    if heads is None and view.dense_keys is not None:
        heads = view.dense_keys.shape[1]
    if heads and q.shape[1] % heads:
        raise ValueError(f"num_heads={q.shape[1]} is not a multiple of num_kv_heads={heads}")
    if key_noise > 0 and (view.keys.codec.groups > 1 or view.keys.codec.unit == 0):
        raise ValueError(f"key_noise={key_noise}: needs keys with one scale a row and at most 4 bits")
    result: tuple[Tensor, Tensor | None] = dispatch.run(
        "packed_attention",
        kernel,
        q,
        q_rotated,
        view,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        sink_logits=sink_logits,
        key_bias=key_bias,
        mask=mask,
        key_noise=key_noise,
        q_dtype=q_dtype,
        p_dtype=p_dtype,
    )
    return result
