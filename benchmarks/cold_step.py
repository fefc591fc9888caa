"""What one layer's step costs when nothing is in the caches, as between the layers of a model: packed, and by torch.

    python benchmarks/cold_step.py --shape 9/3/64 --tokens 300 --rounds 60

Putting one token in and attending over the cache are timed apart, each after reading 96 MB, and again at once. Medians,
wall clock, one thread, bf16.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_FLUSH_FLOATS = 24 << 20


def _packed(width: int, kv: str) -> tuple[Callable[..., None], Callable[[Tensor], Tensor]]:
    from rotaryquant import parse_kv
    from rotaryquant.attention import AttentionOptions, attend
    from rotaryquant.counters import Counters
    from rotaryquant.kv.packed import PackedLayer

    config = parse_kv(kv)
    assert config is not None
    layer, options, counters = PackedLayer(config, 0), AttentionOptions(width**-0.5), Counters()
    return layer.update, lambda queries: attend(layer, queries, options, counters)


def _stock(width: int) -> tuple[Callable[..., None], Callable[[Tensor], Tensor]]:
    from transformers.cache_utils import DynamicLayer

    layer: Any = DynamicLayer()

    def attend(queries: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            queries, layer.keys, layer.values, is_causal=queries.shape[2] > 1, scale=width**-0.5, enable_gqa=True
        )

    return layer.update, attend


def measure(shape: str, tokens: int, rounds: int, kv: str) -> dict[str, Any]:
    """Median microseconds of each side's two halves, cold and warm, after a prompt of `tokens` tokens."""
    torch.set_num_threads(1)
    heads, kv_heads, width = map(int, shape.split("/"))
    generator, flush = torch.Generator().manual_seed(0), torch.ones(_FLUSH_FLOATS)
    found: dict[str, list[float]] = {}

    def rows(count: int, columns: int) -> Tensor:
        return torch.randn(1, columns, count, width, generator=generator).bfloat16().transpose(1, 2)

    def timed(name: str, cold: bool, call: Callable[[], object]) -> None:
        if cold:
            flush.sum()
        start = time.perf_counter()
        call()
        found.setdefault(f"{name}, {'cold' if cold else 'warm'}", []).append((time.perf_counter() - start) * 1e6)

    with torch.inference_mode():
        sides = {"packed": _packed(width, kv), "torch": _stock(width)}
        for update, attend in sides.values():
            update(rows(kv_heads, tokens), rows(kv_heads, tokens))
            attend(rows(heads, tokens))
        for number in range(2 * rounds):
            for name, (update, attend) in sides.items():
                keys, values, queries = rows(kv_heads, 1), rows(kv_heads, 1), rows(heads, 1)
                timed(f"{name} update", number % 2 == 0, lambda u=update, k=keys, v=values: u(k, v))  # type: ignore[misc]
                timed(f"{name} attention", number % 2 == 0, lambda a=attend, q=queries: a(q))  # type: ignore[misc]
    return {name: round(statistics.median(times), 1) for name, times in found.items()}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="9/3/64", help="query heads / KV heads / width (default 9/3/64)")
    parser.add_argument("--tokens", type=int, default=300, help="in the cache (default 300)")
    parser.add_argument("--rounds", type=int, default=60, help="steps, cold and warm each (default 60)")
    parser.add_argument("--kv", default="iso3", help="the packed cache (default iso3)")
    args = parser.parse_args()
    print(json.dumps({"unit": "us", **measure(args.shape, args.tokens, args.rounds, args.kv)}, indent=2))


if __name__ == "__main__":
    main()
