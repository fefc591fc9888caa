"""Quantisation from the definition, in plain tensor operations."""

import torch
from torch import Tensor

from rotaryquant.formats.codebook import CYCLE, FINE
from rotaryquant.ops.streams import Codec

#: Circles of a trellis that are coded together: 512 sums of each are held.
_CIRCLES = 4096


def unsupported(y: Tensor, codec: Codec) -> str | None:
    """Takes every call."""
    return None


def _scale(y: Tensor, levels: Tensor, codec: Codec, rms: Tensor) -> Tensor:
    """Scale of each group by the codec's rule; y and levels [..., groups, scale_group]."""
    if codec.scale_rule == "norm":
        # 8 bits: the step that `quantize` used; otherwise the codebook's unit times the root mean square
        return y.abs().amax(-1) / 127.0 if codec.bits == 8 else rms[..., 0] * codec.unit
    dot = (y * levels).sum(-1)
    if codec.scale_rule == "score":
        return (y * y).sum(-1) / dot
    return dot / (levels * levels).sum(-1)


def _levels(codes: Tensor, codec: Codec) -> Tensor:
    """Level of each code, of the same shape; in a trellis it depends on the code before it in its circle too."""
    if codec.trellis:
        circles = codes.view(*codes.shape[:-1], codes.shape[-1] // CYCLE, CYCLE)
        codes = (8 * circles.roll(1, -1) + circles).flatten(-2)
    return codec.levels[codes]


def _trellis_codes(t: Tensor, codec: Codec) -> Tensor:
    """Codes int64 of values in units of their root mean square: the circles with the least squared error.

    Errors are counted in integers, FINE of them to a step of a level, so that ties do not depend on rounding: of equal
    circles the one with the lowest last code is taken, and then the lowest codes before it.
    """
    fine = (t * (FINE / codec.unit) + 0.5).floor().long()
    circles = fine.reshape(-1, CYCLE)
    levels = FINE * codec.levels.long().view(8, 8)
    parts = [_best_circles(part, levels) for part in torch.split(circles, _CIRCLES)]
    return torch.cat(parts).view(t.shape)


def _best_circles(x: Tensor, levels: Tensor) -> Tensor:
    """Codes [circles, CYCLE] of x, integers of the same shape (Viterbi for each last code). levels: [before, code]."""
    circles, states = len(x), len(levels)
    unreached = torch.iinfo(torch.int64).max // (4 * states)
    cost = torch.full((circles, states, states), unreached, device=x.device)  # of each last code and state
    cost.diagonal(dim1=1, dim2=2).zero_()
    came = []
    for column in range(CYCLE):
        error = (x[:, column, None, None] - levels).square()  # [circles, before, code]
        least = ((cost[..., None] + error[:, None]) * states + torch.arange(states, device=x.device)[:, None]).amin(2)
        cost = least // states
        came.append(least % states)
    state = (cost.diagonal(dim1=1, dim2=2) * states + torch.arange(states, device=x.device)).amin(1) % states
    end, rows, codes = state, torch.arange(circles, device=x.device), torch.empty_like(x)
    for column in range(CYCLE - 1, -1, -1):
        codes[:, column] = state
        state = came[column][rows, end, state]
    return codes


def run(y: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Codes and scales of y."""
    if codec.bits == 32:
        codes = y.float().contiguous().view(torch.int32)
        return codes, torch.ones(*y.shape[:-1], codec.groups, dtype=codec.scale_dtype, device=y.device)
    y = y.float().reshape(*y.shape[:-1], codec.groups, codec.scale_group)
    largest = y.abs().amax(-1, keepdim=True)
    z = torch.where(largest == 0, torch.zeros_like(y), y / largest)  # so that squares neither vanish nor overflow
    rms = (z * z).mean(-1, keepdim=True).sqrt()
    if codec.bits == 8:
        codes = (z * 127.0 + 0.5).floor() + 128.0
        levels = codes - 128.0
    else:
        t = torch.where(rms == 0, torch.zeros_like(z), z / rms)
        codes = _trellis_codes(t, codec) if codec.trellis else torch.bucketize(t, codec.boundaries, right=True)
        levels = _levels(codes, codec)
    scale = _scale(z, levels, codec, rms) * largest[..., 0]
    scale = torch.where(largest[..., 0] == 0, torch.zeros_like(scale), scale)
    return codes.to(torch.uint8).flatten(-2), scale.to(codec.scale_dtype)


def dequantize(codes: Tensor, scales: Tensor, codec: Codec) -> Tensor:
    """Scale · level, fp32 [..., width]."""
    if codec.bits == 32:
        return codes.view(torch.float32)
    levels = _levels(codes.long(), codec).view(*codes.shape[:-1], codec.groups, codec.scale_group)
    return (levels * scales.float()[..., None]).flatten(-2)
