"""KIVI (arXiv 2402.02750): keys per channel over groups of 32 tokens, values per token over groups of 32 channels."""

from torch import Tensor

from rotaryquant.evals.peers.rounding import ranged
from rotaryquant.evals.simulated import Peer, Place

_GROUP = 32


class _Kivi:
    def __init__(self, bits: int) -> None:
        self._bits = bits
        self.key_bits = self.value_bits = bits + 32 / _GROUP

    def keys(self, rows: Tensor) -> Tensor:
        """Whole groups of tokens come together: rows are packed 32 at a time."""
        return ranged(rows.transpose(-1, -2).contiguous(), self._bits, _GROUP).transpose(-1, -2)

    def values(self, rows: Tensor) -> Tensor:
        return ranged(rows, self._bits, _GROUP)


def _peer(bits: int) -> Peer:
    def make(place: Place) -> _Kivi:
        return _Kivi(bits)

    says = f"{bits}-bit uniform codes, keys per channel and 32 tokens, values per token and 32 channels"
    # a residual of 128 tokens: our tail of t keeps t + 16.5 on average
    return Peer(f"kivi{bits}", "KIVI, arXiv 2402.02750", says, make, tail=112, at=lambda place, bits: _Kivi(bits))


PEERS = [_peer(bits) for bits in (2, 4)]
