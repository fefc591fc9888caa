"""Trellis codes (TCQ, buun-llama-cpp; QTIP, arXiv 2406.11235): the last few symbols of a row together choose a value.

Each coordinate brings `bits` new bits into a window of 9, whose content names one of 512 values; the encoder finds the
best path (Viterbi). A window starts empty, so that a row stores `bits` a value and its norm.
"""

from functools import cache

import torch
from torch import Tensor

from rotaryquant.evals.peers.rounding import at_most_four, half, rotation, turned
from rotaryquant.evals.simulated import Peer, Place

_WINDOW = 9
_TRAINING_ROWS, _TRAINING_WIDTH, _ROUNDS = 512, 128, 20
_SPREAD = 309  # about .6 · 512, odd
#: Squared errors, of numbers against the values they may get, that are held at a time: what a core's cache takes on a
#: CPU; on an accelerator, where every operation costs as much as thousands of them, many more.
_HELD_ON_CPU, _HELD = 1 << 17, 1 << 23


def best_path(rows: Tensor, values: Tensor, bits: int) -> Tensor:
    """States [rows, width] of the path with the least squared error. rows: fp32 [rows, width]; values: [2^window].

    Of rows that are encoded together, 8 / 2^bits bytes of every state and coordinate are kept.
    """
    held = _HELD_ON_CPU if rows.device.type == "cpu" else _HELD
    return torch.cat([_best_path(part, values, bits, held) for part in torch.split(rows, max(1, held // len(values)))])


def _best_path(rows: Tensor, values: Tensor, bits: int, held: int) -> Tensor:
    """The same of few rows. Each coordinate takes two operations on the way there and three on the way back."""
    count, states, symbols = len(rows), len(values), 2**bits
    leads = states // symbols
    # state s is reached from the states whose low bits are s's high bits: (s >> bits) + k · leads
    cost = torch.full((count, states), torch.inf, device=rows.device)
    cost[:, 0] = 0.0
    came: list[Tensor] = []
    for part in torch.split(rows, max(1, held // max(1, count * states)), 1):
        errors = (part.T[..., None] - values).square().view(part.shape[1], count, leads, symbols)
        for error in errors:
            best, which = cost.view(count, symbols, leads).min(1)  # over k, for each s >> bits
            came.append(which)
            cost = best[..., None] + error
    state = cost.view(count, states).argmin(1, keepdim=True)
    path = [state]
    for which in reversed(came[1:]):
        high = state >> bits
        state = torch.add(high, which.gather(1, high), alpha=leads)
        path.append(state)
    return torch.cat(path[::-1], 1)


@cache
def trellis_values(bits: int) -> Tensor:
    """Value of each window for standard normal numbers, trained on a fixed sample: fp32 [512], on the CPU.

    It starts from the quantiles of the normal distribution, in an order that gives neighboring windows distant values:
    from random ones it ends 8% worse.
    """
    count = 2**_WINDOW
    quantiles = torch.special.ndtri((torch.arange(count) + 0.5) / count)
    values: Tensor = quantiles[(torch.arange(count) * _SPREAD) % count]
    sample = torch.randn(_TRAINING_ROWS, _TRAINING_WIDTH, generator=torch.Generator().manual_seed(0))
    for _ in range(_ROUNDS):
        states = best_path(sample, values, bits).flatten()
        counts = torch.bincount(states, minlength=len(values))
        sums = torch.zeros_like(values).index_add_(0, states, sample.flatten())
        values = torch.where(counts > 0, sums / counts.clamp_min(1), values)
    return values


class _Trellis:
    def __init__(self, bits: int, place: Place) -> None:
        self._bits, self._window = bits, trellis_values(bits).to(place.device)
        self.key_bits = self.value_bits = bits + 16 / place.width
        self._by = [rotation("hadamard", place, stream) for stream in ("key", "value")]

    def _rebuild(self, rows: Tensor, which: int) -> Tensor:
        y = turned(rows, self._by[which])
        norm = y.norm(dim=-1, keepdim=True)
        flat = (y / torch.where(norm > 0, norm, 1.0) * rows.shape[-1] ** 0.5).flatten(0, 1)
        codes = self._window[best_path(flat, self._window, self._bits)].view_as(y)
        products = (y * codes).sum(-1, keepdim=True)
        scale = half(torch.where(products > 0, norm.square() / products, 0.0))  # unbiased, as ours
        return turned(codes * scale, self._by[which], back=True)

    def keys(self, rows: Tensor) -> Tensor:
        return self._rebuild(rows, 0)

    def values(self, rows: Tensor) -> Tensor:
        return self._rebuild(rows, 1)


def _make(place: Place) -> _Trellis:
    return _Trellis(3, place)


PEERS = [
    Peer(
        "tcq3",
        "TCQ, buun-llama-cpp",
        "Hadamard, 3-bit trellis of 512 states, fp16 scale per row",
        _make,
        at=lambda place, bits: at_most_four(_Trellis, bits, place),
    )
]
