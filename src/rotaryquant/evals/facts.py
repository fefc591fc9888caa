"""What calibrated peers are told: rows, second moments and sensitivities of a model's layers on a text that is not
evaluated.

A layer that records stands in for a packed one, so that it sees exactly what a cache sees.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.evals.simulated import Facts, Simulation, Variant
from rotaryquant.evals.windows import windows_of
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.enable import enabled
from rotaryquant.integrations.transformers.geometry import read_geometry, text_config
from rotaryquant.integrations.transformers.undo_rope import KeyRope, key_ropes
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.measuring import Progress, read_text

#: Everything stays exact: the newest tokens are all tokens.
_EXACT = KVCacheConfig("calibration", sinks=0, tail=1 << 30, mean=False, correct=0.0, protect=False)
#: Tokens in a window of the calibration text.
CONTEXT = 1024

#: Tokens of the calibration text that calibrated peers see, and how many of them with gradients.
CALIBRATION_TOKENS, SENSITIVE_TOKENS = 16_384, 4_096


@dataclass
class _Seen:
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    value_weights: list[Tensor] = field(default_factory=list)
    query_moment: Tensor | None = None
    value_moment: Tensor | None = None
    queries: int = 0


class _RecordingLayer(PackedLayer):
    """Keeps the rows of one window, whole, with the queries that read them."""

    def __init__(self, config: KVCacheConfig, layer: int, seen: _Seen) -> None:
        super().__init__(config, layer)
        self._seen = seen

    def observe(self, queries: Tensor, scale: float) -> None:
        """Add a window: [1, num_heads, tokens, width] queries over as many staged rows."""
        keys, values = (rows[0].float() for rows in self.dense.staged())
        heads, tokens, width = keys.shape
        grouped = queries[0].float().view(heads, -1, tokens, width)
        scores = grouped @ keys[:, None].transpose(-1, -2) * scale
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1).square().sum((1, 2))  # [heads, tokens]
        flat = grouped.flatten(1, 2)
        query_moment = flat.transpose(-1, -2) @ flat
        value_moment = (values * weights[..., None]).transpose(-1, -2) @ values
        seen = self._seen
        seen.keys.append(keys)
        seen.values.append(values)
        seen.value_weights.append(weights)
        seen.query_moment = query_moment if seen.query_moment is None else seen.query_moment + query_moment
        seen.value_moment = value_moment if seen.value_moment is None else seen.value_moment + value_moment
        seen.queries += flat.shape[1]


def collect(loaded: Loaded, text: str, tokens: int) -> dict[int, Facts]:
    """Facts of every packable layer, by model layer, from at least `tokens` tokens of text in windows of 1,024.

    Raises ConfigError where the text is too short.
    """
    windows = _windows(loaded, text, tokens)
    seen: dict[int, _Seen] = {}

    def make_layer(config: KVCacheConfig, layer: int, max_tokens: int | None, slow: Tensor | None) -> PackedLayer:
        return _RecordingLayer(config, layer, seen.setdefault(layer, _Seen()))

    with enabled(loaded.model, _EXACT) as state, torch.inference_mode():
        assert state is not None
        for ids in windows:
            cache = PackedCache(text_config(loaded.model), _EXACT, make_layer=make_layer)
            loaded.model(ids[None], cache=cache, logits_to_keep=1)
    found = {}
    for layer, one in seen.items():
        assert one.query_moment is not None
        assert one.value_moment is not None
        rows = torch.cat(one.keys, 1), torch.cat(one.values, 1)
        moments = one.query_moment / one.queries, one.value_moment / rows[0].shape[1]
        found[layer] = Facts(*rows, *moments, torch.cat(one.value_weights, 1))
    return found


def _windows(loaded: Loaded, text: str, tokens: int) -> list[Tensor]:
    scored = CONTEXT - 1 - CONTEXT // 2
    return windows_of(loaded, text, CONTEXT, max(1, tokens * scored // CONTEXT))[0]


class _FollowedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Adds zeros to its rows that gradients lead to."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The rows of one window, whole."""
        self.added = (
            torch.zeros_like(key_states, requires_grad=True),
            torch.zeros_like(value_states, requires_grad=True),
        )
        return super().update(key_states + self.added[0], value_states + self.added[1], *args, **kwargs)


