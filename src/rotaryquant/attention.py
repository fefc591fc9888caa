"""Attention over one layer's cache: exact while everything is exact, on the packed codes afterwards."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rotaryquant.counters import Counters, visible_pairs
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.ops.packed_attention import Options, packed_attention, prepare


class AttentionOptions(NamedTuple):
    """What a model asks of attention besides q, k and v.

    scale: factor on q·k. window: if > 0, only the last `window` positions are seen. softcap: if > 0, logits become
    softcap·tanh(logit/softcap). sink_logits: [num_heads], learned logits that only the denominator sees.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sink_logits: Tensor | None = None


def attend(
    layer: PackedLayer,
    queries: Tensor,
    options: AttentionOptions,
    counters: Counters,
    *,
    pads: list[int] | None = None,
    mask: Tensor | None = None,
    append: bool = True,
) -> Tensor:
    """Attention of the newest queries over `layer`, whose `update` has staged their keys and values.

    queries: [batch, num_heads, rows, key_width], any float dtype. pads: left pads of each row, None if unchanged
    or none. mask: bool [batch, 1 or num_heads, rows, columns] in place of the causal rule, only without pads.
    append: False for a second layer that reads the same cache. Returns [batch, num_heads, rows, value_width] in
    the queries' dtype; a query that may see nothing gets zeros.
    """
    if append:
        layer.observe(queries, options.scale)
        layer.settle(pads)
    _count(layer, queries.shape[2], options.window, counters)
    if layer.all_staged():
        # the first staged column need not be column 0: a row that had packed tokens may have left the batch
        start = layer.dense.start
        keys, values = layer.dense.staged()
        pads = [max(0, row.pad - start) for row in layer.rows]
        return dense_attention(
            queries, keys, values, options, pads=pads, mask=None if mask is None else mask[..., start:]
        )
    return _packed(layer, queries, options, mask)


def _packed(layer: PackedLayer, queries: Tensor, given: AttentionOptions, mask: Tensor | None) -> Tensor:
    view, prepared = layer.view(), layer.prepared
    if prepared is None or not _agree(prepared[0], given):
        options = Options(
            scale=given.scale,
            window=given.window,
            softcap=given.softcap,
            sink_logits=given.sink_logits,
            key_noise=layer.key_noise,
            inverse=layer.config.inverse,
        )
        prepared = layer.prepared = options, prepare(queries, view, options)
    options, call = prepared
    if mask is not None:
        return packed_attention(queries, view, **options._replace(causal=False)._asdict(), mask=mask)
    out: Tensor = call(queries, view, options, None)
    return out


def _agree(options: Options, given: AttentionOptions) -> bool:
    return (
        options.sink_logits is given.sink_logits
        and options.scale == given.scale
        and options.window == given.window
        and options.softcap == given.softcap
    )


def dense_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    options: AttentionOptions,
    *,
    pads: list[int] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention on exact keys and values; the newest queries sit at the end of the keys.

    queries: [batch, num_heads, rows, key_width]; keys, values: [batch, num_kv_heads, columns, width].
    pads: left pads of each row. mask: bool or additive float [batch, 1 or num_heads, rows, columns] in place of
    the causal rule. Returns [batch, num_heads, rows, value_width] in the queries' dtype, zeros where nothing is
    visible.
    """
    rows, columns = queries.shape[2], keys.shape[2]
    plain = mask is None and not any(pads or ()) and options.window == 0
    if options.softcap == 0 and options.sink_logits is None:
        if plain and rows in (1, columns):
            return scaled_dot_product_attention(
                queries, keys, values, is_causal=rows > 1, scale=options.scale, enable_gqa=True
            )
        allowed = mask if mask is not None else causal_mask(rows, columns, pads, options.window, queries.device)
        if allowed.dtype != torch.bool:
            allowed = allowed.to(queries.dtype)
        grouped = queries.device.type == "cpu"  # elsewhere no fused kernel takes both a mask and grouped heads
        if not grouped:
            repeat = queries.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
        out = scaled_dot_product_attention(
            queries, keys, values, attn_mask=allowed, scale=options.scale, enable_gqa=grouped
        )
        # sdpa's result for a row that sees nothing depends on its backend
        return out if allowed.dtype != torch.bool else out * allowed.any(-1, keepdim=True).to(out.dtype)
    allowed = mask if mask is not None else causal_mask(rows, columns, pads, options.window, queries.device)
    return _dense_softmax(queries, keys, values, allowed, options)


def causal_mask(rows: int, columns: int, pads: list[int] | None, window: int, device: torch.device) -> Tensor:
    """Bool [batch or 1, 1, rows, columns]: True where the query of a column may see the key of a column."""
    query = torch.arange(columns - rows, columns, device=device)[:, None]
    key = torch.arange(columns, device=device)[None, :]
    allowed = key <= query
    if window > 0:
        allowed = allowed & (query - key < window)
    allowed = allowed[None, None]
    if pads is not None and any(pads):
        first = torch.tensor(pads, device=device).view(-1, 1, 1, 1)
        allowed = allowed & (key >= first) & (query >= first)
    return allowed


def _dense_softmax(queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, options: AttentionOptions) -> Tensor:
    """Softmax attention in fp32 with a soft cap and learned sinks, which torch's own function lacks."""
    repeat = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1).float(), values.repeat_interleave(repeat, 1).float()
    scores = queries.float() @ keys.transpose(-1, -2) * options.scale
    if options.softcap > 0:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    hide = allowed.dtype == torch.bool
    scores = scores.masked_fill(~allowed, -torch.inf) if hide else scores + allowed.float()
    if options.sink_logits is not None:
        sinks = options.sink_logits.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total > 0, weights / total, 0.0)[..., : keys.shape[2]]
    return (weights @ values).to(queries.dtype)


def _count(layer: PackedLayer, rows: int, window: int, counters: Counters) -> None:
    sinks, columns, packed, visible, packed_any = layer.config.sinks, layer.columns, 0, 0, False
    for row in layer.rows:
        seq_len, end = columns - row.pad, row.packed_len
        packed_any = packed_any or end > 0
        if seq_len <= 0:
            continue
        if rows == 1 and window == 0:  # a step of most layers: it sees everything
            packed += end - sinks if end > sinks else 0
            visible += seq_len
        else:
            packed += visible_pairs(rows, seq_len, min(sinks, end), end, window)
            visible += visible_pairs(rows, seq_len, 0, seq_len, window)
    counters.packed_reads += packed
    counters.dense_reads += visible - packed
    if packed_any:
        counters.packed_calls += 1
    else:
        counters.dense_calls += 1
