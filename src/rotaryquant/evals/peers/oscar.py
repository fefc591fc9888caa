"""OSCAR (arXiv 2605.17757): rotations from what attention does with the rows, then clipped uniform codes at 2 bits.

Keys turn into the eigenbasis of the queries' second moment, values into that of the values weighted by the attention
they get; a Hadamard matrix then spreads the directions, in bit-reversed order, over a row.
"""

import torch
from torch import Tensor

from rotaryquant.evals.peers.rounding import ranged
from rotaryquant.evals.simulated import Peer, Place
from rotaryquant.formats.rotation import hadamard

_BITS, _CLIPS = 2, (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
_FITTED_ROWS = 1024


def bit_reversed(count: int) -> Tensor:
    """The order of [0, count) by reversed binary digits; as it is where count is no power of two."""
    if count & (count - 1):
        return torch.arange(count)
    digits = count.bit_length() - 1
    return torch.tensor([int(f"{i:0{digits}b}"[::-1], 2) if digits else 0 for i in range(count)])


def rotation_of(moment: Tensor) -> Tensor:
    """Orthogonal [heads, width, width] whose columns a row is multiplied with. moment: [heads, width, width]."""
    width = moment.shape[-1]
    basis: Tensor = torch.linalg.eigh(moment.double())[1].flip(-1).float()  # strongest direction first
    spread = torch.tensor(hadamard(width), dtype=torch.float32, device=basis.device)
    return basis[..., bit_reversed(width).to(basis.device)] @ spread


class _Oscar:
    def __init__(self, bits: int, place: Place) -> None:
        assert place.facts is not None
        self._bits = bits
        self.key_bits = self.value_bits = bits + 32 / place.width
        self._turns = rotation_of(place.facts.query_moment), rotation_of(place.facts.value_moment)
        rows = place.facts.keys[:, :_FITTED_ROWS], place.facts.values[:, :_FITTED_ROWS]
        self._clips = [self._best_clip(part @ turn) for part, turn in zip(rows, self._turns, strict=True)]

    def _best_clip(self, rows: Tensor) -> float:
        def error(clip: float) -> float:
            return float((ranged(rows, self._bits, rows.shape[-1], clip=clip) - rows).square().sum())

        return min(_CLIPS, key=error)

    def _rebuild(self, rows: Tensor, which: int) -> Tensor:
        turn = self._turns[which]
        return ranged(rows @ turn, self._bits, rows.shape[-1], clip=self._clips[which]) @ turn.transpose(-1, -2)

    def keys(self, rows: Tensor) -> Tensor:
        return self._rebuild(rows, 0)

    def values(self, rows: Tensor) -> Tensor:
        return self._rebuild(rows, 1)


PEERS = [
    Peer(
        "oscar2",
        "OSCAR, arXiv 2605.17757",
        "calibrated rotations, 2-bit uniform codes with a fitted clip",
        lambda place: _Oscar(_BITS, place),
        sinks=64,
        tail=240,
        calibrated=True,
        at=lambda place, bits: _Oscar(bits, place),
    )
]
