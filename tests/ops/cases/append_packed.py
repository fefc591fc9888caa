"""The fused write: every route to the same bytes, and nothing written beside them."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rotaryquant.formats.codebook import CYCLE, FINE
from rotaryquant.formats.kv import BLOCK, StreamFormat
from rotaryquant.ops.append_packed import append_packed
from rotaryquant.ops.pack import reference as pack_reference
from rotaryquant.ops.quantize import reference as quantize_reference
from rotaryquant.ops.rotate import build_rotation, rotate
from rotaryquant.ops.streams import Codec

from . import Case, GuardedStream, assert_codes_equal, assert_scales_equal, generator

HEADS = 2


@dataclass(frozen=True)
class Spec:
    """steps: for each call, the number of rows that each row of the batch appends."""

    stream: StreamFormat
    steps: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    mean: bool = False
    feedback: bool = False

    @property
    def totals(self) -> list[int]:
        return [sum(counts) for counts in zip(*self.steps, strict=True)]


@dataclass
class Outcome:
    results: list[int]
    codes: Tensor  # canonical [batch, heads, positions, width], 255 where nothing was written
    scales: Tensor
    sealed: list[list[bool]]
    untouched: bool


def inputs(name: str, spec: Spec) -> tuple[Tensor, Tensor | None]:
    g, batch = generator(name), len(spec.totals)
    x = torch.randn(batch, max(spec.totals) + 3, HEADS, spec.stream.width, generator=g)
    mean = torch.randn(batch, HEADS, spec.stream.width, generator=g) if spec.mean else None
    return (x + 1.0).to(spec.dtype).transpose(1, 2), mean


def codec_of(name: str, spec: Spec) -> Codec:
    """The stream's codec, with factors of feedback as large as those of real metrics where the case wants them."""
    factors = None
    if spec.feedback:
        width = spec.stream.width
        later = torch.arange(width)[:, None] // CYCLE < torch.arange(width) // CYCLE
        factors = torch.randn(HEADS, width, width, generator=generator(name)) * 0.5 / width**0.5 * later
    return Codec.from_format(spec.stream, feedback=factors)


