"""Quantisation from the definition, in plain tensor operations."""

import torch
from torch import Tensor

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
        codes = torch.bucketize(t, codec.boundaries, right=True)
        levels = codec.levels[codes]
    scale = _scale(z, levels, codec, rms) * largest[..., 0]
    scale = torch.where(largest[..., 0] == 0, torch.zeros_like(scale), scale)
    return codes.to(torch.uint8).flatten(-2), scale.to(codec.scale_dtype)


def dequantize(codes: Tensor, scales: Tensor, codec: Codec) -> Tensor:
    """Scale · level, fp32 [..., width]."""
    if codec.bits == 32:
        return codes.view(torch.float32)
    levels = codec.levels[codes.long()].view(*codes.shape[:-1], codec.groups, codec.scale_group)
    return (levels * scales.float()[..., None]).flatten(-2)
