"""Log-probabilities of a fixed text read through a packed cache: a packed prefix, then forced tokens.

The forced tokens go through in chunks within which nothing would be packed. What a query may see is then the same
as if every token were fed on its own, so the result is that of decoding, at the speed of a prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rotaryquant.counters import Counters
from rotaryquant.errors import RotaryQuantError
from rotaryquant.formats.kv import BLOCK
from rotaryquant.integrations.transformers.cache import PackedCache, PackedCacheLayer
from rotaryquant.integrations.transformers.chunks import still_chunks
from rotaryquant.kv.tail import packed_end


class PathError(RotaryQuantError):
    """A measurement did not read the packed rows that it claims to measure."""


@dataclass(frozen=True)
class Chunk:
    """Logits of positions [begin, end), fp32 [end - begin, vocab], and what their attention read."""

    begin: int
    end: int
    logits: Tensor
    reads: Counters


def reference_logits(model: PreTrainedModel, ids: Tensor, first: int) -> Tensor:
    """Logits at positions [first, tokens - 1) of one exact forward, fp32 [positions, vocab].

    ids: int64 [tokens]. The model must not be enabled.
    """
    with torch.inference_mode():
        out = model(ids[None, :-1], use_cache=False, logits_to_keep=ids.shape[0] - 1 - first)
    logits: Tensor = out.logits[0].float()
    return logits


def packed_chunks(
    model: PreTrainedModel, cache: PackedCache, ids: Tensor, first: int, step: int = BLOCK
) -> Iterator[Chunk]:
    """Chunks that cover positions [first, tokens - 1), read through `cache`.

    ids: int64 [tokens]; positions before `first` are the prefix, packed before the first scored position.
    Raises PathError unless every packed layer read exactly length - sinks - tail rows at every position.
    """
    with torch.inference_mode():
        with cache.prefill():
            model(ids[None, :first], cache=cache, logits_to_keep=1)
        for begin, end in still_chunks(first, ids.shape[0] - 1, cache.kv, step):
            before, layers = cache.counters, packed_reads(cache)
            out = model(ids[None, begin:end], cache=cache)
            check_reads(cache, layers, begin, end)
            yield Chunk(begin, end, out.logits[0].float(), cache.counters.since(before))


def stock_chunks(model: PreTrainedModel, ids: Tensor, first: int, step: int = BLOCK) -> Iterator[Chunk]:
    """The same through transformers' own 16-bit cache: what the harness itself costs."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[None, :first], cache=cache, logits_to_keep=1)
        for begin, end in still_chunks(first, ids.shape[0] - 1, None, step):
            out = model(ids[None, begin:end], cache=cache)
            yield Chunk(begin, end, out.logits[0].float(), Counters())


def expected_reads(cache: PackedCache, begin: int, end: int) -> int:
    """Packed rows that one layer must read for queries at positions [begin, end): length - sinks - tail each."""
    total, kv = 0, cache.kv
    for position in range(begin, end):
        # with a tail, a query finds packed what was due before it came; without one, its whole chunk is packed first
        packed = packed_end(kv, position if kv.tail else end, fresh=True)
        packed = min(packed, position + 1)
        total += packed - min(kv.sinks, packed)
    return total


def packed_reads(cache: PackedCache) -> list[int]:
    """Packed rows that each packed layer has read so far."""
    return [layer.counters.packed_reads for layer in cache.layers if isinstance(layer, PackedCacheLayer)]


def check_reads(cache: PackedCache, before: list[int], begin: int, end: int, rows: int = 1) -> None:
    """Raise PathError unless every packed layer has read, since `before`, what positions [begin, end) must read.

    before: what `packed_reads` said. rows: sequences of the batch, all of them at these positions.
    """
    wanted = rows * expected_reads(cache, begin, end)
    for layer, (old, new) in enumerate(zip(before, packed_reads(cache), strict=True)):
        if new - old != wanted:
            raise PathError(
                f"positions {begin}..{end - 1}: packed layer number {layer} read {new - old} packed rows, wanted "
                f"{wanted} (length - sinks - tail at each position); the result would not measure the packed cache"
            )
