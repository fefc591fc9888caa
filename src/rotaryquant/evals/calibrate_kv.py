"""What each layer's keys and values cost at few bits, measured one by one: the numbers that bits are shared out by.

First the fits (evals/fit_rows.py). Then the costs. A window's prefix is read once, exactly. Then, for every stream
of every packed layer, its rows alone are packed at few bits and the rest of the window is read behind them; the KL
divergence of its predictions from the exact ones is what the error of that stream costs. Everything else stays exact,
so the costs of two streams can be compared. Each is measured at two widths, since an error at 2 bits is so large that
its cost says little of that at 3, and with and without the fit, since not every stream gains from it.
"""

import copy
import dataclasses
import itertools
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.evals.fit_rows import make_fits
from rotaryquant.evals.teacher_forcing import reference_logits
from rotaryquant.evals.windows import check_plausible, windows_of
from rotaryquant.formats.calibration import Calibration, LayerSensitivity, StreamCost
from rotaryquant.formats.fit import Fit
from rotaryquant.formats.kv import BLOCK
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.enable import enabled
from rotaryquant.integrations.transformers.fingerprint import checkpoint_fingerprint
from rotaryquant.kv.tail import packing_starts
from rotaryquant.measuring import Progress, model_name, text_fingerprint

#: Bits of the rows whose effect is measured: few, so that it stands out.
PROBE_BITS = (2, 3)
#: Bits of the other stream of the layer, which is packed with it: its effect is a thousandth.
_QUIET_BITS = 8
#: Seconds between two lines on how far it is.
_SAY_EVERY = 5.0
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
    if not any_baseline:  # better to hear of it before all else
        window, nll = _read(loaded, still, windows[0])
        check_plausible(float(torch.tensor(nll / len(window.exact)).exp()), start)
    with enabled(loaded.model, still) as state:
        assert state is not None
        layers = [layer for layer in state.geometry if layer.packable]
        fits = make_fits(loaded, still, layers, windows, progress)
    probe_bits: tuple[int, ...] = () if fits_only else PROBE_BITS
    # keys or values, plain or fitted, bits
    probes = list(itertools.product(range(2), range(2), range(len(probe_bits))))
    sums = torch.zeros(len(layers), 2, 2, len(probe_bits), dtype=torch.float64)
    pace = _Pace(len(probes) * len(layers) * len(windows), progress)
    count = 0
    for number, ids in enumerate([] if fits_only else windows):
        window, _ = _read(loaded, still, ids)
        count += len(window.exact)
        with enabled(loaded.model, still):
            for place, layer in enumerate(layers):
                for which, fitted, bits in probes:
                    fit = fits[layer.index][which] if fitted else None
                    sums[place, which, fitted, bits] += _probe(
                        loaded, window, kv, layer.index, which, probe_bits[bits], fit
                    )
                    pace.step(f"window {number + 1} of {len(windows)}, layer {layer.index}")
    found = (sums / max(count, 1)).clamp_min(0.0).tolist()  # what costs nothing may come out a rounding below it
    return Calibration(
        model=checkpoint_fingerprint(loaded.model),
        name=model_name(loaded.name),
        text=text_fingerprint(text),
        tokens=count,
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
