"""A transformers Cache whose full-attention layers are packed and whose other layers are the stock ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)

from rotaryquant.config import KVCacheConfig
from rotaryquant.counters import Counters
from rotaryquant.errors import UnsupportedModelError
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.kv.state import merge_layers

#: What makes a layer from its configuration, number, room in columns and slow coordinates.
LayerMaker = Callable[[KVCacheConfig, int, int | None, Tensor | None], PackedLayer]


class KVHandle:
    """What `update` gives the model in place of keys and values: where attention will find them.

    settled: whether attention has told the layer its pads; a layer that shares the cache comes after that.
    """

    __slots__ = ("counters", "layer", "settled")

    def __init__(self, layer: PackedLayer, counters: Counters) -> None:
        self.layer = layer
        self.counters = counters
        self.settled = False

    def to(self, *args: object, **kwargs: object) -> "KVHandle":
        """Stay: a model that shares keys between devices moves them by this call."""
        return self


class PackedCacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The layer contract of transformers on top of `kv.PackedLayer`."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False  # geometry comes from the first keys

    def __init__(
        self,
        config: KVCacheConfig,
        layer: int,
        max_tokens: int | None = None,
        slow: Tensor | None = None,
        make_layer: LayerMaker = PackedLayer,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.packed = make_layer(config, layer, max_tokens, slow)
        self.counters = Counters()

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.packed.batch_size

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember where and in which dtype the model works."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stage new columns; returns one handle as both keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.is_grad_enabled():
            key_states, value_states = key_states.detach(), value_states.detach()
        self.packed.update(key_states, value_states)
        handle = KVHandle(self.packed, self.counters)
        return handle, handle

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns after the coming update, 0)."""
        return self.packed.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns held, pads included."""
        return self.packed.columns

    def get_max_length(self) -> int:
        """Room in columns, -1 for no limit."""
        return -1 if self.packed.max_tokens is None else self.packed.max_tokens

    def reset(self) -> None:
        """Forget everything."""
        self.packed.reset()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` columns (transformers counts them as a negative number)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number of tokens to remove")
        self.packed.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows of the batch in the order of `beam_idx`."""
        if self.packed.rows:
            self.packed.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows `indices` (numbers or a boolean mask)."""
        if self.packed.rows:
            self.packed.select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times in a row."""
        if self.packed.rows:
            self.packed.select(torch.arange(self.packed.batch_size).repeat_interleave(repeats))

    def offload(self) -> None:
        """Packed layers stay where they are."""

    def prefetch(self) -> None:
        """See `offload`."""


def _packed_layer(
    kv: KVCacheConfig, index: int, max_tokens: int | None, slow: Tensor | None, make_layer: LayerMaker
) -> PackedCacheLayer:
    if max_tokens is None:
        return PackedCacheLayer(kv, index, slow=slow, make_layer=make_layer)
    from rotaryquant.integrations.transformers.static import StaticPackedCacheLayer

    return StaticPackedCacheLayer(kv, index, max_tokens, slow)


class PackedCache(Cache):
    """One packed layer per full-attention layer, stock layers for the rest.

    config: the model's (decoder) configuration. kv: how to keep the packed layers. max_tokens: room for that many
    columns, taken at once and never grown (the static variant), or None. slow: for each model layer, the coordinates
    that RoPE hardly turns (`rope.slow_coordinates`); layers that are absent have all. make_layer: what makes packed
    layers of a cache that grows, for those who measure other ways to keep them.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        kv: KVCacheConfig,
        max_tokens: int | None = None,
        slow: dict[int, Tensor] | None = None,
        make_layer: LayerMaker = PackedLayer,
    ) -> None:
        self.kv = kv
        types, kwargs = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        layers: list[Any] = []
        for index, (kind, extra) in enumerate(zip(types, kwargs, strict=True)):
            if kind == "full_attention":
                layers.append(_packed_layer(kv.of_layer(index), index, max_tokens, (slow or {}).get(index), make_layer))
            elif max_tokens is None:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**extra))
            else:
                layers.append(STATIC_LAYER_TYPE_MAPPING[kind](max_cache_len=max_tokens, **extra))
        super().__init__(layers=layers)

    def packed_layer(self, index: int) -> PackedLayer | None:
        """The packed layer at model layer `index`, or None where that layer is a stock one."""
        layer = self.layers[index]
        return layer.packed if isinstance(layer, PackedCacheLayer) else None

    def packed_layers(self) -> list[PackedLayer]:
        """The packed layers, in model order."""
        return [layer.packed for layer in self.layers if isinstance(layer, PackedCacheLayer)]

    @property
    def counters(self) -> Counters:
        """What attention read from the packed layers so far, summed over them."""
        total = Counters()
        for layer in self.layers:
            if isinstance(layer, PackedCacheLayer):
                total.add(layer.counters)
        return total

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Declare that the forwards inside read one prompt, in as many chunks as they like.

        In deferred mode the prompt stays exact inside and is packed on leaving.
        """
        for layer in self.packed_layers():
            layer.begin_prefill()
        try:
            yield
        finally:
            for layer in self.packed_layers():
                layer.end_prefill()

    @classmethod
    def merge(cls, config: PretrainedConfig, caches: "list[PackedCache]") -> "PackedCache":
        """One cache whose batch holds the rows of all; each row's result stays what it is alone.

        Shorter caches get more left pads, so the attention mask of the merged batch has them too. Only for models
        whose layers are all packed: raises UnsupportedModelError naming the first layer that is not.
        """
        merged = cls(config, caches[0].kv)
        for index, layer in enumerate(merged.layers):
            if not isinstance(layer, PackedCacheLayer):
                raise UnsupportedModelError(
                    f"layer {index} is a {type(layer).__name__}, which cannot be joined; merge needs packed layers only"
                )
            layer.packed = merge_layers([packed for c in caches if (packed := c.packed_layer(index)) is not None])
            layer.is_initialized = True
        return merged

    @property
    def nbytes(self) -> int:
        """Bytes of the packed layers, every tensor by storage."""
        return sum(layer.nbytes for layer in self.packed_layers())
