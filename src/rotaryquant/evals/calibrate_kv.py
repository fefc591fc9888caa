"""What each layer's keys and values cost at few bits, measured one by one: the numbers that bits are shared out by.

First the fits (formats.fit): what rows and the queries that meet them are like, wherever in a context, and which
weights a sum of values goes through. Then the costs. A window's prefix is read once, exactly. Then, for every stream
of every packed layer, its rows alone are packed at few bits and the rest of the window is read behind them; the KL
divergence of its predictions from the exact ones is what the error of that stream costs. Everything else stays exact,
so the costs of two streams can be compared. Each is measured at two widths, since an error at 2 bits is so large that
its cost says little of that at 3, and with and without the fit, since not every stream gains from it.
"""

import copy
import dataclasses
import itertools
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.evals.teacher_forcing import reference_logits
from rotaryquant.evals.windows import check_plausible, windows_of
from rotaryquant.formats.calibration import Calibration, LayerSensitivity, StreamCost
from rotaryquant.formats.fit import Fit, balanced
from rotaryquant.formats.kv import BLOCK
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.enable import enabled
from rotaryquant.integrations.transformers.fingerprint import checkpoint_fingerprint
from rotaryquant.integrations.transformers.geometry import LayerGeometry, text_config
from rotaryquant.integrations.transformers.output_projection import output_projection
from rotaryquant.integrations.transformers.rope import even_positions
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.kv.tail import packing_starts
from rotaryquant.measuring import Progress, model_name, text_fingerprint

#: Bits of the rows whose effect is measured: few, so that it stands out.
PROBE_BITS = (2, 3)
#: Bits of the other stream of the layer, which is packed with it: its effect is a thousandth.
_QUIET_BITS = 8
#: Seconds between two lines on how far it is.
_SAY_EVERY = 5.0
#: Windows that are read for the fits, one after another and again, each where it would stand in a longer context.
_READINGS = 16
#: Newest tokens that stay exact in a layer that is not under test: all.
_ALL = 1 << 30


