"""KVarN (arXiv 2606.03458): Hadamard, then rows and columns of a tile scaled by turns until both vary alike, then
asymmetric uniform codes; keys at 4 bits, values at 2, in tiles of 128 tokens.
"""

import torch
from torch import Tensor

from rotaryquant.evals.peers.rounding import half, ranged, rotation, turned
from rotaryquant.evals.simulated import Peer, Place

_KEY_BITS, _VALUE_BITS, _TILE, _ROUNDS = 4, 2, 128, 6


def balance(tile: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of rows [..., rows, 1] and columns [..., 1, width] that bring both to a root mean square of one."""
    rows = torch.ones_like(tile[..., :1])
    columns = torch.ones_like(tile[..., :1, :])
    for _ in range(_ROUNDS):
        columns = columns * _size(tile / (rows * columns), -2)
        rows = rows * _size(tile / (rows * columns), -1)
    return half(rows), half(columns)


def _size(x: Tensor, dim: int) -> Tensor:
    size = x.square().mean(dim, keepdim=True).sqrt()
    return torch.where(size > 0, size, 1.0)


class _Kvarn:
    def __init__(self, bits: tuple[int, int], place: Place) -> None:
        self._bits = bits
        # a step and a zero per row, a scale per row, a scale per column of a tile
        beside = 48 / place.width + 16 / _TILE
        self.key_bits, self.value_bits = bits[0] + beside, bits[1] + beside
        self._by = [rotation("hadamard", place, stream) for stream in ("key", "value")]

    def _rebuild(self, rows: Tensor, which: int, bits: int) -> Tensor:
        tiles = []
        for tile in torch.split(turned(rows, self._by[which]), _TILE, 1):
            by_row, by_column = balance(tile)
            tiles.append(ranged(tile / (by_row * by_column), bits, rows.shape[-1]) * by_row * by_column)
        return turned(torch.cat(tiles, 1), self._by[which], back=True)

    def keys(self, rows: Tensor) -> Tensor:
        return self._rebuild(rows, 0, self._bits[0])

    def values(self, rows: Tensor) -> Tensor:
        return self._rebuild(rows, 1, self._bits[1])


PEERS = [
    Peer(
        "kvarn-k4v2",
        "KVarN, arXiv 2606.03458",
        "Hadamard, variance balanced over both axes of a tile, uniform codes, keys at 4 bits and values at 2",
        lambda place: _Kvarn((_KEY_BITS, _VALUE_BITS), place),
        sinks=4,
        tail=112,
        at=lambda place, bits: _Kvarn((bits, bits), place),
    )
]
