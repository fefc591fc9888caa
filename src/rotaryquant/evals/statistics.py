"""Intervals for paired comparisons: resample whole windows or contexts, since what one holds is not independent."""

import math

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
_SEED = 20_26


def ratio_interval(
    first: NDArray[np.float64], second: NDArray[np.float64], counts: NDArray[np.float64]
) -> tuple[float, float, float]:
    """exp(mean(first) - mean(second)) and its 95% interval, from a paired bootstrap over windows.

    first, second: summed negative log-likelihood of each window, nats, on the same tokens. counts: tokens of each
    window. Returns (ratio, low, high): a perplexity ratio.
    """
    difference = first - second
    ratio = math.exp(difference.sum() / counts.sum())
    rng = np.random.default_rng(_SEED)
    picks = rng.integers(0, len(counts), (RESAMPLES, len(counts)))
    ratios = np.exp(difference[picks].sum(1) / counts[picks].sum(1))
    low, high = np.quantile(ratios, (0.025, 0.975))
    return ratio, float(low), float(high)


def mean_interval(first: NDArray[np.float64], second: NDArray[np.float64]) -> tuple[float, float, float]:
    """sum(first) / sum(second) and its 95% interval, from a paired bootstrap over windows.

    first, second: what two caches cost in each window, as summed divergences. Returns (ratio, low, high).
    """
    rng = np.random.default_rng(_SEED)
    picks = rng.integers(0, len(first), (RESAMPLES, len(first)))
    low, high = np.quantile(first[picks].sum(1) / second[picks].sum(1), (0.025, 0.975))
    return float(first.sum() / second.sum()), float(low), float(high)


def difference_interval(
    first: NDArray[np.float64], second: NDArray[np.float64], groups: NDArray[np.int64]
) -> tuple[float, float, float]:
    """mean(first) - mean(second) and its 95% interval, from a paired bootstrap over groups.

    first, second: scores of the same questions, 0 to 1. groups: for each question the context that it was asked of;
    contexts are drawn whole, since questions of one are not independent. Returns (difference, low, high). An interval
    over scores that nowhere differ has no width.
    """
    _, of_group = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(of_group, first - second), np.bincount(of_group)
    picks = np.random.default_rng(_SEED).integers(0, len(counts), (RESAMPLES, len(counts)))
    low, high = np.quantile(sums[picks].sum(1) / counts[picks].sum(1), (0.025, 0.975))
    return float(sums.sum() / counts.sum()), float(low), float(high)
