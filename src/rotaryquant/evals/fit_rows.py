"""The fits of a model's layers: what rows and the queries that meet them are like, and which weights values go through.

Rows are looked at all over the model's positions, since RoPE turns the constant part of a key with them: a fit of first
positions alone would take what is constant there for constant, and make it long where it is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotaryquant.config import KVCacheConfig
from rotaryquant.formats.fit import Fit, balanced
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.geometry import LayerGeometry, text_config
from rotaryquant.integrations.transformers.output_projection import output_projection
from rotaryquant.integrations.transformers.rope import even_positions
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.measuring import Progress

#: Windows that are read, one after another and again, each where it would stand in a longer context.
_READINGS = 16


def make_fits(
    loaded: Loaded,
    still: KVCacheConfig,
    layers: Sequence[LayerGeometry],
    windows: Sequence[Tensor],
    progress: Progress,
) -> dict[int, tuple[Fit, Fit]]:
    """Fits of the keys and the values of packable layers, by model layer. The model is enabled with `still`.

    still: keeps every row exact; its first `sinks` rows are left out. windows: ids, int64 [tokens] each.
    """
    heard = _listen(loaded, still, windows, progress)
    return {layer.index: _fits(loaded, layer, heard[layer.index]) for layer in layers}


class _Moments:
    """Mean and second moment of rows, by KV head. Sums are of rows less the mean of those that come first."""

    def __init__(self) -> None:
        self._shift: Tensor | None = None
        self._sum: Tensor | None = None
        self._squares: Tensor | None = None
        self._count = 0

    def add(self, rows: Tensor) -> None:
        """Rows fp32 [num_kv_heads, rows, width]."""
        if self._shift is None:
            self._shift = rows.mean(1, keepdim=True)
        rows = rows - self._shift
        total, squares = rows.sum(1).cpu().double(), (rows.mT @ rows).cpu().double()
        self._sum = total if self._sum is None else self._sum + total
        self._squares = squares if self._squares is None else self._squares + squares
        self._count += rows.shape[1]

    def around_mean(self) -> tuple[Tensor, Tensor]:
        """Mean fp64 [num_kv_heads, width] and moment around it fp64 [num_kv_heads, width, width]."""
        assert self._shift is not None
        assert self._sum is not None
        assert self._squares is not None
        off = self._sum / self._count
        around = self._squares / self._count - off[:, :, None] * off[:, None, :]
        return self._shift[:, 0].cpu().double() + off, around

    def around_zero(self) -> Tensor:
        """Moment fp64 [num_kv_heads, width, width]."""
        mean, around = self.around_mean()
        return around + mean[:, :, None] * mean[:, None, :]


@dataclass
class _Heard:
    """What one layer saw. queries: over the query heads of each KV head."""

    queries: _Moments = field(default_factory=_Moments)
    keys: _Moments = field(default_factory=_Moments)
    values: _Moments = field(default_factory=_Moments)


class _ListeningLayer(PackedLayer):
    """Keeps every row exact and adds up what it sees of a window that is read whole."""

    def __init__(self, config: KVCacheConfig, layer: int, heard: dict[int, _Heard]) -> None:
        super().__init__(config, layer)
        self._heard = heard.setdefault(layer, _Heard())

    def observe(self, queries: Tensor, scale: float) -> None:
        """Add queries [1, num_heads, tokens, width] and the rows that they read, those that stay exact left out."""
        keys, values = (rows[0, :, self.config.sinks :].float() for rows in self.dense.staged())
        self._heard.queries.add(queries[0].float().reshape(len(keys), -1, queries.shape[-1]))
        self._heard.keys.add(keys)
        self._heard.values.add(values)


def _listen(loaded: Loaded, still: KVCacheConfig, windows: Sequence[Tensor], progress: Progress) -> dict[int, _Heard]:
    """What every layer sees of the windows, at positions all over the model's."""
    heard: dict[int, _Heard] = {}

    def make_layer(config: KVCacheConfig, layer: int, max_tokens: int | None, slow: Tensor | None) -> PackedLayer:
        return _ListeningLayer(config, layer, heard)

    with torch.inference_mode():
        for number in range(_READINGS):
            progress(f"rows and queries: window {number + 1} of {_READINGS}")
            ids = windows[number % len(windows)]
            last = even_positions(loaded.model) - len(ids)
            places = torch.arange(len(ids), device=ids.device) + max(0, last) * number // (_READINGS - 1)
            cache = PackedCache(text_config(loaded.model), still, make_layer=make_layer)
            loaded.model(ids[None], cache=cache, position_ids=places[None], logits_to_keep=1)
    return heard


def _fits(loaded: Loaded, layer: LayerGeometry, heard: _Heard) -> tuple[Fit, Fit]:
    """Of the keys and the values of a layer."""
    mean, around = (part.numpy() for part in heard.keys.around_mean())
    queries = _normal(heard.queries.around_zero().numpy())
    weight = output_projection(loaded.model, layer.index).detach().float()
    by_head = weight.view(len(weight), layer.num_kv_heads, -1, layer.head_dim).permute(1, 2, 0, 3)
    weights = _normal((by_head.mT @ by_head).mean(1).cpu().double().numpy())
    values = heard.values.around_zero().numpy()
    return (
        Fit(queries, balanced(queries, around), mean),
        Fit(weights, balanced(weights, values), np.zeros_like(mean)),
    )


def _normal(moment: NDArray[np.float64]) -> NDArray[np.float16]:
    """Each head's matrix with a mean eigenvalue of 1, symmetric, as a file holds it."""
    mean = np.trace(moment, axis1=1, axis2=2) / moment.shape[-1]
    moment = moment / np.where(mean > 0, mean, 1.0)[:, None, None]
    return ((moment + moment.transpose(0, 2, 1)) / 2).astype(np.float16)
