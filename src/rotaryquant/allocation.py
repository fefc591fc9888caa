"""Bits where they help: which keys and values of which layers get 2, 3, 4 or 8, under a mean that is given.

The divergence that coded rows cause is, for small errors, a sum over the streams of a model, and that of one stream
grows with the squared error of its codes. So measurements of a stream at few bits say what any width would cost, and
which choice under a budget costs least is a knapsack, solved exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rotaryquant.errors import ConfigError
from rotaryquant.formats.calibration import Calibration, StreamCost
from rotaryquant.formats.codebook import TRELLISES, relative_error
from rotaryquant.formats.feedback import MOST_BITS
from rotaryquant.formats.fit import Fit

#: What a stream may get. Fewer bits than two would leave directions out altogether: their error is the same at every
#: token, adds up over a sum of values, and costs far more than its size says (docs/experiments.md).
WIDTHS = (2, 3, 4, 8)

#: Steps of a budget at most.
_STEPS = 100_000


@dataclass(frozen=True)
class LayerWidths:
    """Bits of the keys and the values of model layer `index`, and the spaces in which they are coded.

    The fits are None where that is their own, and each code is chosen for itself.
    """

    index: int
    key_bits: int
    value_bits: int
    key_fit: Fit | None = field(default=None, repr=False)
    value_fit: Fit | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Allocation:
    """Bits of every packed layer of one checkpoint.

    model, text: fingerprints of the checkpoint and of the text it was calibrated on. layers: ascending. mean_bits: of a
    code over all values. expected: KL divergence in nats, by the sum over streams; None where nothing was probed.
    """

    model: str
    text: str
    layers: tuple[LayerWidths, ...]
    mean_bits: float
    expected: float | None

    def of_layer(self, index: int) -> LayerWidths | None:
        """The layer's widths, None where it was not calibrated."""
        return next((layer for layer in self.layers if layer.index == index), None)


def allocate(calibration: Calibration, budget: float, quantizer: str = "scalar", *, fitted: bool = True) -> Allocation:
    """Widths with a mean of at most `budget` bits a value (codes alone, scales come on top) and the least divergence.

    quantizer: of the widths that have a choice (formats.codebook). fitted: code rows as the calibration's fits say
    (formats.fit) in those streams where that was found to cost less. Raises ConfigError for a budget that no
    choice of WIDTHS has, and for a calibration without probes.
    """
    if not calibration.probe_bits:
        raise ConfigError(
            f"kv budget={budget:g}: the calibration has fits alone and does not know where bits help; leave budget "
            f"out, or make it again without --fits-only"
        )
    if not WIDTHS[0] <= budget <= WIDTHS[-1]:
        raise ConfigError(f"kv budget={budget:g} must be between {WIDTHS[0]} and {WIDTHS[-1]} bits a value")
    layers = calibration.layers
    streams = [(stream, layer.width) for layer in layers for stream in (layer.keys, layer.values)]
    values = [layer.num_kv_heads * layer.width for layer in layers for _ in range(2)]
    options = [_options(stream, width, calibration.probe_bits, quantizer, fitted) for stream, width in streams]
    sizes = [[width * count for width in WIDTHS] for count in values]
    costs = [[cost for cost, _ in option] for option in options]
    picked = least_cost(costs, sizes, math.floor(budget * sum(values) + 1e-9))
    assert picked is not None  # the budget is WIDTHS[0] a value or more
    bits = [WIDTHS[option] for option in picked]
    chosen = [option[WIDTHS.index(width)] for option, width in zip(options, bits, strict=True)]
    fits = [fit for _, fit in chosen]
    spent = sum(width * count for width, count in zip(bits, values, strict=True))
    return Allocation(
        model=calibration.model,
        text=calibration.text,
        layers=tuple(
            LayerWidths(layer.index, bits[at], bits[at + 1], fits[at], fits[at + 1])
            for layer, at in zip(layers, range(0, len(bits), 2), strict=True)
        ),
        mean_bits=spent / sum(values),
        expected=sum(cost for cost, _ in chosen),
    )


def everywhere(calibration: Calibration, key_bits: int, value_bits: int, *, fitted: bool = True) -> Allocation:
    """The same bits in all layers, rows coded as the fits say unless `fitted` is off: what fits alone are good for."""
    layers = calibration.layers
    sizes = [layer.num_kv_heads * layer.width for layer in layers]

    def fit_of(stream: StreamCost, bits: int) -> Fit | None:
        return stream.fit if fitted and bits <= MOST_BITS else None

    return Allocation(
        model=calibration.model,
        text=calibration.text,
        layers=tuple(
            LayerWidths(
                *(layer.index, key_bits, value_bits),
                *(fit_of(layer.keys, key_bits), fit_of(layer.values, value_bits)),
            )
            for layer in layers
        ),
        mean_bits=sum(size * (key_bits + value_bits) for size in sizes) / (2 * sum(sizes)),
        expected=None,
    )


def least_cost(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], room: int) -> list[int] | None:
    """The choice of one option for each thing with the least sum of costs whose sizes sum to `room` at most.

    costs, sizes: of each thing's options. Of options that cost the same the first is taken. Returns the number of each
    thing's option, or None where even the smallest do not fit. Exact but for sizes that are rounded up to whole steps,
    which are the sizes' common divisor, or a hundred-thousandth of the room where that is larger.
    """
    step = max(math.gcd(*(size for options in sizes for size in options)), -(-room // _STEPS), 1)
    steps = room // step
    best: NDArray[np.float64] = np.zeros(steps + 1)  # least cost of the things so far, by what they take at most
    chosen = np.empty((len(costs), steps + 1), dtype=np.int8)
    taken = [[-(-size // step) for size in options] for options in sizes]
    for number, (cost, of) in enumerate(zip(costs, taken, strict=True)):
        options = np.full((len(of), steps + 1), np.inf)
        for option, spent in enumerate(of):
            if spent <= steps:
                options[option, spent:] = best[: steps + 1 - spent] + cost[option]
        chosen[number] = options.argmin(0)
        best = options.min(0)
    if not np.isfinite(best[steps]):
        return None
    picked, left = [], steps
    for number in reversed(range(len(costs))):
        picked.append(int(chosen[number, left]))
        left -= taken[number][picked[-1]]
    return picked[::-1]


def _options(
    stream: StreamCost, width: int, probe_bits: tuple[int, ...], quantizer: str, fitted: bool
) -> list[tuple[float, Fit | None]]:
    """Nats at each of WIDTHS, from those at the nearest probe below, and the fit where it makes them less."""
    options: list[tuple[float, Fit | None]] = []
    for bits in WIDTHS:
        probe = max((at for at, probed in enumerate(probe_bits) if probed <= bits), default=0)
        found: list[tuple[float, Fit | None]] = [(stream.plain[probe], None)]
        if fitted and bits <= MOST_BITS:
            found.append((stream.fitted[probe], stream.fit))
        cost, fit = min(found, key=lambda option: option[0])
        to_bits = relative_error(width, bits, quantizer if bits in TRELLISES else "scalar")
        options.append((cost / relative_error(width, probe_bits[probe]) * to_bits, fit))
    return options
