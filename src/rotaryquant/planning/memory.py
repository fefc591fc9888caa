"""Memory that serving takes: what has to be there at its peak, term by term."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rotaryquant.config import KVCacheConfig
from rotaryquant.formats.kv import BLOCK
from rotaryquant.kv.footprint import Footprint
from rotaryquant.kv.tail import full_tail
from rotaryquant.models.geometry import Geometry, Kind, Layer
from rotaryquant.planning.weights import Weights

#: Python with torch, transformers and a tokenizer, before any weight: the resident size of `generate` less all that is
#: predicted here. Measured, not derived: CPU build of torch 2.13 on Linux, where importing alone takes 425 MB and
#: loading a model the rest (benchmarks/plan_peak.py prints it anew). A build for GPUs takes more.
PROCESS_BYTES = 485_000_000

#: Prompt tokens in one forward on a CPU (integrations.transformers.session).
CHUNK = 512

#: Products of bf16 experts on a CPU are compiled for each number of tokens that meets an expert, and kept: bytes of
#: both products of one such number. Measured on glm4moe-70m; packed weights have kernels that need no compiling.
COMPILED_BYTES = 1_100_000


@dataclass(frozen=True)
class Cache:
    """Bytes of one sequence. packed: codes and scales of its tokens, in the slabs in which they are taken. tail: exact
    newest rows and sinks, in the blocks in which they are taken. exact: layers that stay at 16 bits (windows, latents,
    or all of them). state: of recurrent layers. exact_whole: what all of it would take at 16 bits.
    """

    packed: int
    tail: int
    exact: int
    state: int
    exact_whole: int

    @property
    def total(self) -> int:
        """Bytes of the sequence."""
        return self.packed + self.tail + self.exact + self.state


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak. process: the program itself. always, experts: weights (experts: those that are resident).
    caches: of all clients. prompt: one prompt kept exact until it is packed. working: activations of one chunk.
    compiled: products that are compiled while the model runs. mapped: pages of files that stay mapped beside a copy,
    which the system takes back when it needs them.
    """

    process: int
    always: int
    experts: int
    caches: int
    prompt: int
    working: int
    compiled: int
    mapped: int

    @property
    def needed(self) -> int:
        """Bytes that must be there."""
        return self.peak - self.mapped

    @property
    def peak(self) -> int:
        """The largest resident size of the process, as the system counts it."""
        return sum(asdict(self).values())

    def with_experts(self, nbytes: int) -> "Memory":
        """The same with so many bytes of experts resident, and none of them mapped besides."""
        return replace(self, experts=nbytes, mapped=0)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "needed": self.needed, "peak": self.peak}


def cache_of(layers: Sequence[Layer], kv: KVCacheConfig | None, tokens: int, element_bytes: int) -> Cache:
    """What one sequence of `tokens` tokens holds. element_bytes: of the model's dtype, in which exact rows are kept.

    Raises ConfigError for a head width that cannot be packed.
    """
    packable = [layer for layer in layers if layer.packable] if kv is not None else []
    state = sum(layer.state_bytes(element_bytes) for layer in layers)
    rows = {layer.index: layer.values_per_token * layer.held_tokens(tokens) * element_bytes for layer in layers}
    exact = sum(size for index, size in rows.items() if index not in {layer.index for layer in packable})
    tail, packed = 0, 0
    if kv is not None:
        held = Footprint(packable, kv).held_bytes(tokens, element_bytes)
        columns = -(-max(1, full_tail(kv.tail)) // BLOCK) * BLOCK + kv.sinks
        tail = columns * sum(layer.values_per_token for layer in packable) * element_bytes
        packed = held - tail
    return Cache(packed, tail, exact, state, sum(rows.values()) + state)


def memory_of(
    geometry: Geometry, weights: Weights, kv: KVCacheConfig | None, tokens: int, clients: int, element_bytes: int
) -> Memory:
    """All of it with every expert resident.

    tokens: of a sequence, prompt and answer. clients: sequences at a time, of which one reads its prompt.
    element_bytes: of the model's dtype. Raises ConfigError for a head width that cannot be packed.
    """
    cache = cache_of(geometry.layers, kv, tokens, element_bytes)
    return Memory(
        process=PROCESS_BYTES,
        always=weights.always,
        experts=weights.routed,
        caches=clients * cache.total,
        prompt=Footprint(geometry.layers, kv).prompt_bytes(tokens, element_bytes),
        working=working_bytes(geometry, tokens, element_bytes),
        compiled=0 if weights.packed or element_bytes != 2 else compiled_bytes(geometry, weights, tokens),
        mapped=weights.merged,
    )


def working_bytes(geometry: Geometry, tokens: int, element_bytes: int) -> int:
    """Activations while the last chunk of a prompt is read, at the widest layer.

    A dozen copies of the residual stream and of the queries for each token of the chunk, the logits of one token in
    fp32, and keys and values of one layer once for every query head, twice: attention lays them out for its products.
    """
    chunk = min(CHUNK, tokens)
    queries = max((layer.num_heads * layer.key_width for layer in geometry.layers), default=0)
    layout = max((layer.values_by_head * layer.held_tokens(tokens) for layer in _rows(geometry)), default=0)
    return (12 * chunk * (geometry.hidden + queries) + 2 * layout) * element_bytes + 4 * geometry.vocabulary


def _rows(geometry: Geometry) -> list[Layer]:
    """Layers with keys and values of their own for every head; of a latent, what stands for them is not laid out."""
    return [layer for layer in geometry.layers if layer.kind in (Kind.FULL, Kind.SLIDING)]


def compiled_bytes(geometry: Geometry, weights: Weights, tokens: int) -> int:
    """Compiled products of unpacked experts, by how many different numbers of tokens meet an expert.

    With a mean of m tokens an expert, D meetings have about m·ln(1 + D / m) different numbers (of a geometric
    distribution), no more than a chunk has tokens.
    """
    if not weights.experts or not geometry.experts_per_token:
        return 0
    chunk = min(CHUNK, tokens)
    fewest = min(layer.experts for layer in weights.experts)
    mean = max(1.0, chunk * geometry.experts_per_token / fewest)
    meetings = weights.expert_count * max(1.0, tokens / CHUNK)
    return round(min(float(chunk), mean * math.log1p(meetings / mean)) * COMPILED_BYTES)
