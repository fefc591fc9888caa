"""Drive a model or a single layer through its cache in a stated schedule."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from rotaryquant.attention import AttentionOptions, attend
from rotaryquant.counters import Counters
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.kv.state import export_layer
from rotaryquant.ops.packed_attention import Options

#: Relative error that rounded probabilities (7 bits of their block's largest) may cause.
ROUNDED = 1e-2


def round_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every kernel round queries to int8, as those do that multiply integers: then they agree to `ROUNDED`."""
    monkeypatch.setattr("rotaryquant.attention.Options", partial(Options, q_dtype=torch.int8))


def teacher_forced(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: Cache, chunks: Sequence[int], start: int = 0
) -> Tensor:
    """Logits [batch, fed, vocab] of fixed tokens fed in chunks from column `start`, positions without pads."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    parts, begin = [], start
    with torch.no_grad():
        for size in chunks:
            end = begin + size
            out = model(
                input_ids=ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                cache=cache,
                use_cache=True,
            )
            parts.append(out.logits)
            begin = end
    return torch.cat(parts, 1)


def left_padded(rows: Sequence[Tensor], pad_token: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, mask), int64 [batch, columns], of token rows of unequal length, padded on the left."""
    columns = max(row.shape[0] for row in rows)
    ids = torch.full((len(rows), columns), pad_token, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, columns - row.shape[0] :] = row
        mask[index, columns - row.shape[0] :] = 1
    return ids, mask


def feed(
    layer: PackedLayer,
    keys: Tensor,
    values: Tensor,
    chunks: Sequence[int],
    *,
    queries: Tensor | None = None,
    pads: list[int] | None = None,
    prompt: int = 0,
    options: AttentionOptions | None = None,
    counters: Counters | None = None,
    start: int = 0,
) -> Tensor:
    """Attention output of every column while keys and values go in chunk by chunk.

    keys, values: [batch, num_kv_heads, columns, width]; columns from `start` on are fed. queries: [batch,
    num_heads, columns, width], the keys themselves if None. prompt: the first `prompt` chunks are declared as one
    prompt.
    """
    queries = keys if queries is None else queries
    options = options or AttentionOptions(keys.shape[-1] ** -0.5)
    outputs, begin = [], start
    if prompt:
        layer.begin_prefill()
    for index, size in enumerate(chunks):
        part = slice(begin, begin + size)
        layer.update(keys[:, :, part], values[:, :, part])
        outputs.append(attend(layer, queries[:, :, part], options, counters or Counters(), pads=pads))
        begin += size
        if prompt == index + 1:
            layer.end_prefill()
    return torch.cat(outputs, 2)


def packed_bytes(layer: PackedLayer, row: int = 0, count: int | None = None) -> list[Tensor]:
    """Canonical codes and scales of a batch row's first `count` packed positions: keys' two, then values'."""
    _, tensors = export_layer(layer)
    parts = [tensors[f"rows.{row}.{stream}.{part}"] for stream in ("key", "value") for part in ("codes", "scales")]
    return [part[:, :count] for part in parts]


def seen_rows(layer: PackedLayer, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a batch row as attention must see them: exact where they are kept so, else decoded.

    fp32 [num_kv_heads, tokens, width]. A position that is neither packed nor exact comes back as NaN.
    """
    seq_len, packed = layer.seq_lens()[row], layer.rows[row].packed_len
    assert layer.dense.keys is not None
    assert layer.dense.values is not None
    heads, key_width, value_width = layer.dense.keys.shape[1], layer.dense.keys.shape[3], layer.dense.values.shape[3]
    keys = torch.full((heads, seq_len, key_width), torch.nan)
    values = torch.full((heads, seq_len, value_width), torch.nan)
    if packed:
        keys[:, :packed], values[:, :packed] = layer.decode_keys(row), layer.decode_values(row)
    hidden = min(packed, layer.config.sinks)
    keys[:, :hidden] = values[:, :hidden] = torch.nan  # attention masks these: their exact rows must be there
    for slot, position in enumerate(layer.dense.positions[row].tolist()):
        if 0 <= position < seq_len:
            keys[:, position] = layer.dense.keys[row, :, slot].float()
            values[:, position] = layer.dense.values[row, :, slot].float()
    return keys, values
