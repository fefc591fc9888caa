"""Plain integers: uniform codes per token in groups of 64 values, as MLX and others store a quantised cache."""

from torch import Tensor

from rotaryquant.evals.peers.rounding import ranged
from rotaryquant.evals.simulated import Peer, Place

_GROUP = 64


class _Groups:
    def __init__(self, bits: int, width: int) -> None:
        self._bits, self._group = bits, min(_GROUP, width)
        self.key_bits = self.value_bits = bits + 32 / self._group

    def keys(self, rows: Tensor) -> Tensor:
        return ranged(rows, self._bits, self._group)

    values = keys


def _peer(bits: int) -> Peer:
    def make(place: Place) -> _Groups:
        return _Groups(bits, place.width)

    says = f"{bits}-bit uniform codes, fp16 step and zero per 64 values"
    return Peer(f"int{bits}", "MLX affine, group 64", says, make, at=lambda place, bits: _Groups(bits, place.width))


PEERS = [_peer(bits) for bits in (2, 3, 4, 8)]
