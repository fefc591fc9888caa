"""vLLM's 3-bit cache (turboquant_3bit_nc, vLLM pull request 38479): Hadamard and Lloyd-Max keys, uniform values, the
first and last two layers left alone.
"""

from torch import Tensor

from rotaryquant.evals.peers.rounding import at_most_four, level_table, nearest, ranged, rotation, turned, unit_rows
from rotaryquant.evals.simulated import LayerCodec, Peer, Place

_BITS, _SKIPPED = 3, 2


class _Exact:
    key_bits = value_bits = 16.0

    def keys(self, rows: Tensor) -> Tensor:
        return rows

    values = keys


class _Vllm:
    def __init__(self, bits: int, place: Place) -> None:
        self._bits = bits
        self.key_bits, self.value_bits = bits + 16 / place.width, bits + 32 / place.width
        self._levels = level_table(place, bits)
        self._by = rotation("hadamard", place, "key", signs=False)

    def keys(self, rows: Tensor) -> Tensor:
        units, scale = unit_rows(turned(rows, self._by))
        return turned(nearest(units, self._levels) * scale, self._by, back=True)

    def values(self, rows: Tensor) -> Tensor:
        return ranged(rows, self._bits, rows.shape[-1])


def _make(place: Place) -> LayerCodec:
    ends = place.index < _SKIPPED or place.index >= place.count - _SKIPPED
    return _Exact() if ends else _Vllm(_BITS, place)


PEERS = [
    Peer(
        "vllm3",
        "vLLM turboquant_3bit_nc",
        "Hadamard and 3-bit Lloyd-Max keys, 3-bit uniform values as they are, first and last two layers at 16 bits",
        _make,
        at=lambda place, bits: at_most_four(_Vllm, bits, place),
    )
]
