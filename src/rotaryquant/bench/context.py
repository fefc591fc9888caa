"""A context of random keys and values, packed as the cache packs them, beside the exact ones."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from rotaryquant.bench.options import Shape
from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.ops.streams import CacheView


@dataclass(frozen=True)
class Context:
    """One sequence of one layer, every token of it packed: no sinks, tail or mean.

    query: fp32 [1, num_heads, 1, width], of the newest token. keys, values: bf16 [1, num_kv_heads, tokens, width].
    view: the same packed. scale: factor on q·k. key_noise: as the configuration corrects logits for it.
    packed_bytes: codes and scales of all tokens.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    view: CacheView
    scale: float
    key_noise: float
    packed_bytes: int


def random_rows(shape: Shape, tokens: int, seed: int) -> Tensor:
    """Normal numbers, bf16 [1, num_kv_heads, tokens, width]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, shape.num_kv_heads, tokens, shape.width, generator=generator).bfloat16()


def all_packed(kv: KVCacheConfig) -> KVCacheConfig:
    """The same bits, rotation, scales and correction with every token packed."""
    return dataclasses.replace(kv, sinks=0, tail=0, mean=False, protect=False, prefill="deferred")


def random_context(shape: Shape, tokens: int, kv: KVCacheConfig) -> Context:
    """A context of `tokens` tokens; the same numbers at every call.

    Raises ConfigError for a width that cannot be packed.
    """
    keys, values = random_rows(shape, tokens, 1), random_rows(shape, tokens, 2)
    query = torch.randn(1, shape.num_heads, 1, shape.width, generator=torch.Generator().manual_seed(3))
    layer = PackedLayer(all_packed(kv), 0)
    layer.begin_prefill()
    layer.update(keys, values)
    layer.settle(None)
    try:
        layer.end_prefill()
    except ValueError as error:  # of the rotation: a width without a Hadamard matrix
        raise ConfigError(f"--shapes {shape}: {error}") from error
    assert layer.keys is not None
    assert layer.values is not None
    row_bytes = layer.keys.format.row_bytes + layer.values.format.row_bytes
    return Context(
        query,
        keys,
        values,
        layer.view(),
        shape.width**-0.5,
        layer.key_noise,
        tokens * shape.num_kv_heads * row_bytes,
    )