def gradients_at(loaded: Loaded, text: str, tokens: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Gradients of a window's mean loss at its keys (after RoPE) and values, of every packable layer and the windows
    that `collect` begins with: fp32 [num_kv_heads, tokens, width] each.

    Their squares are the diagonal of the empirical Fisher information. The model must not be enabled.
    """
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    packable = [layer.index for layer in read_geometry(text_config(loaded.model)) if layer.packable]
    for ids in _windows(loaded, text, tokens):
        cache = DynamicCache(config=loaded.model.config)
        followed = {index: _FollowedLayer() for index in packable}  # type: ignore[no-untyped-call]
        for index, layer in followed.items():
            cache.layers[index] = layer
        with torch.enable_grad():
            logits = loaded.model(ids[None, :-1], cache=cache).logits[0].float()
            loss = torch.nn.functional.cross_entropy(logits, ids[1:].to(logits.device))
            gradients = torch.autograd.grad(loss, [part for layer in followed.values() for part in layer.added])
        for number, index in enumerate(packable):
            # nothing is predicted from the last token
            keys, values = (torch.nn.functional.pad(g[0].float(), (0, 0, 0, 1)) for g in gradients[2 * number :][:2])
            found.setdefault(index, []).append((keys, values))
    return {
        index: (torch.cat([k for k, _ in parts], 1), torch.cat([v for _, v in parts], 1))
        for index, parts in found.items()
    }


def before_rope(facts: Facts, gradients: tuple[Tensor, Tensor], rope: KeyRope, skipped: int) -> Facts:
    """What a peer is told that keeps keys before RoPE, and the first `skipped` tokens exactly: the others' rows."""
    device = facts.keys.device
    keys, values, slope = facts.keys, facts.values, gradients[0]
    positions = torch.arange(keys.shape[1], device=device) % CONTEXT
    kept, kept_slope = positions >= skipped, (positions >= skipped)[: slope.shape[1]]
    return dataclasses.replace(
        facts,
        keys=rope.undo(keys, positions)[:, kept],
        values=values[:, kept],
        value_weights=None if facts.value_weights is None else facts.value_weights[:, kept],
        key_sensitivity=rope.gradients(slope, positions[: slope.shape[1]]).square()[:, kept_slope],
        value_sensitivity=gradients[1].square()[:, kept_slope],
    )


def calibrated(
    loaded: Loaded,
    specs: Mapping[str, KVCacheConfig | Variant | None],
    calibration: str | None,
    scored: str,
    progress: Progress,
) -> Mapping[str, KVCacheConfig | Variant | None]:
    """The same with what calibrated peers are told. scored: the text that is evaluated, which must not be that one.

    Raises ConfigError where a peer wants a text and there is none to tell it from.
    """
    wanting = {name: kv for name, kv in specs.items() if isinstance(kv, Simulation) and kv.peer.calibrated}
    if not wanting:
        return specs
    if calibration is None:
        raise ConfigError(f"kv={next(iter(wanting))} is calibrated on a text; name one with --calibration FILE")
    text = read_text(Path(calibration))
    if text == scored:
        raise ConfigError(f"--calibration {calibration}: is the text that is scored; use another")
    early = [name for name, kv in wanting.items() if kv.peer.before_rope]
    ropes = key_ropes(loaded.model, read_geometry(text_config(loaded.model))) if early else {}
    progress(f"calibration on {CALIBRATION_TOKENS:,} tokens of {Path(calibration).name}")
    facts = collect(loaded, text, CALIBRATION_TOKENS)
    told = {name: dataclasses.replace(kv, facts=facts) for name, kv in wanting.items()}
    if early:
        progress(f"gradients on {SENSITIVE_TOKENS:,} of them")
        slopes = gradients_at(loaded, text, SENSITIVE_TOKENS)
    for name in early:
        skipped = wanting[name].peer.sinks
        given = {index: before_rope(facts[index], slopes[index], ropes[index], skipped) for index in facts}
        told[name] = dataclasses.replace(wanting[name], facts=given, ropes=ropes)
    return {name: told.get(name, kv) for name, kv in specs.items()}
