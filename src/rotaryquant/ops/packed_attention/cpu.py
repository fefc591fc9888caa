"""Packed attention in tiles of query rows: every packed row is unpacked once for all queries of a tile.

Products with the codes are exact in integers, since queries and probabilities are rounded to bytes first.
"""

import torch
from torch import Tensor

from rotaryquant.ops import native
from rotaryquant.ops.native import missing as missing
from rotaryquant.ops.streams import CacheView


def unsupported(
    q: Tensor,
    view: CacheView,
    *,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sink_logits: Tensor | None,
    mask: Tensor | None,
    key_noise: float,
    inverse: bool,
    q_dtype: torch.dtype | None,
    p_dtype: torch.dtype | None,
) -> str | None:
    """Why the native kernel cannot take this call, or None."""
    if q_dtype not in (None, torch.int8):
        return f"q_dtype={q_dtype}: this kernel rounds queries to int8"
    if p_dtype is not None:
        return f"p_dtype={p_dtype}: this kernel rounds probabilities by a rule of its own"
    return native.not_on_cpu(q=q, sink_logits=sink_logits, mask=mask) or native.view_reason(view)


def run(
    q: Tensor,
    view: CacheView,
    *,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sink_logits: Tensor | None,
    mask: Tensor | None,
    key_noise: float,
    inverse: bool,
    q_dtype: torch.dtype | None,
    p_dtype: torch.dtype | None,
) -> Tensor:
    """See the op's docstring. Raises ValueError where the view's table, lengths or shapes do not fit together."""
    dtype = q.dtype
    q = (q if dtype in (torch.float32, torch.bfloat16) else q.float()).contiguous()
    sink_logits = None if sink_logits is None else sink_logits.float().contiguous()
    out = q.new_empty((*q.shape[:3], view.values.codec.width))
    unit = view.keys.codec.unit
    native.module().attention(
        q=native.array(q),
        view=native.view(view),
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        noise_query=key_noise / (2 * unit**2) if key_noise else 0.0,
        noise_score=key_noise / (2 * view.keys.codec.width) if key_noise else 0.0,
        sink_logits=native.optional(sink_logits),
        mask=native.optional(mask),
        inverse=inverse,
        out=native.array(out),
        threads=torch.get_num_threads(),
    )
    return out.to(dtype)
