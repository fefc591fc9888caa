"""QuaRot's cache (arXiv 2404.00456): a Hadamard rotation, then asymmetric uniform codes per token and head."""

from torch import Tensor

from rotaryquant.evals.peers.rounding import ranged, rotation, turned
from rotaryquant.evals.simulated import Peer, Place

_CLIP = 0.95


class _Quarot:
    def __init__(self, bits: int, place: Place) -> None:
        self._bits = bits
        self.key_bits = self.value_bits = bits + 32 / place.width
        self._by = rotation("hadamard", place, "key", signs=False)

    def keys(self, rows: Tensor) -> Tensor:
        return turned(ranged(turned(rows, self._by), self._bits, rows.shape[-1], clip=_CLIP), self._by, back=True)

    values = keys


def _peer(bits: int) -> Peer:
    def make(place: Place) -> _Quarot:
        return _Quarot(bits, place)

    says = f"Hadamard, {bits}-bit uniform codes over {_CLIP} of a row's range, fp16 step and zero per row"
    return Peer(f"quarot{bits}", "QuaRot, arXiv 2404.00456", says, make, at=lambda place, bits: _Quarot(bits, place))


PEERS = [_peer(bits) for bits in (3, 4)]
