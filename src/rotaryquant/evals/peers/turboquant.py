"""TurboQuant (arXiv 2504.19874): a dense random rotation, Lloyd-Max codes of the unit vector, the norm as the scale.

`turbo3` itself is a preset of the packed cache. Here is the variant for inner products: one bit less, and one bit for
the sign of a random projection of what is left (QJL), which makes products unbiased.
"""

import math

import torch
from torch import Tensor

from rotaryquant.evals.peers.rounding import at_most_four, half, level_table, nearest, rotation, turned, unit_rows
from rotaryquant.evals.simulated import Peer, Place


class _Residual:
    """Keys at `bits` with one of them spent on the residual, values at `bits` by least error."""

    def __init__(self, bits: int, place: Place) -> None:
        width, heads = place.width, place.num_kv_heads
        self.key_bits, self.value_bits = bits + 32 / width, bits + 16 / width
        self._key_levels, self._value_levels = level_table(place, bits - 1), level_table(place, bits)
        self._keys, self._values = rotation("dense", place, "key"), rotation("dense", place, "value")
        generator = torch.Generator().manual_seed(place.index)  # of the CPU: the same numbers on every device
        self._projection = torch.randn(heads, width, width, generator=generator).to(place.device)

    def keys(self, rows: Tensor) -> Tensor:
        width = rows.shape[-1]
        units, scale = unit_rows(turned(rows, self._keys))
        rounded = nearest(units, self._key_levels) * scale
        rest = turned(rows, self._keys) - rounded
        signs = torch.where(rest @ self._projection.transpose(-1, -2) >= 0, 1.0, -1.0)
        size = half(rest.norm(dim=-1, keepdim=True))
        rounded = rounded + math.sqrt(math.pi / 2) / width * size * (signs @ self._projection)
        return turned(rounded, self._keys, back=True)

    def values(self, rows: Tensor) -> Tensor:
        units, scale = unit_rows(turned(rows, self._values))
        return turned(nearest(units, self._value_levels) * scale, self._values, back=True)


def _make(place: Place) -> _Residual:
    return _Residual(3, place)


PEERS = [
    Peer(
        "turbo3-qjl",
        "TurboQuant for inner products, arXiv 2504.19874",
        "dense rotation, keys at 2 bits and a sign of a random projection of the residual, values at 3",
        _make,
        at=lambda place, bits: at_most_four(_Residual, bits, place),
    )
]
