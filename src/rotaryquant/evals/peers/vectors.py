"""Codes of two coordinates at a time (turbo-attn 0.70): Hadamard, a codebook of 4^bits pairs, bf16 norms corrected so
that a rebuilt row is as long as it was, the newest 128 tokens at 8 bits.
"""

from functools import cache

import torch
from torch import Tensor

from rotaryquant.evals.peers.rounding import at_most_four, rotation, turned
from rotaryquant.evals.simulated import Peer, Place

_SAMPLES, _ROUNDS = 200_000, 60


@cache
def pair_codebook(bits: int) -> Tensor:
    """4^bits points for pairs of standard normal numbers, by k-means on a fixed sample: fp32 [4^bits, 2] on the CPU."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(_SAMPLES, 2, generator=generator)
    points = sample[: 4**bits].clone()
    for _ in range(_ROUNDS):
        nearest = _nearest(sample, points)
        counts = torch.bincount(nearest, minlength=len(points)).clamp_min(1)
        points = torch.zeros_like(points).index_add_(0, nearest, sample) / counts[:, None]
    return points


def _nearest(pairs: Tensor, points: Tensor) -> Tensor:
    """Index of the closest point of each pair: int64, the shape of `pairs` without its last dimension."""
    return (pairs @ points.T - points.square().sum(-1) / 2).argmax(-1)


class _Pairs:
    def __init__(self, bits: int, place: Place) -> None:
        self._points = pair_codebook(bits).to(place.device)
        self.key_bits = self.value_bits = bits + 16 / place.width
        self._by = [rotation("hadamard", place, stream) for stream in ("key", "value")]

    def _rebuild(self, rows: Tensor, which: int) -> Tensor:
        y = turned(rows, self._by[which])
        norm = y.norm(dim=-1, keepdim=True)
        pairs = (y / torch.where(norm > 0, norm, 1.0) * rows.shape[-1] ** 0.5).unflatten(-1, (-1, 2))
        codes = self._points[_nearest(pairs, self._points)].flatten(-2)
        scale = (norm / codes.norm(dim=-1, keepdim=True)).bfloat16().float()
        return turned(codes * scale, self._by[which], back=True)

    def keys(self, rows: Tensor) -> Tensor:
        return self._rebuild(rows, 0)

    def values(self, rows: Tensor) -> Tensor:
        return self._rebuild(rows, 1)


def _make(place: Place) -> _Pairs:
    return _Pairs(3, place)


PEERS = [
    Peer(
        "vq3",
        "turbo-attn 0.70",
        "Hadamard, 64 points for pairs of coordinates, corrected bf16 norms",
        _make,
        tail=112,
        exact_bits=8,
        at=lambda place, bits: at_most_four(_Pairs, bits, place),
    )
]
