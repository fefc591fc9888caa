"""Bits where they help: which keys and values of which layers get 2, 3, 4 or 8, under a mean that is given.

The divergence that coded rows cause is, for small errors, a sum over the streams of a model, and that of one stream
grows with the squared error of its codes. So one measurement a stream says what any width would cost, and which
choice under a budget costs least is a knapsack, solved exactly.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rotaryquant.errors import ConfigError
from rotaryquant.formats.calibration import Calibration
from rotaryquant.formats.codebook import TRELLISES, relative_error
from rotaryquant.formats.feedback import Metric

#: What a stream may get. Fewer bits than two would leave directions out altogether: their error is the same at every
#: token, adds up over a sum of values, and costs far more than its size says (docs/experiments.md).
WIDTHS = (2, 3, 4, 8)

#: Steps of a budget beyond which a file is refused: no model comes near.
_MOST_ROOM = 1_000_000


@dataclass(frozen=True)
class LayerWidths:
    """Bits of the keys and the values of model layer `index`, and what their errors cost by direction, or None."""

    index: int
    key_bits: int
    value_bits: int
    key_metric: Metric | None = field(default=None, compare=False, repr=False)
    value_metric: Metric | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Allocation:
    """Bits of every packed layer of one checkpoint.

    model, text: fingerprints of the checkpoint and of the text it was calibrated on. layers: ascending. mean_bits: of a
    code over all values. expected: KL divergence in nats, by the sum over streams. metrics: digest of those by which
    codes are chosen, "" where each is chosen alone.
    """

    model: str
    text: str
    layers: tuple[LayerWidths, ...]
    mean_bits: float
    expected: float
    metrics: str = ""

    def of_layer(self, index: int) -> LayerWidths | None:
        """The layer's widths, None where it was not calibrated."""
        return next((layer for layer in self.layers if layer.index == index), None)


def allocate(
    calibration: Calibration, budget: float, quantizer: str = "scalar", *, feedback: bool = True
) -> Allocation:
    """Widths with a mean of at most `budget` bits a value (codes alone, scales come on top) and the least divergence.

    quantizer: of the widths that have a choice (formats.codebook). feedback: choose codes by the calibration's metrics
    (formats.feedback). Raises ConfigError for a budget that no choice of WIDTHS has.
    """
    if not WIDTHS[0] <= budget <= WIDTHS[-1]:
        raise ConfigError(f"kv budget={budget:g} must be between {WIDTHS[0]} and {WIDTHS[-1]} bits a value")
    layers = calibration.layers
    values = [layer.num_kv_heads * layer.width for layer in layers for _ in range(2)]
    costs = [
        _costs(cost, layer.width, calibration.probe_bits, quantizer)
        for layer in layers
        for cost in (layer.keys, layer.values)
    ]
    bits = _least(costs, values, budget)
    spent = sum(width * count for width, count in zip(bits, values, strict=True))
    return Allocation(
        model=calibration.model,
        text=calibration.text,
        layers=tuple(
            LayerWidths(
                *(layer.index, key_bits, value_bits),
                *((layer.key_metric, layer.value_metric) if feedback else (None, None)),
            )
            for layer, key_bits, value_bits in zip(layers, bits[::2], bits[1::2], strict=True)
        ),
        mean_bits=spent / sum(values),
        expected=sum(cost[WIDTHS.index(width)] for cost, width in zip(costs, bits, strict=True)),
        metrics=calibration.metrics_digest if feedback else "",
    )


def _least(costs: list[list[float]], values: list[int], budget: float) -> list[int]:
    """Bits of each stream with the least sum of costs, at most `budget` a value over all; the fewest where equal.

    costs: nats of each stream at each of WIDTHS. values: how many values of each stream a token has.
    """
    unit = math.gcd(*values)
    sizes = [count // unit for count in values]
    room = math.floor(budget * sum(sizes) + 1e-9)
    if room > _MOST_ROOM:
        raise ConfigError(
            f"the calibration's layers differ so much in size that bits cannot be shared out ({room:,} units)"
        )
    best: NDArray[np.float64] = np.zeros(room + 1)  # least cost of the streams so far, by bits spent at most
    chosen = np.empty((len(costs), room + 1), dtype=np.int8)
    for number, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
        options = np.full((len(WIDTHS), room + 1), np.inf)
        for option, width in enumerate(WIDTHS):
            if (spent := width * size) <= room:
                options[option, spent:] = best[: room + 1 - spent] + cost[option]
        chosen[number] = options.argmin(0)
        best = options.min(0)
    bits, left = [], room
    for number in reversed(range(len(costs))):
        bits.append(WIDTHS[chosen[number, left]])
        left -= bits[-1] * sizes[number]
    return bits[::-1]


def _costs(measured: float, width: int, probe_bits: int, quantizer: str) -> list[float]:
    """Nats at each of WIDTHS, from those at the probe's bits."""
    unit = measured / relative_error(width, probe_bits)
    return [unit * relative_error(width, bits, quantizer if bits in TRELLISES else "scalar") for bits in WIDTHS]
