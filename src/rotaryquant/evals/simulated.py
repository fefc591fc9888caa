"""Other ways to store keys and values, run through the same cache as ours: rows are quantised when ours would be
packed, rebuilt at once, and read exactly from where they lie. Quality is that of the real thing, size is counted from
what it would store, and there is no speed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError, NonFiniteError
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.enable import EnabledModel
from rotaryquant.integrations.transformers.geometry import text_config
from rotaryquant.integrations.transformers.undo_rope import KeyRope
from rotaryquant.kv.accounting import LayerBits
from rotaryquant.kv.modes import editable_tensors
from rotaryquant.kv.packed import PackedLayer


class LayerCodec(Protocol):
    """How one layer stores its rows.

    key_bits, value_bits: stored bits per value, everything per row or group counted; where rows differ in what they
    take, of the rows so far.
    """

    @property
    def key_bits(self) -> float:
        """Of keys."""

    @property
    def value_bits(self) -> float:
        """Of values."""

    def keys(self, rows: Tensor) -> Tensor:
        """Consecutive keys, fp32 [num_kv_heads, rows, width], as they come back; after RoPE, or before it where the
        peer keeps them so.
        """

    def values(self, rows: Tensor) -> Tensor:
        """The same for values."""


@dataclass(frozen=True)
class Facts:
    """What a calibration text shows of one layer.

    keys, values: its rows as codecs see them, fp32 [num_kv_heads, tokens, width], windows one after another.
    query_moment: mean of q·qᵀ over the query heads of a KV head, fp32 [num_kv_heads, width, width]. value_moment: mean
    of v·vᵀ, each v weighted by the squared attention that it got, of the same shape. value_weights: that squared
    attention, fp32 [num_kv_heads, tokens]. key_sensitivity, value_sensitivity: squared gradients of the loss at the
    first rows, fp32 [num_kv_heads, up to tokens, width].

    What is None was not asked for: all rows, or all values of the first rows, then count alike.
    """

    keys: Tensor
    values: Tensor
    query_moment: Tensor
    value_moment: Tensor
    value_weights: Tensor | None = None
    key_sensitivity: Tensor | None = None
    value_sensitivity: Tensor | None = None


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """Where a codec works: `index` counts the model's packed layers, of which there are `count`.

    facts: for peers that are calibrated, None for others. device: of the rows, which a codec's own tables follow.
    """

    index: int
    count: int
    num_kv_heads: int
    width: int
    facts: Facts | None = None
    device: torch.device = _CPU


@dataclass(frozen=True)
class Peer:
    """A published way to store a KV cache.

    source: where it is described. says: in one line, what is done. sinks, tail: first and newest tokens it keeps exact
    as published. exact_bits: of values in those. make: its codec for a layer. at: the same with other bits. calibrated:
    wants facts. before_rope: keeps keys as they were before RoPE, and wants facts with sensitivities.
    """

    name: str
    source: str
    says: str
    make: Callable[[Place], LayerCodec]
    sinks: int = 0
    tail: int = 0
    exact_bits: int = 16
    calibrated: bool = False
    before_rope: bool = False
    at: Callable[[Place, int], LayerCodec] | None = None


class _Granted:
    """A peer's codec with the bits of an allocation, which need not be the same for keys and values."""

    def __init__(self, peer: Peer, place: Place, key_bits: int, value_bits: int) -> None:
        if peer.at is None:
            raise ConfigError(f"kv={peer.name} has one width of codes; calibration cannot give its layers others")
        self._of_keys, self._of_values = peer.at(place, key_bits), peer.at(place, value_bits)
        self.keys, self.values = self._of_keys.keys, self._of_values.values

    @property
    def key_bits(self) -> float:
        return self._of_keys.key_bits

    @property
    def value_bits(self) -> float:
        return self._of_values.value_bits


