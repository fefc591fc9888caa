"""Circles of a trellis: the same codes, whatever the integers."""

from functools import partial

import torch
from torch import Tensor

from rotaryquant.formats.codebook import CYCLE, FINE, TRELLISES
from rotaryquant.ops.circles import best_circles

from . import Case, generator

SPREADS = (0, 3, 160, 400)  # many ties, ordinary rows, far outside the levels


def run(kernel: str, *, bits: int, spread: int, circles: int) -> Tensor:
    x = (torch.randn(circles, CYCLE, generator=generator(f"{bits}-{spread}")) * spread).round().long()
    trellis = TRELLISES[bits]
    return best_circles(x, FINE * torch.tensor(trellis.levels).view(trellis.classes, -1), kernel=kernel)


def compare(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got, want)


CASES = [
    Case(f"{bits} bits, spread {spread}, {circles}", partial(run, bits=bits, spread=spread, circles=circles), compare)
    for bits in sorted(TRELLISES)
    for spread in SPREADS
    for circles in (1, 129)
]
