"""Bytes of codes, canonical and sealed."""

from functools import partial

import torch
from torch import Tensor

from rotaryquant.ops.pack import pack, seal, unpack, unseal

from . import Case, generator

WIDTHS = (8, 24, 32, 64, 80, 96, 112, 128, 192, 256, 320, 512, 576)


def run(kernel: str, *, name: str, width: int, bits: int, layout: str) -> list[Tensor]:
    """Every step on [2, 3, 69, width] codes, all of which occur: two strips and some open rows."""
    codes = torch.randint(0, 2**bits, (2, 3, 69, width), generator=generator(name), dtype=torch.uint8)
    rows = pack(codes, bits, kernel=kernel)
    sealed = seal(rows, bits, width, layout, kernel=kernel)
    return [
        codes,
        rows,
        sealed,
        unseal(sealed, bits, width, layout, kernel=kernel),
        unpack(rows, bits, width, kernel=kernel),
        unpack(sealed, bits, width, sealed=layout, kernel=kernel),
        unpack(rows[:, ::2], bits, width, kernel=kernel),
        unpack(rows[0, 0, 0], bits, width, kernel=kernel),
    ]


def compare(got: list[Tensor], want: list[Tensor]) -> None:
    for ours, reference in zip(got, want, strict=True):
        assert torch.equal(ours, reference)
    codes, rows, sealed, unsealed, unpacked, unpacked_sealed, *_ = got
    assert torch.equal(sealed[..., 64:, :], rows[..., 64:, :])
    assert torch.equal(unsealed, rows)
    assert torch.equal(unpacked, codes)
    assert torch.equal(unpacked_sealed, codes)


CASES = [
    Case(
        f"{layout}-{width}-{bits} bits",
        partial(run, name=f"{width}-{bits}", width=width, bits=bits, layout=layout),
        compare,
    )
    for layout in ("key", "value")
    for width in WIDTHS
    for bits in (2, 3, 4, 8)
]
