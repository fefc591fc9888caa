"""Bytes of keys and values: at 16 bits, packed, and as memory is really taken. Known from shapes alone: no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rotaryquant.config import KVCacheConfig
from rotaryquant.formats.kv import BLOCK
from rotaryquant.kv.accounting import LayerBits
from rotaryquant.kv.blocks import slab_blocks
from rotaryquant.kv.tail import full_tail, mean_tail

_EXACT_BYTES = 2


class Kept(Protocol):
    """What counting asks of a layer of a model. window: tokens it sees, 0 for all; without heads it keeps nothing."""

    @property
    def index(self) -> int:
        """Its number in the model."""

    @property
    def packable(self) -> bool:
        """Whether `kv` holds for it."""

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""

    @property
    def key_width(self) -> int:
        """Values of a key."""

    @property
    def value_width(self) -> int:
        """Values of a value."""

    @property
    def window(self) -> int:
        """Tokens it sees, 0 for all."""


L = TypeVar("L", bound=Kept)


@dataclass(frozen=True)
class Footprint(Generic[L]):
    """What the caches of a model's layers take.

    layers: its geometry. kv: how full-attention layers are kept, None for 16 bits. Layers that protection gives
    8 bits are not foreseen: they show when the model runs.
    """

    layers: Sequence[L]
    kv: KVCacheConfig | None

    def exact_per_token(self) -> int:
        """Bytes of one token's K and V at 16 bits, all full-attention layers (windows are bounded)."""
        return sum(_row_bytes(layer) for layer in self.layers if layer.packable)

    def packed_per_token(self) -> int:
        """Bytes of one token's K and V once packed, codes and scales, all full-attention layers; 0 for 16 bits."""
        if self.kv is None:
            return 0
        total = 0
        for layer in self.layers:
            if layer.packable:
                formats = self.kv.of_layer(layer.index).stream_formats(layer.key_width, layer.value_width)
                total += layer.num_kv_heads * sum(stream.row_bytes for stream in formats)
        return total

    def exact_bytes(self, tokens: int) -> int:
        """Bytes at 16 bits, layers with a window holding no more than it."""
        return sum(_row_bytes(layer) * _visible(layer, tokens) for layer in self.layers)

    def stored_bytes(self, tokens: int) -> int:
        """Bytes of what has to be stored under `kv`: codes, scales, sinks, mean tail, means; windows at 16 bits."""
        if self.kv is None:
            return self.exact_bytes(tokens)
        total = 0.0
        for layer in self.layers:
            if layer.packable:
                total += self._layer_bits(layer, self.kv).bits(tokens, mean_tail(self.kv.tail)) / 8
            else:
                total += _row_bytes(layer) * _visible(layer, tokens)
        return round(total)

    def held_bytes(self, tokens: int, element_bytes: int = _EXACT_BYTES) -> int:
        """Bytes taken from the system at `tokens` tokens: packed rows come in slabs, exact ones in blocks.

        element_bytes: of the model's dtype, in which exact rows are kept.
        """
        exact = element_bytes / _EXACT_BYTES
        total = 0.0
        for layer in self.layers:
            if layer.packable and self.kv is not None:
                bits = self._layer_bits(layer, self.kv)
                blocks = -(-tokens // BLOCK)
                slab = slab_blocks(blocks)
                packed = bits.num_kv_heads * (bits.keys.row_bytes + bits.values.row_bytes)
                total += -(-blocks // slab) * slab * BLOCK * packed
                tail = -(-max(1, full_tail(self.kv.tail)) // BLOCK) * BLOCK
                total += (tail + self.kv.sinks) * _row_bytes(layer) * exact
            else:
                total += _row_bytes(layer) * _visible(layer, tokens) * exact
        return round(total)

    def prompt_bytes(self, tokens: int, element_bytes: int = _EXACT_BYTES) -> int:
        """Bytes of a prompt kept exact in the full-attention layers until it is packed; 0 where it never is."""
        if self.kv is None or self.kv.prefill != "deferred":
            return 0
        return self.exact_per_token() * tokens * element_bytes // _EXACT_BYTES

    def _layer_bits(self, layer: Kept, kv: KVCacheConfig) -> LayerBits:
        keys, values = kv.of_layer(layer.index).stream_formats(layer.key_width, layer.value_width)
        means = layer.num_kv_heads * layer.key_width if kv.mean else 0
        return LayerBits(keys, values, layer.num_kv_heads, kv.sinks, kv.tail, means)


def _row_bytes(layer: Kept) -> int:
    return layer.num_kv_heads * (layer.key_width + layer.value_width) * _EXACT_BYTES


def _visible(layer: Kept, tokens: int) -> int:
    return min(tokens, layer.window) if layer.window else tokens
