"""What packed attention is compared with: torch's attention on exact keys and values, in every form worth trying."""

import os
from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rotaryquant.bench.checks import require_close

#: Share of this machine's memory that keys and values repeated for every query head may take.
_EXPANDED_SHARE = 4


def sdpa_forms(
    query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """One-token attention through `scaled_dot_product_attention`, as named calls, and which forms were left out.

    query: [1, num_heads, 1, width]; keys, values: [1, num_kv_heads, tokens, width], all of one dtype. The forms are
    grouped heads by torch's own flag (gqa), the query heads of a KV head as rows of one query (folded), and keys and
    values repeated for every query head beforehand (expanded). Each call returns [1, num_heads, 1, width].
    Returns the calls, and name → reason for a form that does not fit into memory.
    """
    _, num_heads, _, width = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    folded = query.view(1, num_kv_heads, group, width)
    calls: dict[str, Callable[[], Tensor]] = {
        "gqa": lambda: scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True),
        "folded": lambda: scaled_dot_product_attention(folded, keys, values, scale=scale).view_as(query),
    }
    expanded_bytes = 2 * group * keys.nbytes
    if expanded_bytes > _memory_bytes() // _EXPANDED_SHARE:
        return calls, {"expanded": f"{expanded_bytes / 1e9:.1f} GB are over a quarter of this machine's memory"}
    wide_keys, wide_values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    calls["expanded"] = lambda: scaled_dot_product_attention(query, wide_keys, wide_values, scale=scale)
    return calls, {}


def check_forms(what: str, calls: dict[str, Callable[[], Tensor]]) -> None:
    """Raise CheckError where the forms of one attention, whatever their dtypes, do not agree with each other."""
    results = {name: call().float() for name, call in calls.items()}
    first = next(iter(results.values()))
    for name, result in results.items():
        require_close(f"{what}: {name}", result, first)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
