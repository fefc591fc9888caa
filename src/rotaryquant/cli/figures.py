"""What a run took, measured: the figures behind the table and the JSON of `generate` and `chat`."""

import re
import resource
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotaryquant.cli.sizes import show_bytes

if TYPE_CHECKING:
    from rotaryquant.llm import LLM, TextStream

#: A length at which the table says what the packed cache takes, since a short run is mostly exact tail.
_LONG = 4096
_EXACT_BITS = 16


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes.

    On Linux as /proc has it: `ru_maxrss` begins with the size of the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.is_file() and (found := re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.M)):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


@dataclass(frozen=True)
class Figures:
    """Figures of the sequence in the cache and of the newest answer.

    tokens: in the cache. packing_starts: tokens from which on some are packed. The kv_ fields are bytes per token
    over the layers that are packed (over all full-attention layers where none is): at 16 bits; stored (codes, scales,
    sinks, means, mean tail); held (all buffers of the packed layers now, which are taken in steps). None where nothing
    is packed.
    rates: tokens per second, None where there was nothing to time. reads: key rows that queries read, over layers.
    weights: bytes in the files and bits of each parameter, scales counted, of all and of those of routed experts.
    """

    weights: dict[str, tuple[int, float]]
    kv: str
    tokens: int
    packing_starts: int
    kv_exact: float
    kv_stored: float | None
    kv_held: float | None
    bits_per_value: float | None
    bits_worst: float | None
    bits_long: float | None
    prompt_rate: float | None
    decode_rate: float | None
    packed_reads: int
    dense_reads: int
    peak_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def measure(llm: "LLM", stream: "TextStream") -> Figures:
    """Figures after an answer."""
    from rotaryquant.integrations.transformers.cache import PackedCache
    from rotaryquant.integrations.transformers.geometry import read_geometry
    from rotaryquant.integrations.transformers.report import layer_bits
    from rotaryquant.kv import accounting
    from rotaryquant.kv.footprint import Footprint
    from rotaryquant.kv.tail import packing_starts

    usage, cache, tokens = stream.usage, llm.session.cache, len(llm.session.tokens)
    packed = cache if isinstance(cache, PackedCache) else None
    footprint = Footprint(read_geometry(llm.config), None)
    some = packed is not None and any(layer.keys is not None for layer in packed.packed_layers())
    bits = layer_bits(packed) if packed is not None and some else []
    stored = accounting.bits_per_value(bits, tokens) if bits else None
    values = sum(layer.values_of(1) for layer in bits)
    read = usage.prompt_tokens - usage.reused_tokens
    return Figures(
        weights=_weights(llm.folder),
        kv=llm.enabled.kv.name if llm.enabled is not None else "fp16",
        tokens=tokens,
        packing_starts=packing_starts(llm.enabled.kv) if llm.enabled is not None else 0,
        kv_exact=footprint.exact_per_token(),
        kv_stored=stored * values / 8 if stored is not None else None,
        kv_held=packed.nbytes / tokens if packed is not None and bits else None,
        bits_per_value=stored,
        bits_worst=accounting.bits_worst(bits, tokens) if bits else None,
        bits_long=accounting.bits_per_value(bits, _LONG) if bits else None,
        prompt_rate=read / usage.prompt_seconds if usage.prompt_seconds else None,
        decode_rate=usage.decode_steps / usage.decode_seconds if usage.decode_seconds else None,
        packed_reads=packed.counters.packed_reads if packed is not None else 0,
        dense_reads=packed.counters.dense_reads if packed is not None else 0,
        peak_bytes=peak_memory(),
    )


@lru_cache(maxsize=4)
def _weights(folder: Path) -> dict[str, tuple[int, float]]:
    """Bytes and bits of all weights, and of routed experts where there are any."""
    from rotaryquant.errors import UnsupportedModelError
    from rotaryquant.models.roles import Role, roles_of
    from rotaryquant.weights.headers import read_folder
    from rotaryquant.weights.packed_config import config_in, weights_of

    tensors = read_folder(folder)
    try:
        sizes = weights_of(tensors, config_in(folder))
        roles = roles_of(sizes)
    except UnsupportedModelError:  # of a family whose tensors nobody told apart yet; it answers all the same
        sizes, roles = {tensor.name: (tensor.elements, tensor.nbytes) for tensor in tensors}, {}
    routed = [size for name, size in sizes.items() if roles.get(name) is Role.ROUTED_EXPERT]
    groups = {"all": list(sizes.values())} | ({Role.ROUTED_EXPERT.value: routed} if routed else {})
    found = {}
    for name, group in groups.items():
        nbytes = sum(size for _, size in group)
        found[name] = nbytes, 8 * nbytes / sum(count for count, _ in group)
    return found


def rows(figures: Figures, stream: "TextStream", budget: int | None = None) -> list[tuple[str, str]]:
    """The table: (label, value). budget: of `--memory`, in bytes."""
    usage = stream.usage
    table = [_weight_row(name, size) for name, size in figures.weights.items()]
    table += [("KV bytes per token, 16-bit", f"{figures.kv_exact:,.0f}"), *_packed_rows(figures)]
    peak = show_bytes(figures.peak_bytes)
    if budget is not None:
        peak += f" of {show_bytes(budget)} (--memory)"
        peak += ": EXCEEDED" if figures.peak_bytes > budget else ""
    reused = f", {usage.reused_tokens:,} of them reused" if usage.reused_tokens else ""
    table += [
        ("peak memory", peak),
        ("prompt", f"{usage.prompt_tokens:,} tokens{reused}{_rate(figures.prompt_rate)}"),
        ("generated", f"{usage.completion_tokens:,} tokens{_rate(figures.decode_rate)}"),
        ("finish reason", stream.finish_reason or "running"),
    ]
    return table


def _weight_row(name: str, size: tuple[int, float]) -> tuple[str, str]:
    label = "weights" if name == "all" else f"  of {name}s, all in memory"
    return label, f"{show_bytes(size[0])}, {size[1]:.2f} bits each"


def _packed_rows(figures: Figures) -> list[tuple[str, str]]:
    if figures.kv == "fp16":
        return [("KV bytes per token, packed", "kv=fp16 packs nothing"), ("KV rows read", "0 packed")]
    reads = ("KV rows read", f"{figures.packed_reads:,} packed, {figures.dense_reads:,} exact")
    if figures.kv_stored is None or figures.kv_held is None or figures.bits_long is None:
        why = f"nothing packed yet: packing starts at {figures.packing_starts} tokens, there are {figures.tokens:,}"
        return [("KV bytes per token, packed", why), reads]
    smaller = figures.kv_exact / figures.kv_stored
    return [
        (
            "KV bytes per token, packed",
            f"{figures.kv_stored:,.0f} ({figures.bits_per_value:.2f} bits a value, {smaller:.1f}x smaller)",
        ),
        (
            f"  the same at {_LONG:,} tokens",
            f"{figures.bits_long:.2f} bits a value, {_EXACT_BITS / figures.bits_long:.1f}x smaller",
        ),
        ("  buffers held now", f"{figures.kv_held:,.0f} per token (taken in steps, so less per token later)"),
        reads,
    ]


def _rate(rate: float | None) -> str:
    return f" at {rate:,.1f} tokens/s" if rate is not None else ""
