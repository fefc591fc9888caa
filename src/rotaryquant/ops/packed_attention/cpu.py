"""Packed attention in tiles of query rows: every packed row is unpacked once for all queries of a tile.

Products with the codes are exact in integers, since queries and probabilities are rounded to bytes first.
"""

import torch
from torch import Tensor

from rotaryquant.ops import native
from rotaryquant.ops.native import missing as missing
from rotaryquant.ops.streams import CacheView


def _view_reason(view: CacheView) -> str | None:
    """Why a cache laid out like this has no native code path, or None."""
    reason = native.stream_reason("keys", view.keys) or native.stream_reason("values", view.values)
    reason = reason or native.not_on_cpu(
        block_table=view.block_table,
        packed_lens=view.packed_lens,
        seq_lens=view.seq_lens,
        dense_positions=view.dense_positions,
    )
    if reason is None and view.dense_keys is not None and view.dense_values is not None:
        reason = native.rows_reason("dense_keys", view.dense_keys)
        reason = reason or native.rows_reason("dense_values", view.dense_values)
    return reason


def unsupported(
    q: Tensor,
    q_rotated: Tensor,
    view: CacheView,
    *,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sink_logits: Tensor | None,
    key_bias: Tensor | None,
    mask: Tensor | None,
    key_noise: float,
    q_dtype: torch.dtype | None,
    p_dtype: torch.dtype | None,
) -> str | None:
    """Why the native kernel cannot take this call, or None."""
    if q_dtype not in (None, torch.int8):
        return f"q_dtype={q_dtype}: this kernel rounds queries to int8"
    if p_dtype is not None:
        return f"p_dtype={p_dtype}: this kernel rounds probabilities by a rule of its own"
    reason = native.not_on_cpu(q=q, q_rotated=q_rotated, sink_logits=sink_logits, key_bias=key_bias, mask=mask)
    return reason or _view_reason(view)


def run(
    q: Tensor,
    q_rotated: Tensor,
    view: CacheView,
    *,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sink_logits: Tensor | None,
    key_bias: Tensor | None,
    mask: Tensor | None,
    key_noise: float,
    q_dtype: torch.dtype | None,
    p_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """See the op's docstring. Raises ValueError where the view's table, lengths or shapes do not fit together."""
    q, q_rotated = q.float().contiguous(), q_rotated.float().contiguous()
    table, packed_lens, seq_lens = (t.contiguous() for t in (view.block_table, view.packed_lens, view.seq_lens))
    positions = None if view.dense_positions is None else view.dense_positions.contiguous()
    sink_logits = None if sink_logits is None else sink_logits.float().contiguous()
    key_bias = None if key_bias is None else key_bias.float().contiguous()
    out = torch.empty(*q.shape[:3], view.values.codec.width, dtype=torch.float32)
    dense_out = None if view.dense_keys is None else torch.empty_like(out)
    if view.keys.codes:
        kv_heads = view.keys.codes[0].shape[1]
    else:
        kv_heads = q.shape[1] if view.dense_keys is None else view.dense_keys.shape[1]
    noise, unit = key_noise, view.keys.codec.unit
    native.module().attention(
        q=native.array(q),
        q_rotated=native.array(q_rotated),
        keys=native.stream(view.keys),
        values=native.stream(view.values),
        kv_heads=kv_heads,
        block_table=native.array(table),
        packed_lens=native.array(packed_lens),
        seq_lens=native.array(seq_lens),
        num_sinks=view.num_sinks,
        dense_keys=native.optional(view.dense_keys),
        dense_values=native.optional(view.dense_values),
        dense_positions=native.optional(positions),
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        noise_query=noise / (2 * unit**2) if noise else 0.0,
        noise_score=noise / (2 * view.keys.codec.width) if noise else 0.0,
        sink_logits=native.optional(sink_logits),
        key_bias=native.optional(key_bias),
        mask=native.optional(mask),
        out=native.array(out),
        dense_out=native.optional(dense_out),
        threads=torch.get_num_threads(),
    )
    return out, dense_out
