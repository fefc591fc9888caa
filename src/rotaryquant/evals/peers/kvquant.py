"""KVQuant (arXiv 2401.18079): keys before RoPE per channel, values per token, codes of a fitted non-uniform datatype,
1% of each vector beside them as 16-bit outliers, the first token exact.

A vector without its outliers is brought to [-1, 1]. What channels are brought there by, and the thresholds of their
outliers, come from a calibration text; tokens find theirs as they come. The levels in [-1, 1], one set for the keys of
a layer and one for its values, minimise Σ F·(x - x̂)² there, F the squared gradient of the loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rotaryquant.evals.peers.rounding import at_most_four, half, nearest
from rotaryquant.evals.simulated import Peer, Place

_BITS, _OUTLIERS, _ROUNDS = 3, 0.01, 100
#: An outlier and its place in the vector; where a token's outliers begin, as their number differs for keys; the middle
#: and reach of a token's values.
_OUTLIER_BITS, _POINTER_BITS, _RANGE_BITS = 32, 32, 32


def fitted_levels(values: Tensor, weights: Tensor, bits: int) -> Tensor:
    """2^bits ascending levels that minimise Σ weight·(value - nearest level)²: k-means from quantiles.

    values, weights: of one shape; weights may not be negative. Returns fp32. A level that no value is near stays.
    """
    order = values.flatten().double().sort()
    x, w = order.values, weights.flatten().double()[order.indices]
    mass = torch.nn.functional.pad(w.cumsum(0), (1, 0))
    moment = torch.nn.functional.pad((w * x).cumsum(0), (1, 0))
    shares = (torch.arange(2**bits, device=x.device, dtype=x.dtype) + 0.5) / 2**bits * mass[-1]
    levels = x[torch.searchsorted(mass[1:], shares).clamp_max(len(x) - 1)]
    for _ in range(_ROUNDS):
        edges = torch.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        edges = torch.cat([edges.new_zeros(1), edges, edges.new_full((1,), len(x))])
        total = mass[edges].diff()
        means = moment[edges].diff() / total.clamp_min(torch.finfo(x.dtype).tiny)
        levels = torch.where(total > 0, means, levels).sort().values
    return levels.float()


@dataclass(frozen=True)
class _Range:
    """What brings vectors to [-1, 1], as 16-bit floats: middle and reach."""

    middle: Tensor
    reach: Tensor

    @classmethod
    def between(cls, low: Tensor, high: Tensor) -> "_Range":
        return cls(half((low + high) / 2), half((high - low) / 2))

    def to(self, device: torch.device) -> "_Range":
        return _Range(self.middle.to(device), self.reach.to(device))

    def to_unit(self, rows: Tensor) -> Tensor:
        return (rows - self.middle) / torch.where(self.reach > 0, self.reach, 1.0)

    def back(self, rows: Tensor) -> Tensor:
        return rows * self.reach + self.middle


def _tokens(rows: Tensor) -> Tensor:
    """Heads of a token side by side, as the paper's vectors are: [heads, rows, width] to [rows, heads · width]."""
    return rows.transpose(0, 1).flatten(1)


class _Kvquant:
    def __init__(self, bits: int, place: Place) -> None:
        facts = place.facts
        assert facts is not None
        self._bits, self._heads, self._size = bits, place.num_kv_heads, place.num_kv_heads * place.width
        self._each_end = max(1, round(_OUTLIERS / 2 * self._size))  # of a token's values
        self._seen, self._kept = 0, 0  # keys so far, and how many of them as outliers
        keys = _tokens(facts.keys)
        ordered = keys.sort(0).values
        cut = round(_OUTLIERS / 2 * len(keys))
        self._channels = _Range.between(ordered[cut], ordered[-1 - cut])
        self._key_levels = self._fit(keys, facts.key_sensitivity, self._channels)
        values = _tokens(facts.values)
        self._value_levels = self._fit(values, facts.value_sensitivity, self._of_tokens(values))

    def _fit(self, rows: Tensor, sensitivity: Tensor | None, by: _Range) -> Tensor:
        """Levels for rows [tokens, heads · width], of which the first have a sensitivity."""
        units, weights = by.to_unit(rows), by.reach.square().expand_as(rows)
        if sensitivity is not None:
            found = _tokens(sensitivity)
            units, weights = units[: len(found)], weights[: len(found)] * found
        inner = units.abs() <= 1
        return fitted_levels(units[inner], weights[inner], self._bits)

    def _of_tokens(self, rows: Tensor) -> _Range:
        """The range of each token's values that are no outliers: [tokens, 1]."""
        ordered = rows.sort(-1).values
        return _Range.between(ordered[:, self._each_end, None], ordered[:, -1 - self._each_end, None])

    def _rebuilt(self, rows: Tensor, by: _Range, levels: Tensor, outlying: Tensor) -> Tensor:
        coded = by.back(nearest(by.to_unit(rows), levels.to(rows.device)))
        return torch.where(outlying, half(rows), coded).view(len(rows), self._heads, -1).transpose(0, 1)

    @property
    def key_bits(self) -> float:
        share = self._kept / self._seen if self._seen else _OUTLIERS
        return self._bits + share * _OUTLIER_BITS + _POINTER_BITS / self._size

    @property
    def value_bits(self) -> float:
        return self._bits + (2 * self._each_end * _OUTLIER_BITS + _RANGE_BITS) / self._size

    def keys(self, rows: Tensor) -> Tensor:
        flat, channels = _tokens(rows), self._channels.to(rows.device)
        outlying = channels.to_unit(flat).abs() > 1
        self._seen, self._kept = self._seen + flat.numel(), self._kept + int(outlying.sum())
        return self._rebuilt(flat, channels, self._key_levels, outlying)

    def values(self, rows: Tensor) -> Tensor:
        flat = _tokens(rows)
        places = flat.argsort(dim=-1, stable=True)
        ends = torch.cat([places[:, : self._each_end], places[:, -self._each_end :]], 1)
        outlying = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, ends, True)
        return self._rebuilt(flat, self._of_tokens(flat), self._value_levels, outlying)


PEERS = [
    Peer(
        "kvquant3",
        "KVQuant, arXiv 2401.18079",
        "3-bit fitted levels, keys per channel before RoPE and values per token, 1% outliers beside them",
        lambda place: _Kvquant(_BITS, place),
        sinks=1,
        calibrated=True,
        before_rope=True,
        at=lambda place, bits: at_most_four(_Kvquant, bits, place),
    )
]
