"""Keys that low bits cannot carry: found by the logit error they would cause, before they are packed.

A packed key errs by a fixed share of the row's norm, while attention depends on differences between rows. So
the measure is the expected error of a logit, scale·|q|·|k - mean|·sqrt(mse / width), in nats: it stays small for
ordinary heads whatever their norm and grows with a bias or a massive channel that the mean does not take away.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rotaryquant.errors import UnsupportedModelError
from rotaryquant.formats.codebook import relative_error

#: Bits of the keys of a layer that fails at the configured width.
BOOSTED_BITS = 8


def logit_error(
    query_energy: Tensor, key_energy: Tensor, scale: float, width: int, bits: int, quantizer: str = "scalar"
) -> Tensor:
    """Expected error of a logit per KV head, in nats, fp32 [num_kv_heads].

    query_energy: E|q|² per KV head (the largest of its query heads). key_energy: E|k - mean|² per KV head.
    The direction of the error is independent of q, which gives the factor 1/width.
    """
    variance = query_energy * key_energy * relative_error(width, bits, quantizer) / width
    return scale * variance.sqrt()


def dominating_mean(keys: Tensor, tau: float, slow: Tensor | None = None) -> tuple[Tensor, int]:
    """Mean of each head's keys over its slow coordinates where it carries at least `tau` of their energy, else zero.

    keys: fp32 [num_kv_heads, rows, width], post-RoPE. slow: bool [width], coordinates that RoPE hardly turns, None
    for all. Returns (fp32 [num_kv_heads, width], heads whose mean is removed).

    The criterion is |mean|² / E|k|² (DESIGN section 3), on slow coordinates alone: the constant part of a key that
    RoPE turns points elsewhere some thousand tokens on, where subtracting the first block's mean adds energy.
    """
    mean = keys.mean(1)
    if slow is not None:
        mean = mean * slow.to(mean.device)
    dominates = mean.square().sum(-1) >= tau * keys.square().sum(-1).mean(1)
    return torch.where(dominates[:, None], mean, torch.zeros_like(mean)), int(dominates.sum())


@dataclass(frozen=True)
class Finding:
    """What protection saw in a layer and what it did: recorded once, at the layer's first packing.

    logit_error: expected error of a logit in nats at the configured bits, worst head. bits: bits the keys got.
    mean_heads: how many of its heads had a dominating mean removed. action: kept, boosted, or exposed
    (the error is over the limit and the configuration forbids more bits).
    """

    layer: int
    logit_error: float
    bits: int
    mean_heads: int
    action: str


def judge(
    *,
    layer: int,
    mean_heads: int,
    query_energy: Tensor | None,
    key_energy: Tensor,
    scale: float,
    width: int,
    bits: int,
    quantizer: str = "scalar",
    limit: float,
    may_boost: bool,
) -> Finding:
    """Bits for the keys of a layer that is about to be packed for the first time.

    query_energy, key_energy: see `logit_error`; None if no query was seen. limit: expected error in nats that is
    still fine. Raises UnsupportedModelError where even 8 bits exceed it and more bits are allowed.
    """
    if query_energy is None:
        return Finding(layer, 0.0, bits, mean_heads, "kept")
    error = float(logit_error(query_energy, key_energy, scale, width, bits, quantizer).max())
    if error <= limit or not math.isfinite(error):  # the write reports non-finite keys: it knows their head
        return Finding(layer, error, bits, mean_heads, "kept")
    if not may_boost:
        return Finding(layer, error, bits, mean_heads, "exposed")
    boosted = max(bits, BOOSTED_BITS)
    if (rest := float(logit_error(query_energy, key_energy, scale, width, boosted).max())) > limit:
        raise UnsupportedModelError(
            f"layer {layer}: its keys would err by {rest:.2g} nats per logit even at {boosted} bits (limit "
            f"max_logit_error={limit:g}); their bias or massive channels do not fit a packed cache. Use kv=fp16, or "
            f"raise the limit with kv=...,max_logit_error=N to accept the damage"
        )
    return Finding(layer, error, boosted, mean_heads, "boosted")
