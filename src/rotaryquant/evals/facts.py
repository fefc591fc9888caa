"""What calibrated peers are told: rows and second moments of a model's layers on a text that is not evaluated.

A layer that records stands in for a packed one, so that it sees exactly what a cache sees.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.evals.simulated import Facts, Simulation
from rotaryquant.evals.windows import windows_of
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.enable import enabled
from rotaryquant.integrations.transformers.geometry import text_config
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.measuring import read_text

#: Everything stays exact: the newest tokens are all tokens.
_EXACT = KVCacheConfig("calibration", sinks=0, tail=1 << 30, mean=False, correct=0.0, protect=False)
_CONTEXT = 1024


#: Tokens of the calibration text that calibrated peers see.
CALIBRATION_TOKENS = 16_384


@dataclass
class _Seen:
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
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
        seen.query_moment = query_moment if seen.query_moment is None else seen.query_moment + query_moment
        seen.value_moment = value_moment if seen.value_moment is None else seen.value_moment + value_moment
        seen.queries += flat.shape[1]


def collect(loaded: Loaded, text: str, tokens: int) -> dict[int, Facts]:
    """Facts of every packable layer, by model layer, from at least `tokens` tokens of text in windows of 1,024.

    Raises ConfigError where the text is too short.
    """
    scored = _CONTEXT - 1 - _CONTEXT // 2
    windows, _ = windows_of(loaded, text, _CONTEXT, max(1, tokens * scored // _CONTEXT))
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
        found[layer] = Facts(*rows, one.query_moment / one.queries, one.value_moment / rows[0].shape[1])
    return found


def calibrated(
    loaded: Loaded,
    specs: Mapping[str, KVCacheConfig | Simulation | None],
    calibration: str | None,
    scored: str,
    progress: Callable[[str], None],
) -> Mapping[str, KVCacheConfig | Simulation | None]:
    """The same with what calibrated peers are told. scored: the text that is evaluated, which must not be that one.

    Raises ConfigError where a peer wants a text and there is none to tell it from.
    """
    wanting = [name for name, kv in specs.items() if isinstance(kv, Simulation) and kv.peer.calibrated]
    if not wanting:
        return specs
    if calibration is None:
        raise ConfigError(f"kv={wanting[0]} is calibrated on a text; name one with --calibration FILE")
    text = read_text(Path(calibration))
    if text == scored:
        raise ConfigError(f"--calibration {calibration}: is the text that is scored; use another")
    progress(f"calibration on {CALIBRATION_TOKENS:,} tokens of {Path(calibration).name}")
    facts = collect(loaded, text, CALIBRATION_TOKENS)
    return {
        name: dataclasses.replace(kv, facts=facts) if isinstance(kv, Simulation) and name in wanting else kv
        for name, kv in specs.items()
    }
