"""Quantisation from the definition, in plain tensor operations."""

import torch
from torch import Tensor

from rotaryquant.formats.codebook import CYCLE, FINE
from rotaryquant.ops.circles import best_circles
from rotaryquant.ops.streams import Codec


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
    """Level of each code, of the same shape; in a trellis it depends on the class of the one before it too."""
    if codec.trellis:
        circles = codes.reshape(*codes.shape[:-1], codes.shape[-1] // CYCLE, CYCLE)
        before = circles.roll(1, -1) % codec.classes
        codes = ((before << codec.bits) + circles).flatten(-2)
    return codec.levels[codes]


def _codes(t: Tensor, codec: Codec) -> Tensor:
    """Codes int64 of values in units of their root mean square, each or each circle for itself."""
    return _trellis_codes(t, codec) if codec.trellis else torch.bucketize(t, codec.boundaries, right=True)


def _codes_with_feedback(t: Tensor, codec: Codec) -> Tensor:
    """The same block after block, errors so far added to later columns; t [..., num_kv_heads, rows, width]."""
    assert codec.feedback is not None
    codes, wanted = torch.empty(t.shape, dtype=torch.int64, device=t.device), t.clone()
    for begin in range(0, codec.width, CYCLE):
        block, later = slice(begin, begin + CYCLE), slice(begin + CYCLE, codec.width)
        codes[..., block] = _codes(wanted[..., block].contiguous(), codec)
        error = t[..., block] - _levels(codes[..., block], codec) * codec.unit
        wanted[..., later] += error @ codec.feedback[:, block, later]
    return codes


def _trellis_codes(t: Tensor, codec: Codec) -> Tensor:
    """Codes int64 of values in units of their root mean square, errors counted FINE to a step of a level."""
    fine = (t * (FINE / codec.unit) + 0.5).floor().long()
    levels = FINE * codec.levels.long().view(codec.classes, -1)
    kernel = "reference" if t.is_cpu else "auto"  # what the C++ kernels are compared with shares nothing with them
    return best_circles(fine.reshape(-1, CYCLE), levels, kernel=kernel).view(t.shape)


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
        codes = _codes(t, codec)
        if codec.feedback is not None:  # one group
            codes = torch.where(rms == 0, codes, _codes_with_feedback(t[..., 0, :], codec)[..., None, :])
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
