"""Bits per stored value with everything counted: codes, scales, sinks, tail, means, boosted layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rotaryquant.formats.kv import BLOCK, StreamFormat
from rotaryquant.kv.tail import full_tail, mean_tail

_EXACT_BITS = 16


@dataclass(frozen=True)
class LayerBits:
    """What one packed layer stores for one sequence of `tokens` tokens.

    keys, values: stream formats. sinks: exact first rows beside their codes. tail: newest tokens that stay exact at
    least, 0 for none. mean_values: bf16 values of removed means (num_kv_heads · width), 0 without.
    """

    keys: StreamFormat
    values: StreamFormat
    num_kv_heads: int
    sinks: int
    tail: int
    mean_values: int

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
        per_head = (tokens - exact) * row_bits + (exact + sinks) * width * _EXACT_BITS
        return self.num_kv_heads * per_head + self.mean_values * _EXACT_BITS


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
