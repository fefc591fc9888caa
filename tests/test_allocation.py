"""Bits go where they help most, and never more of them than there are."""

import dataclasses
import itertools

import numpy as np
import pytest

from rotaryquant.allocation import WIDTHS, Allocation, allocate, least_cost
from rotaryquant.errors import ConfigError
from rotaryquant.formats.calibration import Calibration, LayerSensitivity, StreamCost
from rotaryquant.formats.codebook import relative_error
from rotaryquant.formats.fit import Fit

FLAT = Fit(*[np.stack([np.eye(64)] * 2)] * 2, np.zeros((2, 64)))


def stream(plain: float, fitted: float | None = None) -> StreamCost:
    """At 2 bits; at 3 what that foretells."""
    drop = relative_error(64, 3) / relative_error(64, 2)
    fitted = 2 * plain if fitted is None else fitted
    return StreamCost((plain, plain * drop), (fitted, fitted * drop), FLAT)


def calibration(*costs: tuple[float, float], sizes: tuple[tuple[int, int], ...] = ()) -> Calibration:
    layers = [
        LayerSensitivity(index, *(sizes[index] if sizes else (2, 64)), stream(keys), stream(values))
        for index, (keys, values) in enumerate(costs)
    ]
    return of_layers(*layers)


def of_layers(*layers: LayerSensitivity) -> Calibration:
    return Calibration("model", "name", "text", 1, 1024, (2, 3), "command", layers)


def test_fits_come_along_where_they_help_unless_they_are_not_wanted() -> None:
    helps, hurts = stream(1.0, 0.5), stream(1.0, 1.5)
    given = of_layers(LayerSensitivity(0, 2, 64, helps, hurts), LayerSensitivity(1, 2, 64, hurts, helps))
    made, plain = allocate(given, 3), allocate(given, 3, fitted=False)
    assert [(x.key_fit, x.value_fit) for x in made.layers] == [(FLAT, None), (None, FLAT)]
    assert plain.layers[0].key_fit is plain.layers[1].value_fit is None
    other = Fit(FLAT.metric, FLAT.balance, FLAT.mean + 1)
    assert made != dataclasses.replace(
        made, layers=(dataclasses.replace(made.layers[0], key_fit=other), made.layers[1])
    )
    drop = relative_error(64, 3) / relative_error(64, 2)
    assert (made.expected, plain.expected) == pytest.approx((3.0 * drop, 4.0 * drop))


def test_each_width_is_judged_by_its_own_probe() -> None:
    """A fit that costs more at 2 bits and less at 3; at 8 there is none."""
    mixed = StreamCost((1.0, 0.4), (2.0, 0.1), FLAT)
    given = of_layers(LayerSensitivity(0, 2, 64, mixed, mixed))
    found = {budget: allocate(given, budget) for budget in WIDTHS}
    assert {budget: made.layers[0].key_fit for budget, made in found.items()} == {2: None, 3: FLAT, 4: FLAT, 8: None}
    unit = 1 / relative_error(64, 3)
    assert found[2].expected == pytest.approx(2 * 1.0)
    assert found[3].expected == pytest.approx(2 * 0.1)
    assert found[4].expected == pytest.approx(2 * 0.1 * unit * relative_error(64, 4))
    assert found[8].expected == pytest.approx(2 * 0.4 * unit * relative_error(64, 8))
    trellis = allocate(given, 3, "trellis")
    assert trellis.expected == pytest.approx(2 * 0.1 * unit * relative_error(64, 3, "trellis"))


def bits(made: Allocation) -> list[int]:
    return [width for layer in made.layers for width in (layer.key_bits, layer.value_bits)]


def test_equal_streams_get_equal_bits() -> None:
    for budget in WIDTHS:
        assert bits(allocate(calibration((1, 1), (1, 1)), budget)) == [budget] * 4


