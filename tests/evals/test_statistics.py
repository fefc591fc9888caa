"""Intervals from a paired bootstrap."""

import math

import numpy as np
import pytest

from rotaryquant.evals.statistics import difference_interval, mean_interval, ratio_interval


def test_equal_scores_give_one_without_width() -> None:
    nll, counts = np.array([100.0, 220.0, 90.0]), np.array([50.0, 100.0, 50.0])
    assert ratio_interval(nll, nll, counts) == (1.0, 1.0, 1.0)


def test_a_shift_of_every_token_is_found_exactly_whatever_the_windows() -> None:
    counts = np.array([10.0, 1000.0, 50.0, 7.0])
    second = np.array([30.0, 2500.0, 100.0, 20.0])
    ratio, low, high = ratio_interval(second + 0.05 * counts, second, counts)
    assert (ratio, low, high) == pytest.approx((math.exp(0.05),) * 3)


def test_the_interval_covers_as_often_as_it_says() -> None:
    rng, inside = np.random.default_rng(0), 0
    counts = np.full(40, 100.0)
    for _ in range(60):
        noise = rng.normal(0.02, 0.05, 40)
        _, low, high = ratio_interval(noise * counts, np.zeros(40), counts)
        inside += low <= math.exp(0.02) <= high
    assert 50 <= inside <= 60  # 57 of 60 expected


def test_pairing_removes_what_windows_have_in_common() -> None:
    rng = np.random.default_rng(1)
    counts = np.full(20, 100.0)
    hard = rng.normal(300, 80, 20)
    _, low, high = ratio_interval(hard + 1.0, hard, counts)
    assert high - low < 1e-9


def test_a_ratio_of_means_is_paired_by_window() -> None:
    second = np.array([3.0, 500.0, 40.0, 7.0])
    assert mean_interval(0.8 * second, second) == pytest.approx((0.8, 0.8, 0.8))
    ratio, low, high = mean_interval(np.array([1.0, 3.0]), np.array([2.0, 2.0]))
    assert (ratio, low, high) == (1.0, 0.5, 1.5)


def test_a_difference_over_two_contexts_is_the_one_counted_by_hand() -> None:
    """Contexts A (one question, lost) and B (three, equal): AA, AB, BA and BB are drawn equally often."""
    first, second = np.array([0.0, 1.0, 1.0, 0.0]), np.array([1.0, 1.0, 1.0, 0.0])
    found = difference_interval(first, second, np.array([7, 9, 9, 9]))
    assert found == (-0.25, -1.0, 0.0)  # -1/4; a quarter of the draws is -1, half -1/4, a quarter 0
    assert difference_interval(second, first, np.array([7, 9, 9, 9])) == (0.25, 0.0, 1.0)


def test_questions_of_one_context_are_drawn_together() -> None:
    """Twenty lost answers of 200, once in a context each and once all in one."""
    second = np.ones(200)
    first = second - (np.arange(200) < 20)
    apart, together = np.arange(200), np.arange(200) // 20
    _, low, high = difference_interval(first, second, apart)
    _, wide_low, wide_high = difference_interval(first, second, together)
    assert low == pytest.approx(-0.1 - 1.96 * math.sqrt(0.1 * 0.9 / 200), abs=0.006)
    assert high == pytest.approx(-0.1 + 1.96 * math.sqrt(0.1 * 0.9 / 200), abs=0.006)
    assert wide_low < low - 0.1
    assert wide_high == 0.0
    assert wide_low == pytest.approx(-0.3)


def test_a_difference_is_the_same_each_time_and_without_width_where_nothing_differs() -> None:
    scores = np.random.default_rng(0).random(50)
    groups = np.arange(50) // 5
    assert difference_interval(scores, scores, groups) == (0.0, 0.0, 0.0)
    other = np.random.default_rng(1).random(50)
    assert difference_interval(scores, other, groups) == difference_interval(scores, other, groups)