@dataclass(frozen=True)
class Simulation:
    """A peer as it is measured. config: sinks and tail in force, and the name. facts: by model layer, where the peer
    is calibrated. ropes: by model layer, where it keeps keys before RoPE.
    """

    peer: Peer
    config: KVCacheConfig
    facts: dict[int, Facts] | None = None
    ropes: dict[int, KeyRope] = field(default_factory=dict)
    _codecs: dict[int, LayerCodec] = field(default_factory=dict, init=False, compare=False)  # by model layer

    def new_cache(self, state: EnabledModel) -> PackedCache:
        """An empty cache for a model that is enabled with `config`."""
        if (self.peer.calibrated and self.facts is None) or (self.peer.before_rope and not self.ropes):
            raise ConfigError(f"{self.peer.name} is calibrated on a text: use `eval fidelity --calibration FILE`")
        packable = [layer for layer in state.geometry if layer.packable]
        facts, device = self.facts or {}, state.model.device
        places = {
            layer.index: Place(
                number, len(packable), layer.num_kv_heads, layer.head_dim, facts.get(layer.index), device
            )
            for number, layer in enumerate(packable)
        }

        def make_layer(config: KVCacheConfig, layer: int, max_tokens: int | None, slow: Tensor | None) -> PackedLayer:
            if layer not in self._codecs:  # made once: what is fitted takes a while
                self._codecs[layer] = self._codec(config, places[layer])
            codec, rope = self._codecs[layer], self.ropes[layer] if self.peer.before_rope else None
            return SimulatedLayer(config, layer, self.peer, places[layer], codec, rope)

        return PackedCache(text_config(state.model), self.config, make_layer=make_layer)

    def _codec(self, config: KVCacheConfig, place: Place) -> LayerCodec:
        """As published, or with the bits that an allocation has for the layer."""
        if self.config.allocation is None:
            return self.peer.make(place)
        return _Granted(self.peer, place, config.key_bits, config.value_bits)

    def summary(self, count: int) -> str:
        """One line on what is in force in `count` layers."""
        exact = (
            f"{self.config.sinks} first and at least {self.config.tail} newest tokens at {self.peer.exact_bits} bits"
        )
        return f"kv={self.config.name}: {count} layers as {self.peer.source}: {self.peer.says}; {exact}; simulated"


@runtime_checkable
class Variant(Protocol):
    """A cache that is measured in place of ours, as a simulated peer.

    config: what the model is enabled with, and the name.
    """

    @property
    def config(self) -> KVCacheConfig:
        """See above."""

    def new_cache(self, state: EnabledModel) -> PackedCache:
        """An empty cache for a model that is enabled with `config`."""

    def summary(self, count: int) -> str:
        """One line on what is in force in `count` layers."""


def new_cache(state: EnabledModel, kv: KVCacheConfig | Variant) -> PackedCache:
    """An empty cache for a model that is enabled with `kv`, or with a variant's configuration."""
    return kv.new_cache(state) if isinstance(kv, Variant) else state.new_cache()


@dataclass(frozen=True)
class _Rows:
    """A row format by its bits alone."""

    width: int
    row_bytes: float


class SimulatedLayer(PackedLayer):
    """A layer whose due rows are replaced by what a peer's codec makes of them; sinks stay as they are.

    rope: what the codec's keys lack, None where it takes them as a cache does.
    """

    def __init__(
        self, config: KVCacheConfig, layer: int, peer: Peer, place: Place, codec: LayerCodec, rope: KeyRope | None
    ) -> None:
        super().__init__(config, layer)
        self._peer, self._place_in_model, self._codec, self._rope = peer, place, codec, rope

    def all_staged(self) -> bool:
        """Always: rebuilt rows lie among the exact ones."""
        return True

    @editable_tensors
    def _pack(self, begins: list[int], ends: list[int]) -> None:
        keys, values = self.dense.staged()
        for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            row = self.rows[index]
            first = row.pad - self.dense.start
            kept = min(max(self.config.sinks - begin, 0), end - begin)
            for what, staged, code in (("keys", keys, self._keys), ("values", values, self._values)):
                part = staged[index, :, first + begin : first + end]
                if end == begin:
                    continue
                rebuilt = code(part.float(), begin)
                if not bool(torch.isfinite(rebuilt).all()):
                    raise NonFiniteError(f"layer {self.layer}: {self._peer.name} rebuilds {what} as NaN or infinity")
                part[:, kept:] = rebuilt[:, kept:].to(part.dtype)
            row.packed_len = end

    def _keys(self, rows: Tensor, begin: int) -> Tensor:
        """Keys of positions from `begin` on, as they come back."""
        if self._rope is None:
            return self._codec.keys(rows)
        positions = torch.arange(begin, begin + rows.shape[1], device=rows.device)
        return self._rope.redo(self._codec.keys(self._rope.undo(rows, positions)), positions)

    def _values(self, rows: Tensor, begin: int) -> Tensor:
        return self._codec.values(rows)

    def stored(self) -> LayerBits | None:
        """What the peer would store for one sequence."""
        codec, place = self._codec, self._place_in_model
        keys, values = (_Rows(place.width, place.width * bits / 8) for bits in (codec.key_bits, codec.value_bits))
        return LayerBits(
            keys, values, place.num_kv_heads, self.config.sinks, self.config.tail, 0,
            self._peer.exact_bits,
        )  # fmt: skip
