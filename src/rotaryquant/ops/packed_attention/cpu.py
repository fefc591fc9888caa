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
    reason = reason or native.rotation_reason(view.key_rotation) or native.rotation_reason(view.value_rotation)
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
    reason = native.not_on_cpu(q=q, sink_logits=sink_logits, mask=mask, means=view.means)
    return reason or _view_reason(view)


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
    q = q.float().contiguous()
    table, packed_lens, seq_lens = (t.contiguous() for t in (view.block_table, view.packed_lens, view.seq_lens))
    positions = None if view.dense_positions is None else view.dense_positions.contiguous()
    sink_logits = None if sink_logits is None else sink_logits.float().contiguous()
    means = None if view.means is None else view.means.float().contiguous()
    out = torch.empty(*q.shape[:3], view.values.codec.width, dtype=torch.float32)
    unit = view.keys.codec.unit
    native.module().attention(
        q=native.array(q),
        keys=native.stream(view.keys),
        values=native.stream(view.values),
        key_rotation=native.rotation(view.key_rotation),
        value_rotation=native.rotation(view.value_rotation),
        block_table=native.array(table),
        packed_lens=native.array(packed_lens),
        seq_lens=native.array(seq_lens),
        num_sinks=view.num_sinks,
        means=native.optional(means),
        dense_keys=native.optional(view.dense_keys),
        dense_values=native.optional(view.dense_values),
        dense_positions=native.optional(positions),
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
    return out
