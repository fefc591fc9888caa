"""Times of alternatives that take turns on a shared machine, and what their medians are worth.

Ours and its peers are timed in rounds, one sample of each a round, so that whatever else the machine does meets all of
them; a ratio is formed within a round and its median taken over the rounds.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

#: Seconds that one sample lasts at least; a call that takes less is repeated.
SAMPLE_SECONDS = 0.02

#: Probability with which an interval holds the true median.
COVERAGE = 0.95


@dataclass(frozen=True)
class Clock:
    """A clock. name: as reports print it. read: seconds."""

    name: str
    read: Callable[[], float]


def clock_for(threads: int) -> Clock:
    """What time is measured by: of one thread the process' CPU time, which other programs do not add to."""
    if threads == 1:
        return Clock("process CPU time", time.process_time)
    return Clock("wall clock", time.perf_counter)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """The number of threads of torch, which the package's kernels follow, for the length of a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Estimate:
    """A median with its interval, low <= median <= high."""

    median: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Estimate":
        """The same in another unit; factor > 0."""
        return Estimate(self.median * factor, self.low * factor, self.high * factor)

    def fields(self, name: str) -> dict[str, float]:
        """As JSON fields `name`, `name_low` and `name_high`."""
        return {name: self.median, f"{name}_low": self.low, f"{name}_high": self.high}


def interval_ranks(count: int) -> tuple[int, int, float]:
    """Which order statistics (from 0) of `count` samples bound the median, and how often they do at least.

    The narrowest symmetric pair that covers it in `COVERAGE` of cases, whatever the distribution; with fewer than six
    samples no pair does, and the outermost one is given.
    """
    below = 0.0
    found = (0, count - 1, 1.0 - 2.0 * 0.5**count)
    for rank in range(count // 2):
        below += math.comb(count, rank) * 0.5**count
        if 1.0 - 2.0 * below < COVERAGE:
            break
        found = (rank, count - 1 - rank, 1.0 - 2.0 * below)
    return found


def estimate(samples: Sequence[float]) -> Estimate:
    """Median of at least one sample, with the interval of `interval_ranks`."""
    ordered = sorted(samples)
    low, high, _ = interval_ranks(len(ordered))
    return Estimate(statistics.median(ordered), ordered[low], ordered[high])


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Estimate:
    """Median of the ratios within rounds: entry i of both comes from round i."""
    return estimate([over / under for over, under in zip(numerator, denominator, strict=True)])


def fastest(samples: Mapping[str, Sequence[float]]) -> str:
    """Name with the least median time."""
    return min(samples, key=lambda name: statistics.median(samples[name]))


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int, clock: Clock, least: float | None = None
) -> dict[str, list[float]]:
    """Seconds a call of each alternative, one sample a round, in the given order and back in every other round.

    least: seconds that a sample lasts at least, `SAMPLE_SECONDS` by default. Every call is made before its first
    sample, so that nothing is timed cold.
    """
    least = SAMPLE_SECONDS if least is None else least
    with _no_collections():
        counts = {name: _calibrated(call, clock, least) for name, call in calls.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds):
            for name in list(calls) if number % 2 == 0 else reversed(list(calls)):
                samples[name].append(_seconds(calls[name], counts[name], clock) / counts[name])
    return samples


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python's garbage collector out of the samples."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _calibrated(call: Callable[[], object], clock: Clock, least: float) -> int:
    """How many calls a sample needs to last `least` seconds."""
    call()
    count = 1
    while (elapsed := _seconds(call, count, clock)) < least:
        wanted = 1.2 * count * least / max(elapsed, 1e-9)
        count = min(16 * count, max(count + 1, math.ceil(wanted)))
    return count


def _seconds(call: Callable[[], object], count: int, clock: Clock) -> float:
    start = clock.read()
    for _ in range(count):
        call()
    return clock.read() - start