def test_what_hurts_gets_more() -> None:
    made = allocate(calibration((1.0, 0.01), (0.1, 0.001)), 3)
    assert made.layers[0].key_bits > 3 > made.layers[1].value_bits
    assert made.layers[0].key_bits >= made.layers[1].key_bits >= made.layers[1].value_bits
    assert made.mean_bits <= 3
    assert made.of_layer(1) == made.layers[1]
    assert made.of_layer(7) is None


@pytest.mark.parametrize("budget", [2, 2.3, 2.5, 3, 3.3, 4, 5.5, 8])
def test_no_other_choice_is_better(budget: float) -> None:
    """Against all 4^6 choices: never over the budget, and none that fits costs less."""
    given = calibration((3.0, 0.2), (0.7, 0.05), (0.02, 1.1))
    made = allocate(given, budget)
    costs = [cost.plain[0] for layer in given.layers for cost in (layer.keys, layer.values)]

    def divergence(choice: tuple[int, ...]) -> float:
        return sum(c * relative_error(64, b) / relative_error(64, 2) for c, b in zip(costs, choice, strict=True))

    assert made.mean_bits == pytest.approx(sum(bits(made)) / 6)
    assert made.mean_bits <= budget + 1e-9
    assert made.expected == pytest.approx(divergence(tuple(bits(made))))
    fitting = [choice for choice in itertools.product(WIDTHS, repeat=6) if sum(choice) <= 6 * budget + 1e-9]
    assert made.expected == pytest.approx(min(map(divergence, fitting)))


def test_wide_layers_count_for_more() -> None:
    """One wide stream against many narrow ones: a bit there costs eight times as much."""
    made = allocate(calibration((1, 1), (1, 1), sizes=((8, 64), (1, 64))), 3.5)
    spent = sum(8 * (x.key_bits + x.value_bits) if x.index == 0 else x.key_bits + x.value_bits for x in made.layers)
    assert spent <= 3.5 * 18
    assert made.mean_bits == pytest.approx(spent / 18)
    assert made.layers[1].key_bits > made.layers[0].key_bits


def test_what_costs_nothing_gets_the_least() -> None:
    assert bits(allocate(calibration((0.0, 0.0), (1.0, 1.0)), 3))[:2] == [2, 2]


def test_the_cheapest_choice_under_a_room() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        costs = np.sort(random.random((5, 3)), 1)[:, ::-1].tolist()
        sizes = (np.sort(random.integers(1, 60, (5, 3)), 1)).tolist()
        room = int(random.integers(sum(min(of) for of in sizes), sum(max(of) for of in sizes) + 1))
        picked = least_cost(costs, sizes, room)
        assert picked is not None
        assert sum(of[option] for of, option in zip(sizes, picked, strict=True)) <= room
        found = sum(of[option] for of, option in zip(costs, picked, strict=True))
        fitting = [
            sum(of[option] for of, option in zip(costs, choice, strict=True))
            for choice in itertools.product(range(3), repeat=5)
            if sum(of[option] for of, option in zip(sizes, choice, strict=True)) <= room
        ]
        assert found == pytest.approx(min(fitting))
    assert least_cost([[1.0, 0.5]], [[5, 9]], 4) is None


def test_sizes_without_a_common_part_are_shared_out_in_steps() -> None:
    """Far more units than there are steps: what is chosen fits all the same, and a single bit decides it."""
    sizes = [[999_983 * 7_919, 1_999_966 * 7_919], [1_000_003 * 7_907, 2_000_006 * 7_907]]
    room = sizes[0][1] + sizes[1][0] + 1_000_000
    assert least_cost([[2.0, 1.0], [9.0, 8.5]], sizes, room) == [1, 0]
    assert least_cost([[2.0, 1.0], [9.0, 8.5]], sizes, sum(of[0] for of in sizes) - 1) is None


@pytest.mark.parametrize("budget", [1.99, 8.01, float("nan"), -3])
def test_an_impossible_budget_is_refused(budget: float) -> None:
    with pytest.raises(ConfigError, match="between 2 and 8"):
        allocate(calibration((1, 1)), budget)
