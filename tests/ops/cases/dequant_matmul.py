"""Products with packed weights: every grid and width of codes, one token and several."""

from functools import partial

import torch
from torch import Tensor

from rotaryquant.formats.weight import GRIDS, GROUPS, fit
from rotaryquant.ops.dequant_matmul import dequant_matmul
from rotaryquant.ops.pack import pack
from rotaryquant.ops.weights import PackedWeight, WeightCodec

from . import Case, generator

SHAPES = ((16, 1), (48, 5), (128, 33), (512, 8), (576, 17), (1536, 9))  # width, rows


def run(
    kernel: str, *, name: str, width: int, rows: int, tokens: int, bits: int, grid: str, group: int, dtype: torch.dtype
) -> Tensor:
    """Any codes at all, scales of either sign and one of zero; a matrix inside a stack, so that it begins anywhere,
    with scales that are no numbers around it. Inputs are rotated on the way where there are few rows.
    """
    random = generator(name)
    form = fit(width, bits, grid, group, rows)
    assert form is not None
    codes = torch.randint(0, 1 << bits, (3, rows, width), generator=random, dtype=torch.uint8)
    scales = torch.randn(3, rows, form.groups, generator=random).to(torch.bfloat16)
    scales[1, 0, 0] = 0.0
    scales[::2] = torch.nan
    weight = PackedWeight(WeightCodec.from_format(form), pack(codes, bits), scales)[1]
    x = torch.randn(tokens, width, generator=random).to(dtype)
    return dequant_matmul(x, weight, rotated=rows > 10, kernel=kernel)


def compare(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    tolerance = 2e-6 if got.dtype == torch.float32 else 8e-3
    assert float((got.float() - want.float()).norm()) <= tolerance * float(want.float().norm())


CASES = [
    Case(
        name := f"{grid}-{bits} bits, {width}x{rows}, {tokens} tokens, {str(dtype)[6:]}",
        partial(run, name=name, width=width, rows=rows, tokens=tokens, bits=bits, grid=grid, group=group, dtype=dtype),
        compare,
    )
    for grid in GRIDS
    for bits in (2, 3, 4, 8)
    for number, (width, rows) in enumerate(SHAPES)
    for tokens, dtype in ((1, torch.float32), (2 + number, torch.float32), (9 + 8 * number, torch.bfloat16))
    for group in (GROUPS[number % len(GROUPS)],)
]
