"""The share of a decode step that goes into attention over the cache, from bytes: alone, or with a machine's rates.

Packing pays in time where that share is above a fifth (the criterion of the paper). Bytes alone say which of the two
sums is larger; on a real machine every part has a rate and a fixed cost of its own, which `rotaryquant eval rates`
measures.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rotaryquant.errors import ConfigError
from rotaryquant.kv.footprint import Footprint
from rotaryquant.models.layers import Decoder
from rotaryquant.planning.weights import Weights

#: Share of a step above which packing pays (paper, "when KV compression pays off").
PAYS_ABOVE = 0.2

_EXACT_BYTES = 2


@dataclass(frozen=True)
class Rates:
    """What the parts of a decode step cost on one machine, all in seconds.

    attention_layer: of a layer's attention before it reads anything. attention_byte: for each byte of keys and values
    that a query head reads. matrix: of a product with a matrix before it reads anything. weight_byte: for each of its
    bytes. experts_layer, expert_byte: the same for a layer of routed experts. rest_layer: of a layer outside of all
    these. routing_layer: more of that where there are experts to choose from.
    """

    attention_layer: float
    attention_byte: float
    matrix: float
    weight_byte: float
    experts_layer: float
    expert_byte: float
    rest_layer: float
    routing_layer: float

    def as_dict(self) -> dict[str, float]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_file(cls, path: Path) -> "Rates":
        """Of the JSON that `rotaryquant eval rates` printed. Raises ConfigError naming what is wrong with it."""
        again = "make it with `rotaryquant eval rates --json > FILE`"
        try:
            data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["rates"]
            found = cls(**{one.name: float(data[one.name]) for one in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--profile {path}: no rates of a machine ({error!r}); {again}") from error
        if min(found.as_dict().values()) < 0 or not any(found.as_dict().values()):
            raise ConfigError(f"--profile {path}: a rate is below 0, or all are 0; {again}")
        return found


def head_bytes(decoder: Decoder, tokens: int) -> int:
    """Bytes of keys and values that all query heads read for one token: grouped ones read the same rows again."""
    return sum(
        layer.num_heads * (layer.key_width + layer.value_width) * _EXACT_BYTES
        * (min(tokens, layer.window) if layer.window else tokens)
        for layer in decoder.layers
    )  # fmt: skip


def attention_share(decoder: Decoder, weights: Weights, tokens: int, rates: Rates | None) -> float:
    """Share of a step after `tokens` tokens that attention takes with a 16-bit cache, 0 to 1.

    rates: of the machine; None for bytes alone, keys and values over these and the weights that a token reads.
    """
    if rates is None:
        cache = Footprint(decoder.layers, None).exact_bytes(tokens)
        return cache / (cache + weights.read)
    layers = sum(layer.num_kv_heads > 0 for layer in decoder.layers)
    attention = layers * rates.attention_layer + rates.attention_byte * head_bytes(decoder, tokens)
    matrices = weights.matrices - (0 if decoder.tied else 1)  # an embedding is looked up, not multiplied
    dense = matrices * rates.matrix + rates.weight_byte * (weights.read - weights.cycle)
    experts = weights.moe_layers * rates.experts_layer + rates.expert_byte * weights.cycle
    rest = len(decoder.layers) * rates.rest_layer + weights.moe_layers * rates.routing_layer
    return attention / (attention + dense + experts + rest)
