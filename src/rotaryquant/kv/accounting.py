"""Bits per stored value with everything counted: codes, scales, sinks, tail, means, boosted layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rotaryquant.formats.kv import BLOCK
from rotaryquant.kv.tail import full_tail, mean_tail

_EXACT_BITS = 16


class RowFormat(Protocol):
    """What counting asks of a stream's format."""

    @property
    def width(self) -> int:
        """Values in a row."""

    @property
    def row_bytes(self) -> float:
        """Bytes of one packed row, scales included; a fraction where rows share some."""


@dataclass(frozen=True)
class LayerBits:
    """What one packed layer stores for one sequence of `tokens` tokens.

    keys, values: formats of packed rows. sinks: exact first rows beside their codes. tail: newest tokens that stay
    exact at least, 0 for none. side_values: 16-bit values beside the rows, as removed means, for all heads.
    exact_bits: of a value in a row that stays exact.
    """

    keys: RowFormat
    values: RowFormat
    num_kv_heads: int
    sinks: int
    tail: int
    side_values: int
    exact_bits: int = _EXACT_BITS

    def values_of(self, tokens: int) -> int:
        """K and V values of `tokens` tokens."""
        return tokens * self.num_kv_heads * (self.keys.width + self.values.width)

    def bits(self, tokens: int, exact: float) -> float:
        """Stored bits with `exact` rows of the tail in 16 bits and the others packed."""
        # with a tail, nothing is packed before the first block is complete
        exact = tokens if self.tail and tokens < BLOCK else min(exact, tokens)
        width = self.keys.width + self.values.width
        row_bits = 8 * (self.keys.row_bytes + self.values.row_bytes)
        sinks = min(self.sinks, tokens - exact)  # a sink inside the tail is stored once
        per_head = (tokens - exact) * row_bits + (exact + sinks) * width * self.exact_bits
        return self.num_kv_heads * per_head + self.side_values * _EXACT_BITS


def bits_per_value(layers: Sequence[LayerBits], tokens: int) -> float:
    """Mean stored bits per K/V value of the packed layers at `tokens` tokens, over the tail's fill."""
    return _ratio(layers, tokens, mean_tail)


def bits_worst(layers: Sequence[LayerBits], tokens: int) -> float:
    """The same with a full tail."""
    return _ratio(layers, tokens, full_tail)


def bits_all_layers(layers: Sequence[LayerBits], tokens: int, stock_values: int) -> float:
    """The same over all attention layers; `stock_values` are K/V values that stay at 16 bits."""
    stored = sum(layer.bits(tokens, mean_tail(layer.tail)) for layer in layers) + stock_values * _EXACT_BITS
    return stored / (sum(layer.values_of(tokens) for layer in layers) + stock_values)


def _ratio(layers: Sequence[LayerBits], tokens: int, tail_rows: Callable[[int], float]) -> float:
    total = sum(layer.values_of(tokens) for layer in layers)
    if total == 0:
        raise ValueError(f"tokens={tokens}: no packed values to count")
    return sum(layer.bits(tokens, tail_rows(layer.tail)) for layer in layers) / total
