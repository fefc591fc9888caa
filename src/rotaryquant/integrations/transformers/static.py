"""The packed cache inside a compiled graph: one opaque op per layer, so that nothing recompiles as tokens come.

What a step does to a cache depends on how full it is, which a graph may not ask. The op asks instead: the graph
sees queries, keys, values and the layer's length, which the op moves forward in place.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from rotaryquant.attention import AttentionOptions, attend
from rotaryquant.config import KVCacheConfig
from rotaryquant.integrations.transformers.cache import KVHandle, PackedCacheLayer

_layers: "weakref.WeakValueDictionary[int, StaticPackedCacheLayer]" = weakref.WeakValueDictionary()


class StaticKVHandle(KVHandle):
    """A handle that also carries the new keys and values, since a graph must show them to the op."""

    __slots__ = ("keys", "static", "values")

    def __init__(self, static: "StaticPackedCacheLayer", keys: Tensor, values: Tensor) -> None:
        super().__init__(static.packed, static.counters)
        self.static = static
        self.keys = keys
        self.values = values


class StaticPackedCacheLayer(PackedCacheLayer):  # type: ignore[no-untyped-call]
    """A packed layer with room for `max_tokens` columns that a compiled forward can use.

    length: int64 scalar tensor, columns held. key: int64 scalar tensor that names the layer to the op; a tensor,
    because a number would be compiled into the graph and tie it to one cache.
    """

    is_compileable = True

    def __init__(self, config: KVCacheConfig, layer: int, max_tokens: int, slow: Tensor | None = None) -> None:
        super().__init__(config, layer, max_tokens, slow)
        self.max_tokens = max_tokens
        self.length = torch.zeros((), dtype=torch.int64)
        self.key = torch.tensor(id(self), dtype=torch.int64)
        _layers[id(self)] = self

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hand the new columns on to attention, which stages them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        handle = StaticKVHandle(self, key_states, value_states)
        return handle, handle

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(room in columns, 0): a mask of the same size at every step."""
        return self.max_tokens, 0

    def get_seq_length(self) -> Any:
        """Columns held, as a tensor: a graph must not depend on its value."""
        return self.length

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._sync()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` columns."""
        super().crop(tokens_to_remove)
        self._sync()

    def _sync(self) -> None:
        self.length.fill_(self.packed.columns)


@torch.library.custom_op("rotaryquant::attend_static", mutates_args=("length",))
def attend_static(
    key: Tensor,
    length: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    pads: Tensor | None,
    sink_logits: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    append: bool,
) -> Tensor:
    """Stage keys and values in the layer named by `key` and attend; shapes as in `attention.attend`."""
    layer = _layers[int(key)]
    if append:
        layer.packed.update(keys, values)
        length.fill_(layer.packed.columns)
    options = AttentionOptions(scale, window, softcap, sink_logits)
    counts = pads.flatten().tolist() if pads is not None else None
    out = attend(layer.packed, queries, options, layer.counters, pads=counts, append=append)
    return out.contiguous()


@attend_static.register_fake
def _(
    key: Tensor,
    length: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    pads: Tensor | None,
    sink_logits: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    append: bool,
) -> Tensor:
    return queries.new_empty(*queries.shape[:3], values.shape[-1])
