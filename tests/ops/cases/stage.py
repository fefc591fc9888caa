"""New exact rows of every dtype and layout into slots of a buffer; the slots beside them keep what they hold."""

from functools import partial

import torch
from torch import Tensor

from rotaryquant.ops.stage import prepare

from . import Case, generator
from .rotate import DTYPES, LAYOUTS, rows


def run(kernel: str, *, name: str, width: int, dtype: torch.dtype, layout: str, slot: int) -> tuple[Tensor, Tensor]:
    keys, values = rows(f"{name} keys", width, dtype, layout), rows(f"{name} values", 2 * width, dtype, layout)
    held = [torch.randn(2, 3, 20, size, generator=generator(name)).to(dtype) for size in (width, 2 * width)]
    prepare(keys, values, *held, kernel=kernel)(keys, values, *held, slot)
    return held[0], held[1]


def compare(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for ours, reference in zip(got, want, strict=True):
        assert torch.equal(ours, reference)


def _case(width: int, dtype: torch.dtype, layout: str, slot: int) -> Case:
    name = f"{width}-{str(dtype)[6:]}-{layout}-{slot}"
    return Case(name, partial(run, name=name, width=width, dtype=dtype, layout=layout, slot=slot), compare)


CASES = [
    _case(width, dtype, layout, slot) for width in (8, 80) for dtype in DTYPES for layout in LAYOUTS for slot in (0, 9)
]
