"""Packed attention from the definition: unpack every row, one softmax in fp32."""

import math

import torch
from torch import Tensor

from rotaryquant.ops.pack import reference as pack
from rotaryquant.ops.packed_attention import Options
from rotaryquant.ops.quantize import reference as quantize
from rotaryquant.ops.rotate import reference as rotate
from rotaryquant.ops.streams import BLOCK, CacheView, PackedStream, block_rows


def unsupported(q: Tensor, view: CacheView, options: Options, mask: Tensor | None) -> str | None:
    """Takes every call."""
    return None


def packed_rows(stream: PackedStream, blocks: list[int], count: int) -> Tensor:
    """Rows [0, count) of the given blocks in the rotated space, fp32 [num_kv_heads, count, width]."""
    if count == 0:
        return torch.zeros(0)
    codec = stream.codec
    parts = [block_rows(stream, block) for block in blocks[: -(-count // BLOCK)]]
    codes, scales = (torch.cat(part, 1)[:, :count] for part in zip(*parts, strict=True))
    unpacked = pack.run("unpack_sealed", codes, codec.bits, codec.width, codec.layout)  # strips never cross blocks
    return quantize.dequantize(unpacked, scales, codec)


def row_sizes(stream: PackedStream, blocks: list[int], count: int) -> Tensor:
    """|k̂|² of rows [0, count) as their scales tell it, width·(scale / unit)²: fp32 [num_kv_heads, count]."""
    scales = [block_rows(stream, block)[1][:, :, 0].float() for block in blocks]
    return stream.codec.width * (torch.cat(scales, 1)[:, :count] / stream.codec.unit).square()


def _round(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Rounding rule: bf16 to nearest; int8 to a step of each last-dimension row's largest magnitude / 127."""
    if dtype in (None, torch.float32):
        return x
    if dtype == torch.bfloat16:
        return x.bfloat16().float()
    step = x.abs().amax(-1, keepdim=True) / 127.0
    return torch.where(step == 0, torch.zeros_like(x), (x / step).round() * step)


def _visible(query_positions: Tensor, key_positions: Tensor, causal: bool, window: int) -> Tensor:
    """Bool [rows, keys]: which keys each query may see."""
    seen = (key_positions >= 0)[None, :] & (query_positions >= 0)[:, None]
    gap = query_positions[:, None] - key_positions[None, :]
    if causal:
        seen = seen & (gap >= 0)
    if window > 0:
        seen = seen & (gap < window)
    return seen


def _alike(view: CacheView) -> list[tuple[int, int, list[int]]]:
    """(packed_len, seq_len, rows) of the batch's rows by what they read: what they share is unpacked once."""
    groups: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for row, blocks in enumerate(view.block_table.tolist()):
        packed_len, seq_len = int(view.packed_lens[row]), int(view.seq_lens[row])
        exact = () if view.dense_positions is None else tuple(view.dense_positions[row].tolist())
        key = packed_len, seq_len, tuple(blocks[: -(-packed_len // BLOCK)]), exact
        groups.setdefault(key, []).append(row)
    return [(packed_len, seq_len, rows) for (packed_len, seq_len, _, _), rows in groups.items()]


def run(q: Tensor, view: CacheView, options: Options, mask: Tensor | None) -> Tensor:
    """Rows of the batch that read the same together, others each on its own; see the op's docstring for shapes."""
    scale, causal, window, softcap, sink_logits, key_noise, inverse, q_dtype, p_dtype = options
    dtype, q = q.dtype, q.float()
    batch, num_heads, rows, width = q.shape
    kv_heads = view.key_rotation.num_kv_heads
    repeat = num_heads // kv_heads
    q_rotated = rotate.run(q.reshape(batch, kv_heads, -1, width), view.key_rotation, False).view_as(q)
    out = q.new_zeros(batch, num_heads, rows, view.values.codec.width)
    dense_out = torch.zeros_like(out)
    for packed_len, seq_len, group in _alike(view):
        own = slice(None) if len(group) == batch else torch.tensor(group, device=q.device)
        blocks = view.block_table[group[0]].tolist()
        query_positions = torch.arange(seq_len - rows, seq_len, device=q.device)
        positions, logits, values = [], [], []
        if packed_len > 0:
            keys = packed_rows(view.keys, blocks, packed_len)
            dots = _round(q_rotated[own], q_dtype) @ keys.repeat_interleave(repeat, 0).transpose(-1, -2)
            if key_noise > 0:
                sizes = row_sizes(view.keys, blocks, packed_len).repeat_interleave(repeat, 0)[:, None, :]
                energy = q_rotated[own].square().sum(-1, keepdim=True) * sizes
                variance = (energy - dots.square()).clamp_min(0) * key_noise / width
                dots = dots - 0.5 * scale * variance  # the common factor `scale` is applied below
            if view.means is not None:
                dots = dots + q[own] @ view.means[own].float().repeat_interleave(repeat, 1)[..., None]
            logits.append(dots)
            values.append(packed_rows(view.values, blocks, packed_len).repeat_interleave(repeat, 0))
            packed_positions = torch.arange(packed_len, device=q.device)
            positions.append(torch.where(packed_positions < view.num_sinks, -1, packed_positions))
        if view.dense_keys is not None and view.dense_values is not None and view.dense_positions is not None:
            places = view.dense_positions[group[0]]  # bookkeeping stays on the CPU
            used = ((places >= 0) & (places < seq_len)).nonzero()[:, 0]  # unused slots may hold anything, NaN included
            places, used = places[used].to(q.device), used.to(q.device)
            keys = view.dense_keys[own][:, :, used].float().repeat_interleave(repeat, 1)
            logits.append(q[own] @ keys.transpose(-1, -2))
            values.append(view.dense_values[own][:, :, used].float().repeat_interleave(repeat, 1))
            positions.append(places.long())
        if not logits:
            continue
        key_positions = torch.cat(positions)
        if key_positions.numel() == 0:
            continue
        scores = torch.cat(logits, -1) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        seen = _visible(query_positions, key_positions, causal, window).expand_as(scores)
        if mask is not None:
            seen = seen & mask[own][..., key_positions.clamp_min(0)]
        weights = _softmax(scores, seen, sink_logits)
        if packed_len > 0:
            out[own] = _round(weights[..., :packed_len], p_dtype) @ values[0]
        if view.dense_keys is not None:
            dense_out[own] = weights[..., packed_len:] @ values[-1]
    if inverse:
        grouped = out.view(batch, kv_heads, -1, out.shape[-1])
        out = rotate.run(grouped, view.value_rotation, True).view_as(out)
    return (out + dense_out).to(dtype)


def _softmax(scores: Tensor, seen: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Weights of the keys that are seen; a learned sink shares the denominator. Zeros where nothing is seen."""
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(-1, keepdim=True)
    if sink_logits is not None:
        top = torch.maximum(top, sink_logits.float()[:, None, None])
    weights = torch.exp(scores - torch.where(top == -math.inf, 0.0, top)).masked_fill(~seen, 0.0)
    total = weights.sum(-1, keepdim=True)
    if sink_logits is not None:
        total = total + torch.exp(sink_logits.float()[:, None, None] - top)
    return torch.where(seen.any(-1, keepdim=True), weights / total, 0.0)