def assert_codes_follow_errors(codes: Tensor, y: Tensor, codec: Codec) -> None:
    """Each block's codes are those of what they were chosen for: its columns and what the errors before it, which the
    codes themselves tell, add to them. Sums in another order may move what lies on a boundary.
    """
    assert codec.feedback is not None
    rms = y.double().square().mean(-1, keepdim=True).sqrt()
    t = torch.where(rms > 0, y.double() / rms, 0.0)
    error = t - quantize_reference.dequantize(codes, torch.ones(*codes.shape[:-1], 1), codec).double() * codec.unit
    wanted = t + error @ codec.feedback.double()
    best = quantize_reference._codes(wanted.float(), codec).int()
    different = (codes.int() != best) & (rms > 0)
    if codec.trellis:
        fraction = (wanted / (codec.unit / FINE) + 0.5) % 1.0
        near = torch.minimum(fraction, 1 - fraction).unflatten(-1, (-1, CYCLE)).amin(-1) < 1e-3
        near = near.repeat_interleave(CYCLE, -1)
    else:
        near = (wanted[..., None] - codec.boundaries.double()).abs().amin(-1) < 1e-5
    assert bool(near[different].all()), "codes differ away from any boundary"
    assert int(different.sum()) <= max(1, different.numel() // 1000), "too many codes differ at boundaries"


def scales_of(codes: Tensor, y: Tensor, codec: Codec) -> Tensor:
    """Scales |y|² / <y, levels> of rows with these codes."""
    assert codec.scale_rule == "score"
    levels = quantize_reference.dequantize(codes, torch.ones(*codes.shape[:-1], 1), codec)
    return (y.square().sum(-1, keepdim=True) / (y * levels).sum(-1, keepdim=True)).to(codec.scale_dtype)


def read_back(guarded: GuardedStream, table: Tensor, totals: list[int]) -> Outcome:
    """Codes and scales of all written positions, and whether every other byte is as it was."""
    stream = guarded.stream
    codec, blocks = stream.codec, table.shape[1]
    codes = torch.full((len(totals), HEADS, blocks * BLOCK, codec.width), 255, dtype=torch.int32)
    scales = torch.zeros(len(totals), HEADS, blocks * BLOCK, codec.groups, dtype=codec.scale_dtype)
    untouched = guarded.guards_intact()
    written = torch.zeros(len(stream.codes) * stream.blocks_per_slab, dtype=torch.long)
    for b, total in enumerate(totals):
        for i in range(blocks):
            filled = max(0, min(BLOCK, total - i * BLOCK))
            written[table[b, i]] = filled
            slab, index = divmod(int(table[b, i]), stream.blocks_per_slab)
            raw = stream.codes[slab][index, :, :filled]
            at = slice(i * BLOCK, i * BLOCK + filled)
            codes[b, :, at] = pack_reference.run("unpack_sealed", raw, codec.bits, codec.width, codec.layout).int()
            scales[b, :, at] = stream.scales[slab][index, :, :filled]
    for block, filled in enumerate(written.tolist()):
        slab, index = divmod(block, stream.blocks_per_slab)
        untouched &= bool((stream.codes[slab][index, :, filled:] == 0xFF).all())
        untouched &= bool(stream.scales[slab][index, :, filled:].isnan().all())
    return Outcome([], codes, scales, [], untouched)


def run(kernel: str, *, name: str, spec: Spec) -> Outcome:
    x, mean = inputs(name, spec)
    batch, blocks = len(spec.totals), max(spec.totals) // BLOCK + 1
    guarded = GuardedStream(spec.stream, batch * blocks + 1, HEADS, codec=codec_of(name, spec))
    table = torch.randperm(batch * blocks, generator=generator(name))
    table = table.view(batch, blocks).to(torch.int32)
    rotation = build_rotation(spec.stream, 2, HEADS)
    done, results = torch.zeros(batch, dtype=torch.int32), []
    for counts in spec.steps:
        count = torch.tensor(counts, dtype=torch.int32)
        results.append(append_packed(x, rotation, guarded.stream, table, done + 3, count, done, mean, kernel=kernel))
        done += count
    outcome = read_back(guarded, table, spec.totals)
    outcome.results = results
    return outcome


def compare(got: Outcome, want: Outcome, *, name: str, spec: Spec) -> None:
    codec = codec_of(name, spec)
    assert got.results == want.results == [-1] * len(spec.steps)
    assert got.untouched
    x, mean = inputs(name, spec)
    x = x.float() if mean is None else x.float() - mean[:, :, None]
    y = rotate(x, build_rotation(spec.stream, 2, HEADS), kernel="reference")
    for b, total in enumerate(spec.totals):
        rows = y[b, :, 3 : 3 + total]
        if spec.feedback:  # a code that differs changes all that follow, and the scale
            assert_codes_follow_errors(got.codes[b, :, :total], rows, codec)
            assert_scales_equal(got.scales[b, :, :total], scales_of(got.codes[b, :, :total], rows, codec))
            continue
        assert_codes_equal(got.codes[b, :, :total], want.codes[b, :, :total], rows, codec)
        assert_scales_equal(got.scales[b, :, :total], want.scales[b, :, :total])


def _key(width: int, bits: int, rotation: str = "isoquant", **fields: object) -> StreamFormat:
    return StreamFormat("key", width, bits, "score", rotation=rotation, **fields)  # type: ignore[arg-type]


SPECS = {
    "bulk": Spec(_key(128, 3), ((513,),)),
    "one by one across a seal": Spec(_key(128, 3), ((126,), (1,), (1,), (1,))),
    "chunks of odd size": Spec(_key(128, 3), ((63, 1), (64, 2), (1, 127), (129, 254))),
    "unequal rows, one empty": Spec(_key(64, 3), ((255, 0, 2),)),
    "exactly full": Spec(_key(128, 4), ((128, 256),)),
    "bf16 with mean": Spec(_key(128, 3), ((130, 127),), torch.bfloat16, mean=True),
    "fp16 rows and scales": Spec(_key(128, 3, scale_dtype="fp16"), ((129,),), torch.float16),
    "groups of 64": Spec(_key(128, 3, scale_group=64, scale_dtype="fp16"), ((131,),)),
    "groups of 64 at 512": Spec(_key(512, 2, scale_group=64), ((129,),)),
    "8 bits": Spec(_key(128, 8), ((129,),)),
    "2 bits": Spec(_key(256, 2), ((129,),)),
    "width 80": Spec(_key(80, 3), ((129,),), torch.bfloat16),
    "trellis": Spec(_key(128, 3, quantizer="trellis"), ((63, 1), (64, 2), (1, 127), (129, 254)), mean=True),
    "trellis, 2 bits": Spec(_key(64, 2, quantizer="trellis"), ((63, 1), (66, 128))),
    "trellis, nothing new": Spec(_key(64, 3, quantizer="trellis"), ((0, 0), (0, 33), (0, 0))),
    "trellis, 4 bits": Spec(_key(80, 4, quantizer="trellis"), ((63, 1), (66, 128))),
    "trellis of 64 in bf16": Spec(_key(64, 3, quantizer="trellis"), ((130, 127),), torch.bfloat16),
    "feedback": Spec(_key(128, 3), ((63, 1), (64, 2), (1, 127), (129, 254)), mean=True, feedback=True),
    "feedback, 2 bits of 64 in bf16": Spec(_key(64, 2), ((130, 127),), torch.bfloat16, feedback=True),
    "feedback, width 80": Spec(_key(80, 4), ((129,),), feedback=True),
    "feedback, width 72": Spec(_key(72, 3, "dense"), ((129,),), feedback=True),
    "feedback, trellis": Spec(_key(128, 3, quantizer="trellis"), ((63, 1), (66, 128)), feedback=True),
    "feedback, trellis of 2 bits": Spec(_key(64, 2, quantizer="trellis"), ((129,),), feedback=True),
    "feedback, trellis of 4 bits": Spec(_key(80, 4, quantizer="trellis"), ((129,),), feedback=True),
    "width 96, 4 bits": Spec(_key(96, 4), ((128,),)),
    "width 112": Spec(_key(112, 3), ((129,),)),
    "width 192": Spec(_key(192, 3), ((129,),)),
    "width 32, dense": Spec(_key(32, 2, "dense"), ((140,),), mean=True),
    "width 512, no rotation": Spec(_key(512, 3, "none"), ((130,),)),
    "values": Spec(StreamFormat("value", 128, 3, "value", rotation="hadamard", signs=False), ((129, 3),)),
    "norm scales": Spec(StreamFormat("value", 64, 4, "norm", rotation="so4"), ((129, 3),)),
}

CASES = [
    Case(name, partial(run, name=name, spec=spec), partial(compare, name=name, spec=spec))
    for name, spec in SPECS.items()
]
