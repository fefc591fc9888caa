"""Rates that no kernel can exceed on this machine: bytes streamed from memory, int8 multiply-adds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rotaryquant.bench.timing import clock_for, estimate, interleaved, torch_threads
from rotaryquant.ops import native
from rotaryquant.ops.native import missing as missing

#: Bytes of the buffer behind `roof_gbps`: far beyond any core's own caches.
STREAM_BYTES = 256 << 20

#: Bytes that the products of the other roof use over and over, small enough for the first cache.
_DOT_BYTES = 4096
_DOT_ROUNDS = 2000

#: Bytes that are read in one step: a buffer holds whole ones.
_STEP = 512

_ROUNDS = 5


@dataclass(frozen=True)
class Work:
    """Something to time whose amount is known: bytes read, or multiply-adds done, by a call. data: what it reads."""

    call: Callable[[], object]
    amount: int
    data: Tensor


@dataclass(frozen=True)
class Roofs:
    """Rates with some number of threads. gbps: 10⁹ bytes/s read from memory. gmadds: 10⁹ int8 multiply-adds/s."""

    gbps: float
    gmadds: float


def stream_work(nbytes: int, threads: int) -> Work:
    """Read `nbytes` bytes, rounded up to 512, once, on the instruction set in use. Only where `missing()` is None."""
    # written, since pages that nobody wrote to are all the same page of zeros
    data = torch.full((max(1, -(-nbytes // _STEP)) * _STEP,), 1, dtype=torch.uint8)
    module = native.module()
    return Work(lambda: module.roof("stream", data, 1, threads), len(data), data)


def dot_work(threads: int) -> Work:
    """Multiply bytes with the products that attention uses, on the instruction set in use."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (_DOT_BYTES,), dtype=torch.uint8, generator=generator)
    module = native.module()
    return Work(
        lambda: module.roof("dot", data, _DOT_ROUNDS, threads), module.roof("dot", data, _DOT_ROUNDS, threads), data
    )


def measure_roofs(threads: Iterable[int]) -> dict[int, Roofs]:
    """Roofs with each number of threads; empty where there are no compiled kernels."""
    if missing() is not None:
        return {}
    found = {}
    for number in threads:
        with torch_threads(number):
            works = {"stream": stream_work(STREAM_BYTES, number), "dot": dot_work(number)}
            samples = interleaved({name: work.call for name, work in works.items()}, _ROUNDS, clock_for(number))
            rates = {name: works[name].amount / estimate(samples[name]).median / 1e9 for name in works}
            found[number] = Roofs(rates["stream"], rates["dot"])
    return found
