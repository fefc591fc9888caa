"""Rotations of every kind and width, from rows of every dtype and layout."""

from functools import partial

import torch
from torch import Tensor

from rotaryquant.formats.kv import StreamFormat
from rotaryquant.formats.rotation import KINDS
from rotaryquant.ops.rotate import build_rotation, rotate

from . import Case, generator

WIDTHS = (8, 24, 32, 64, 80, 96, 112, 128, 192, 256, 512)
NO_HADAMARD = (24,)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "heads inside rows", "part of a wider row")


def rows(name: str, width: int, dtype: torch.dtype, layout: str) -> Tensor:
    """[2, 3, 11, width] with the layouts that models hand over: 11 rows are a tile of 8 and a rest."""
    g = generator(name)
    if layout == "heads inside rows":
        return torch.randn(2, 11, 3, width, generator=g).to(dtype).transpose(1, 2)
    if layout == "part of a wider row":
        return torch.randn(2, 3, 11, width + 8, generator=g).to(dtype)[..., 3 : 3 + width]
    return torch.randn(2, 3, 11, width, generator=g).to(dtype)


def run(kernel: str, *, name: str, stream: StreamFormat, dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    x = rows(name, stream.width, dtype, layout)
    rotation = build_rotation(stream, layer=1, num_kv_heads=3)
    return rotate(x, rotation, kernel=kernel), rotate(x, rotation, inverse=True, kernel=kernel)


def compare(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for ours, reference in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        assert ours.is_contiguous()
        assert ours.shape == reference.shape
        assert float((ours - reference).norm() / reference.norm()) < 1e-6


def _cases() -> list[Case]:
    cases = []
    for width in WIDTHS:
        for kind in KINDS:
            if (width in NO_HADAMARD and KINDS[kind][0]) or (width > 192 and kind == "dense"):
                continue  # no such matrix; nothing new, and slow to draw
            signs = (len(cases) % 3) != 2
            dtype, layout = DTYPES[len(cases) % 3], LAYOUTS[(len(cases) // 3) % 3]
            name = f"{kind}-{width}-{'signs' if signs else 'no signs'}-{str(dtype)[6:]}-{layout}"
            stream = StreamFormat("key", width, 3, "score", rotation=kind, signs=signs)
            cases.append(Case(name, partial(run, name=name, stream=stream, dtype=dtype, layout=layout), compare))
    return cases


CASES = _cases()
