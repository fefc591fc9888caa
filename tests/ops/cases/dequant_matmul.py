"""Products with packed weights: every grid and width of codes, one token and several."""

from functools import partial

import torch
from torch import Tensor

from rotaryquant.formats.weight import GRIDS, GROUPS, fit
from rotaryquant.ops.dequant_matmul import dequant_matmul, reference
from rotaryquant.ops.pack import pack
from rotaryquant.ops.weights import PackedWeight, WeightCodec

from . import Case, generator

SHAPES = ((16, 1), (48, 5), (128, 33), (512, 8), (576, 17), (1536, 9))  # width, rows


def run(
    kernel: str,
    *,
    name: str,
    width: int,
    rows: int,
    tokens: int,
    bits: int,
    grid: str,
    group: int,
    dtype: torch.dtype,
    seed: int | None,
) -> tuple[Tensor, ...]:
    """Any codes at all, scales of either sign and one of zero; a matrix inside a stack, so that it begins anywhere.

    Of the reference what comes of inputs as they are, and of those rounded to 8 bits.
    """
    random = generator(name)
    form = fit(width, bits, grid, group, seed)
    assert form is not None
    codes = torch.randint(0, 1 << bits, (3, rows, width), generator=random, dtype=torch.uint8)
    scales = torch.randn(3, rows, form.groups, generator=random).to(torch.bfloat16)
    scales[1, 0, 0] = 0.0
    scales[::2] = torch.nan
    weight = PackedWeight(WeightCodec.from_format(form), pack(codes, bits), scales)[1]
    x = torch.randn(tokens, width, generator=random).to(dtype)
    if kernel == "reference":
        return tuple(reference.run(x, weight, rounded) for rounded in (False, True))
    return (dequant_matmul(x, weight, kernel=kernel),)


def compare(got: tuple[Tensor, ...], want: tuple[Tensor, ...], *, bits: int, seed: int | None) -> None:
    """A kernel takes inputs in one of the two ways, and nothing between them.

    Rotations differ in their last bits, which sends an input that lies between two integers to the other one: a step
    of a 40th of inputs' size in one of hundreds, or at 8 bits a 254th of that.
    """
    exact, rounded = want
    assert got[0].dtype == exact.dtype == rounded.dtype
    near = 1e-5 if bits == 8 else 2e-6 if seed is None else 1e-3
    for one, tolerance in ((exact, 2e-6), (rounded, near)):
        allowed = tolerance if exact.dtype == torch.float32 else 8e-3
        if float((got[0].float() - one.float()).norm()) <= allowed * float(one.float().norm()):
            return
    raise AssertionError("neither of inputs as they are nor of rounded ones")


CASES = [
    Case(
        name := f"{grid}-{bits} bits by {group}, {width}x{rows}, {tokens} tokens, {str(dtype)[6:]}, seed {seed}",
        partial(
            run,
            name=name,
            width=width,
            rows=rows,
            tokens=tokens,
            bits=bits,
            grid=grid,
            group=group,
            dtype=dtype,
            seed=seed,
        ),
        partial(compare, bits=bits, seed=seed),
    )
    for grid in GRIDS
    for bits in (2, 3, 4, 8)
    for number, (width, rows) in enumerate(SHAPES)
    for tokens, dtype, seed, group in (
        (1, torch.float32, None, 128),
        (3, torch.float32, None, GROUPS[number % len(GROUPS)]),
        (2, torch.bfloat16, 3, 128),
        (5, torch.float32, 7, 128),
        (9, torch.bfloat16, 0, 128),
    )
]
