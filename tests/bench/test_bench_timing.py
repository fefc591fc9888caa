"""Medians, their intervals and ratios; alternatives that take turns."""

import math
import time

import numpy as np
import pytest
import torch

from rotaryquant.bench import timing
from rotaryquant.bench.timing import Clock, Estimate, clock_for, estimate, fastest, interleaved, interval_ranks, ratio


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(1, 0, 0), (2, 0, 1), (5, 0, 4), (6, 0, 5), (8, 0, 7), (9, 1, 7), (20, 5, 14), (25, 7, 17)],
)
def test_ranks_are_those_of_the_binomial_distribution(count: int, low: int, high: int) -> None:
    found_low, found_high, coverage = interval_ranks(count)
    assert (found_low, found_high) == (low, high)
    inside = sum(math.comb(count, below) for below in range(low + 1, high + 1)) / 2**count
    assert coverage == pytest.approx(inside)
    assert (coverage >= timing.COVERAGE) == (count >= 6)


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(1000):
        found = estimate(list(rng.exponential(1.0, 20)))
        assert found.low <= found.median <= found.high
        inside += found.low <= math.log(2.0) <= found.high
    assert 940 <= inside <= 975  # 95.86% are expected


def test_a_ratio_is_formed_within_rounds() -> None:
    """A machine that slows down by 10 within the run moves every time, and no ratio."""
    slow = [1.0, 3.0, 10.0, 2.0, 7.0, 5.0]
    ours = [1e-3 * factor for factor in slow]
    peer = [2.5e-3 * factor for factor in slow]
    found = ratio(peer, ours)
    assert (found.median, found.low, found.high) == pytest.approx((2.5, 2.5, 2.5))
    with pytest.raises(ValueError, match="zip"):
        ratio(peer, ours[:-1])


def test_fields_and_units() -> None:
    found = Estimate(2.0, 1.0, 4.0).scaled(1e6).fields("ours_us")
    assert found == {"ours_us": 2e6, "ours_us_low": 1e6, "ours_us_high": 4e6}
    assert fastest({"a": [3.0, 1.0, 3.0], "b": [2.0, 2.0, 9.0]}) == "b"


def test_one_thread_is_timed_by_cpu_time_and_more_by_the_wall() -> None:
    assert clock_for(1) == Clock("process CPU time", time.process_time)
    assert clock_for(2) == Clock("wall clock", time.perf_counter)


def test_alternatives_take_turns_and_samples_last_long_enough() -> None:
    now, order = 0.0, []

    def takes(name: str, seconds: float) -> object:
        nonlocal now
        now += seconds
        order.append(name)
        return None

    clock = Clock("fake", lambda: now)
    samples = interleaved({"a": lambda: takes("a", 0.003), "b": lambda: takes("b", 0.05)}, 4, clock, least=0.02)
    assert samples["a"] == pytest.approx([0.003] * 4)
    assert samples["b"] == pytest.approx([0.05] * 4)
    sample = "a" * 8  # 1.2 times as many calls as just reach 0.02 s
    assert "".join(order).endswith(f"{sample}bb{sample}{sample}bb{sample}")


def test_rounds_go_there_and_back() -> None:
    now, order = 0.0, []

    def tick(name: str) -> None:
        nonlocal now
        now += 1.0
        order.append(name)

    calls = {name: lambda name=name: tick(name) for name in "abc"}
    interleaved(calls, 2, Clock("fake", lambda: now), least=1.0)
    assert "".join(order[-6:]) == "abccba"


def test_threads_are_set_back() -> None:
    before = torch.get_num_threads()
    seen = []

    def fail() -> None:
        with timing.torch_threads(2):
            seen.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (seen, torch.get_num_threads()) == ([2], before)
