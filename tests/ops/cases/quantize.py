"""Quantization at every bit count, scale rule, scale group and scale type."""

import dataclasses
from functools import partial

import torch
from torch import Tensor

from rotaryquant.formats.codebook import CYCLE, TRELLISES
from rotaryquant.formats.kv import StreamFormat
from rotaryquant.ops.quantize import quantize
from rotaryquant.ops.streams import Codec

from . import Case, assert_codes_equal, assert_scales_equal, boundaries_of, generator

WIDTHS = (8, 32, 64, 80, 96, 112, 128, 192, 256, 512)


def rows(name: str, codec: Codec) -> Tensor:
    """[1, n, width]: random rows, rows just beside every boundary, a zero row, an outlier, extreme sizes."""
    random = torch.randn(40, codec.width, generator=generator(name))
    outlier = random[0] * 0.01
    outlier[-1] = 90.0
    special = torch.stack([torch.zeros(codec.width), -torch.zeros(codec.width), outlier, torch.ones(codec.width)])
    sized = [random, special, boundaries_of(codec), random[:2] * 1e-3, random[:2] * 1e3]
    if codec.scale_dtype == torch.bfloat16:  # fp16 scales cannot hold these
        sized += [random[:2] * 1e36, random[:2] * 1e-30, random[:2] * 1e-37, random[:2] * 3e-40]
    return torch.cat(sized)[None]


def run(kernel: str, *, name: str, stream: StreamFormat) -> tuple[Tensor, Tensor]:
    codec = Codec.from_format(stream)
    return quantize(rows(name, codec), codec, kernel=kernel)


def compare(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], *, name: str, stream: StreamFormat) -> None:
    codec = Codec.from_format(stream)
    y = rows(name, codec)
    normal = y.abs().amax(-1) > 1e-36  # subnormal rows have too few bits for the rule
    assert got[0].shape == want[0].shape
    assert got[1].shape == want[1].shape
    assert_codes_equal(got[0][normal], want[0][normal], y[normal], codec)
    assert_scales_equal(got[1][normal], want[1][normal])
    zero = y.abs().amax(-1) == 0
    assert torch.equal(got[0][zero], want[0][zero])
    assert not got[1][zero].any()
    assert bool(torch.isfinite(got[1].float()).all())


def _case(name: str, stream: StreamFormat) -> Case:
    return Case(name, partial(run, name=name, stream=stream), partial(compare, name=name, stream=stream))


def _cases() -> list[Case]:
    cases = []
    for width in WIDTHS:
        for bits in (2, 3, 4, 8):
            rule = ("score", "value", "norm")[len(cases) % 3]
            group = 64 if width % 64 == 0 and width > 64 and len(cases) % 2 else width
            dtype = ("bf16", "fp16")[len(cases) // 2 % 2]
            name = f"{width}-{bits} bits-{rule}-group {group}-{dtype}"
            stream = StreamFormat("key", width, bits, rule, scale_group=group, scale_dtype=dtype)
            cases.append(_case(name, stream))
            if bits in TRELLISES and group % CYCLE == 0:
                name += "-trellis"
                cases.append(_case(name, dataclasses.replace(stream, quantizer="trellis")))
    return cases


CASES = _cases()