class _Pace:
    """Says now and then how far a long measurement is and how long it will still take. total: steps it has."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress = total, progress
        self._done, self._begin, self._said = 0, perf_counter(), 0.0

    def step(self, what: str) -> None:
        """One more step is done."""
        self._done += 1
        spent = perf_counter() - self._begin
        if spent - self._said >= _SAY_EVERY or self._done == self._total:
            self._said = spent
            left = spent / self._done * (self._total - self._done)
            share = self._done / self._total
            self._progress(f"{what}: {self._done} of {self._total} probes, about {left:.0f} s left", share)


@dataclass(frozen=True)
class _Window:
    """One window between its halves. cache: the prefix, exact. rest: ids that are read behind it. exact: reference
    log-probabilities fp32 [positions, vocab] of its predictions.
    """

    cache: PackedCache
    rest: Tensor
    exact: Tensor


def measure(
    loaded: Loaded,
    kv: KVCacheConfig,
    text: str,
    *,
    context: int,
    tokens: int,
    command: str,
    any_baseline: bool = False,
    fits_only: bool = False,
    progress: Progress,
) -> Calibration:
    """Sensitivities of a model's packable layers.

    kv: how rows are rotated and scaled, and what stays exact beside the packed ones; probes are scalar whatever its
    quantizer. text: what the model reads. tokens: predictions to compare, rounded up to whole windows of `context`,
    half of which is prefix. any_baseline: go on where the exact perplexity is implausible. fits_only: leave the probes
    out. Raises ConfigError where the text is too short, nothing would be packed, or the text does not fit the model.
    """
    if context // 2 < packing_starts(kv) + BLOCK:
        raise ConfigError(
            f"context={context}: its first half must hold {packing_starts(kv) + BLOCK} tokens for rows to be packed; "
            f"use at least {2 * (packing_starts(kv) + BLOCK)}"
        )
    windows, start = windows_of(loaded, text, context, tokens)
    still = dataclasses.replace(kv, tail=_ALL, protect=False)
    with enabled(loaded.model, still) as state:
        assert state is not None
        layers = [layer for layer in state.geometry if layer.packable]
        heard = _listen(loaded, still, windows, progress)
    fits = {layer.index: _fits(loaded, layer, heard[layer.index]) for layer in layers}
    probe_bits: tuple[int, ...] = () if fits_only else PROBE_BITS
    # keys or values, plain or fitted, bits
    probes = list(itertools.product(range(2), range(2), range(len(probe_bits))))
    sums = torch.zeros(len(layers), 2, 2, len(probe_bits), dtype=torch.float64)
    pace = _Pace(len(probes) * len(layers) * len(windows), progress)
    nll, count = 0.0, 0
    for number, ids in enumerate(windows[:1] if fits_only else windows):
        window, window_nll = _read(loaded, still, ids)
        nll, count = nll + window_nll, count + len(window.exact)
        if number == 0 and not any_baseline:
            check_plausible(float(torch.tensor(nll / count).exp()), start)
        with enabled(loaded.model, still):
            for place, layer in enumerate(layers):
                for which, fitted, bits in probes:
                    fit = fits[layer.index][which] if fitted else None
                    sums[place, which, fitted, bits] += _probe(
                        loaded, window, kv, layer.index, which, probe_bits[bits], fit
                    )
                    pace.step(f"window {number + 1} of {len(windows)}, layer {layer.index}")
    found = (sums / count).clamp_min(0.0).tolist()  # what costs nothing may come out a rounding below it
    return Calibration(
        model=checkpoint_fingerprint(loaded.model),
        name=model_name(loaded.name),
        text=text_fingerprint(text),
        tokens=0 if fits_only else count,
        context=context,
        probe_bits=probe_bits,
        command=command,
        layers=tuple(
            LayerSensitivity(
                *(layer.index, layer.num_kv_heads, layer.head_dim),
                *(
                    StreamCost(tuple(plain), tuple(fitted), fit)
                    for (plain, fitted), fit in zip(costs, fits[layer.index], strict=True)
                ),
            )
            for layer, costs in zip(layers, found, strict=True)
        ),
    )


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


def _listen(loaded: Loaded, still: KVCacheConfig, windows: list[Tensor], progress: Progress) -> dict[int, _Heard]:
    """What every layer sees of the windows, at positions all over the model's: RoPE turns the constant part of keys."""
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


def _read(loaded: Loaded, still: KVCacheConfig, ids: Tensor) -> tuple[_Window, float]:
    """The window with its prefix in an exact cache, and the exact negative log-likelihood of its rest in nats."""
    first = len(ids) // 2
    exact = reference_logits(loaded.model, ids, first).log_softmax(-1)
    nll = -float(exact.gather(1, ids[first + 1 :, None]).double().sum())
    with enabled(loaded.model, still) as state, torch.inference_mode():
        assert state is not None
        cache = state.new_cache()
        loaded.model(ids[None, :first], cache=cache, logits_to_keep=1)
    return _Window(cache, ids[first:-1], exact), nll


def _probe(
    loaded: Loaded, window: _Window, kv: KVCacheConfig, index: int, which: int, bits: int, fit: Fit | None
) -> float:
    """Divergence in nats, summed over the window's predictions, with one stream at few bits, coded by a fit."""
    cache = copy.deepcopy(window.cache)
    layer = cache.packed_layer(index)
    assert layer is not None
    key_bits, value_bits = (bits, _QUIET_BITS) if which == 0 else (_QUIET_BITS, bits)
    probed = dataclasses.replace(kv, key_bits=key_bits, value_bits=value_bits, quantizer="scalar", protect=False)
    key_fit, value_fit = (fit, None) if which == 0 else (None, fit)
    layer.reconfigure(dataclasses.replace(probed, key_fit=key_fit, value_fit=value_fit))
    total, at = 0.0, 0
    with torch.inference_mode():
        for part in torch.split(window.rest, BLOCK):
            packed = loaded.model(part[None], cache=cache).logits[0].float().log_softmax(-1)
            exact = window.exact[at : at + len(part)]
            total += float((exact.exp() * (exact - packed)).sum(dtype=torch.float64))
            at += len(part)
    if layer.all_staged():
        raise AssertionError(f"layer {index} packed nothing: its cost would be that of an exact cache")
    return total
