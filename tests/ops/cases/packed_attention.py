"""Packed attention against the reference, with the error of rounded queries as the yardstick."""

import math
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from rotaryquant.formats.kv import BLOCK, StreamFormat
from rotaryquant.ops.packed_attention import packed_attention
from rotaryquant.ops.packed_attention import reference as attention_reference
from rotaryquant.ops.rotate import Rotation, build_rotation
from rotaryquant.ops.rotate import reference as rotate_reference
from rotaryquant.ops.streams import CacheView, PackedStream

from . import Case, GuardedStream, generator, quantize_by_reference


def key(width: int = 128, bits: int = 3, **fields: Any) -> StreamFormat:
    return StreamFormat("key", width, bits, "score", rotation="hadamard", **fields)


def value(width: int = 128, bits: int = 3, **fields: Any) -> StreamFormat:
    return StreamFormat("value", width, bits, "value", rotation="hadamard", **fields)


@dataclass(frozen=True)
class Spec:
    """A cache, queries and options.

    lens: packed positions of each row of the batch. rows: query rows. tail: exact rows after the packed ones.
    sinks: leading positions held exactly beside their codes. spare: unused dense slots. q_scale: size of queries.
    """

    lens: tuple[int, ...] = (513,)
    rows: int = 1
    kv_heads: int = 1
    group: int = 1
    keys: StreamFormat = field(default_factory=key)
    values: StreamFormat = field(default_factory=value)
    tail: int = 0
    sinks: int = 0
    spare: int = 2
    dense_dtype: torch.dtype = torch.float32
    q_scale: float = 1.0
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sink_logits: bool = False
    means: bool = False
    mask: str = ""  # "", "shared" or "per head"
    key_noise: float = 0.0


@dataclass
class Inputs:
    q: Tensor
    view: CacheView
    options: dict[str, Any]


def _fill(guarded: GuardedStream, table: Tensor, lens: tuple[int, ...], g: torch.Generator) -> PackedStream:
    """Random rows coded by the references at positions [0, len); all other slots stay poisoned."""
    from rotaryquant.ops.pack import reference as pack

    stream = guarded.stream
    codec, heads = stream.codec, stream.codes[0].shape[1]
    for b, length in enumerate(lens):
        for i in range(-(-length // BLOCK)):
            filled = min(BLOCK, length - i * BLOCK)
            codes, scales = quantize_by_reference(torch.randn(heads, filled, codec.width, generator=g), codec)
            rows = pack.run("pack", codes, codec.bits, codec.width, codec.layout)
            slab, index = divmod(int(table[b, i]), stream.blocks_per_slab)
            stream.codes[slab][index, :, :filled] = pack.run("seal", rows, codec.bits, codec.width, codec.layout)
            stream.scales[slab][index, :, :filled] = scales
    return stream


def _dense(spec: Spec, g: torch.Generator) -> dict[str, Any]:
    """Exact rows in shuffled slots, keys laid out with heads inside rows, unused slots full of NaN."""
    if not spec.tail and not spec.sinks:
        return {}
    batch, slots = len(spec.lens), spec.tail + spec.sinks + spec.spare
    keys = torch.randn(batch, slots, spec.kv_heads, spec.keys.width, generator=g).to(spec.dense_dtype).transpose(1, 2)
    values = torch.randn(batch, spec.kv_heads, slots, spec.values.width, generator=g).to(spec.dense_dtype)
    positions = torch.full((batch, slots), -1, dtype=torch.int32)
    for b, length in enumerate(spec.lens):
        held = [*range(min(spec.sinks, length)), *range(length, length + spec.tail)]
        positions[b, torch.randperm(slots, generator=g)[: len(held)]] = torch.tensor(held, dtype=torch.int32)
    unused = (positions < 0)[:, None, :, None]
    return {
        "num_sinks": spec.sinks,
        "dense_keys": keys.masked_fill(unused, math.nan),
        "dense_values": values.masked_fill(unused, math.nan),
        "dense_positions": positions,
    }


@cache
def inputs(name: str, spec: Spec) -> Inputs:
    g = generator(name)
    batch, heads, width = len(spec.lens), spec.kv_heads * spec.group, spec.keys.width
    blocks = max(spec.lens) // BLOCK + 1
    table = torch.randperm(batch * blocks, generator=g).view(batch, blocks).to(torch.int32)
    keys, values = (
        _fill(GuardedStream(stream, batch * blocks, spec.kv_heads), table, spec.lens, g)
        for stream in (spec.keys, spec.values)
    )
    lens = torch.tensor(spec.lens, dtype=torch.int32)
    rotations = [build_rotation(stream, 0, spec.kv_heads) for stream in (spec.keys, spec.values)]
    means = torch.randn(batch, spec.kv_heads, width, generator=g) if spec.means else None
    view = CacheView(keys, values, table, lens, lens + spec.tail, *rotations, means, **_dense(spec, g))
    q = torch.randn(batch, heads, spec.rows, width, generator=g) * spec.q_scale
    mask = None
    if spec.mask:
        shape = (batch, heads if spec.mask == "per head" else 1, spec.rows, int(view.seq_lens.max()) + 5)
        mask = torch.rand(shape, generator=g) < 0.6
        mask[:, :, 0] = False  # the first query row sees nothing
    options = {
        "scale": width**-0.5,
        "causal": spec.causal,
        "window": spec.window,
        "softcap": spec.softcap,
        "sink_logits": torch.randn(heads, generator=g) * 3 if spec.sink_logits else None,
        "mask": mask,
        "key_noise": spec.key_noise,
    }
    return Inputs(q, view, options)


def _rotate(x: Tensor, rotation: Rotation, *, inverse: bool = False) -> Tensor:
    """Query or output rows [num_heads, rows, width] of one batch row through their KV head's rotation, fp64."""
    grouped = x.double().reshape(1, rotation.num_kv_heads, -1, x.shape[-1])
    return (rotate_reference.run(grouped.float(), rotation, inverse).double()).view(x.shape)


def _row_logits(item: Inputs, b: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Scaled logits, values and positions of all keys of one row of the batch in fp64, and how many are packed."""
    view, heads = item.view, item.q.shape[1]
    packed_len, blocks = int(view.packed_lens[b]), view.block_table[b].tolist()
    logits, values, positions = [], [], []
    if packed_len:
        keys = attention_reference.packed_rows(view.keys, blocks, packed_len).double()
        group = heads // keys.shape[0]
        rotated = _rotate(item.q[b], view.key_rotation)
        dots = rotated @ keys.repeat_interleave(group, 0).mT
        if item.options["key_noise"]:
            dots = dots - _noise_share(item, b, rotated, dots, group)
        if view.means is not None:
            dots = dots + item.q[b].double() @ view.means[b].double().repeat_interleave(group, 0)[:, :, None]
        logits.append(dots)
        packed_values = attention_reference.packed_rows(view.values, blocks, packed_len).double()
        values.append(packed_values.repeat_interleave(group, 0))
        at = torch.arange(packed_len)
        positions.append(torch.where(at < view.num_sinks, -1, at))
    if view.dense_keys is not None:
        used = view.dense_positions[b] >= 0
        group = heads // view.dense_keys.shape[1]
        dense_keys = view.dense_keys[b][:, used].double().repeat_interleave(group, 0)
        logits.append(item.q[b].double() @ dense_keys.mT)
        values.append(view.dense_values[b][:, used].double().repeat_interleave(group, 0))
        positions.append(view.dense_positions[b][used].long())
    return torch.cat(logits, -1) * item.options["scale"], torch.cat(values, 1), torch.cat(positions), packed_len


def _noise_share(item: Inputs, b: int, rotated: Tensor, dots: Tensor, group: int) -> Tensor:
    """What the correction for code noise takes off q·k, fp64, from the op's definition."""
    stream, packed_len = item.view.keys, int(item.view.packed_lens[b])
    at = [
        (int(block) // stream.blocks_per_slab, int(block) % stream.blocks_per_slab)
        for block in item.view.block_table[b]
    ]
    scales = torch.cat([stream.scales[slab][index][:, :, 0] for slab, index in at], 1)[:, :packed_len].double()
    sizes = (stream.codec.width * (scales / stream.codec.unit) ** 2).repeat_interleave(group, 0)[:, None, :]
    energy = rotated.square().sum(-1, keepdim=True)
    variance = (energy * sizes - dots**2).clamp_min(0) * item.options["key_noise"] / stream.codec.width
    return item.options["scale"] * variance / 2


@cache
def exact(name: str, spec: Spec) -> tuple[Tensor, Tensor]:
    """The output in fp64, and which query rows see nothing."""
    item = inputs(name, spec)
    options, view = item.options, item.view
    batch, heads, rows, _ = item.q.shape
    out = torch.zeros(batch, heads, rows, spec.values.width, dtype=torch.float64)
    blind = torch.ones(batch, heads, rows, dtype=torch.bool)
    for b in range(batch):
        if int(view.seq_lens[b]) == 0:
            continue
        scores, values, keys_at, packed_len = _row_logits(item, b)
        if options["softcap"]:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        queries_at = torch.arange(rows) + int(view.seq_lens[b]) - rows
        gap = queries_at[:, None] - keys_at
        seen = (keys_at >= 0) & (queries_at >= 0)[:, None]
        if options["causal"]:
            seen = seen & (gap >= 0)
        if options["window"]:
            seen = seen & (gap < options["window"])
        seen = seen.expand(heads, -1, -1)
        if options["mask"] is not None:
            seen = seen & options["mask"][b][..., keys_at.clamp_min(0)]
        scores = scores.masked_fill(~seen, -math.inf)
        if options["sink_logits"] is not None:
            sink = options["sink_logits"].double()[:, None, None].expand(-1, rows, 1)
            weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1).nan_to_num(0.0)
        blind[b] = ~seen.any(-1)
        out[b] = _rotate(weights[..., :packed_len] @ values[:, :packed_len], view.value_rotation, inverse=True)
        out[b] += weights[..., packed_len:] @ values[:, packed_len:]
    return out, blind


def run(kernel: str, *, name: str, spec: Spec) -> Tensor:
    item = inputs(name, spec)
    return packed_attention(item.q, item.view, kernel=kernel, **item.options)


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def compare(got: Tensor, want: Tensor, *, name: str, spec: Spec) -> None:
    """Within twice the error of the reference with int8 queries, which kernels round so; the same on average.

    The floor is what rounding probabilities may add: 7 bits where that cannot matter, else 14. A query at 8-bit keys
    keeps 15 bits, which the floor covers too.
    """
    truth, blind = exact(name, spec)
    if spec.keys.bits != 8:
        item = inputs(name, spec)
        want = packed_attention(item.q, item.view, kernel="reference", q_dtype=torch.int8, **item.options)
    assert got.dtype == torch.float32
    assert got.shape == truth.shape
    assert not got[blind].any(), "a query that sees nothing must give exact zeros"
    size = max(float(truth.abs().max()), 1e-3)
    error, allowed = (x - truth for x in (got, want))
    assert float(error.abs().max()) <= 2 * float(allowed.abs().max()) + 2e-3 * size
    assert rms(error) <= 1.2 * rms(allowed) + 2e-4 * size


LENGTHS = (1, 2, 63, 127, 128, 129, 255, 256, 511)

SPECS = {
    # lengths around a block, one query and a few
    **{f"length {n}": Spec((n,), rows=min(n, 3), kv_heads=2, group=2) for n in LENGTHS},
    "unequal lengths": Spec((513, 1, 130), kv_heads=2, group=4),
    "a row without keys": Spec((0, 140), kv_heads=2, group=2),
    # grouped queries: both layouts of the kernels and every rest of their register blocks
    **{f"group {n}": Spec((257,), kv_heads=2, group=n) for n in (1, 2, 3, 5, 6, 7, 8, 12)},
    "group 5, 3 rows": Spec((257,), rows=3, kv_heads=2, group=5),
    "tile of 64": Spec((300,), rows=16, group=4),
    "several tiles": Spec((300,), rows=50, kv_heads=2, group=3),
    # bits and widths
    **{f"{b} bits": Spec((257,), kv_heads=2, group=2, keys=key(128, b), values=value(128, b)) for b in (2, 4, 8)},
    **{f"width {d}": Spec((257,), group=3, keys=key(d), values=value(d)) for d in (32, 64, 80, 96, 112, 192, 256, 512)},
    **{f"width {d}, 4 bits": Spec((257,), group=3, keys=key(d, 4), values=value(d, 2)) for d in (64, 80, 112, 192)},
    "width 24 at 8 bits": Spec(
        (257,),
        keys=StreamFormat("key", 24, 8, "score", rotation="so4"),
        values=StreamFormat("value", 24, 8, "value", rotation="so4"),
    ),
    **{
        f"trellis of {d}, group {n}": Spec(
            (513, 100), rows=2, kv_heads=2, group=n, keys=key(d, quantizer="trellis"),
            values=value(d, quantizer="trellis"), tail=9, sinks=4, key_noise=0.02,
        )
        for d, n in ((64, 3), (80, 2), (128, 1), (128, 8), (256, 5))
    },
    **{
        f"trellis, keys at {k} bits, values at {v}": Spec(
            (257,), rows=rows, group=4, keys=key(64, k, quantizer="trellis"), values=value(80, v, quantizer="trellis"),
        )
        for k, v, rows in ((2, 4, 1), (4, 2, 2), (2, 2, 16), (4, 4, 16))
    },
    "trellis, wide": Spec((300,), rows=16, group=4, keys=key(64, quantizer="trellis"), values=value()),
    "trellis of values": Spec((257,), rows=2, group=3, keys=key(64, 4), values=value(64, quantizer="trellis")),
    "trellis, groups of 64": Spec(
        (257,), group=3, keys=key(scale_group=64, quantizer="trellis"),
        values=value(scale_group=64, quantizer="trellis"),
    ),
    "wide layout, width 80": Spec((257,), rows=10, group=4, keys=key(80), values=value(96)),
    "k 4 bits of 192, v 2 bits of 128": Spec((257,), group=3, keys=key(192, 4), values=value(128, 2)),
    "k 8 bits of 64, v 3 bits of 512": Spec((257,), group=2, keys=key(64, 8), values=value(512, 3)),
    # scales
    "fp16 scales": Spec((257,), group=3, keys=key(scale_dtype="fp16"), values=value(scale_dtype="fp16")),
    "groups of 64": Spec((257,), group=3, keys=key(scale_group=64), values=value(scale_group=64, scale_dtype="fp16")),
    "groups of 64, wide": Spec((257,), rows=9, group=3, keys=key(256, 4, scale_group=64), values=value()),
    # what a query may see
    "not causal": Spec((257,), rows=7, group=2, causal=False),
    "causal chunk": Spec((260,), rows=140, group=2),
    "window": Spec((513,), rows=5, group=2, window=130),
    "window of 1": Spec((257,), rows=3, group=2, window=1),
    "window, not causal": Spec((300,), rows=20, group=2, window=20, causal=False),
    "mask": Spec((257, 140), rows=6, kv_heads=2, group=2, mask="shared"),
    "mask per head, narrow": Spec((257,), rows=2, kv_heads=2, group=2, mask="per head"),
    "mask per head, wide": Spec((257, 140), rows=9, kv_heads=2, group=3, mask="per head"),
    "pads": Spec((5, 140), rows=9, group=2),
    "pads, narrow": Spec((1, 140), rows=3, group=2),
    # exact rows
    "tail": Spec((256,), rows=3, kv_heads=2, group=2, tail=17),
    "long tail": Spec((128, 0), rows=3, kv_heads=2, group=2, tail=200),
    "tail of a prompt": Spec((128,), rows=40, kv_heads=2, group=2, tail=150, dense_dtype=torch.bfloat16),
    "sinks": Spec((256, 140), rows=2, kv_heads=2, group=3, sinks=4, dense_dtype=torch.float16),
    "sinks and tail": Spec((256, 513), rows=5, group=4, sinks=4, tail=100, dense_dtype=torch.bfloat16),
    "sinks outside the window": Spec((256,), rows=5, group=2, sinks=4, tail=10, window=100),
    "tail, mask": Spec((256,), rows=5, group=4, tail=31, sinks=4, mask="per head"),
    "tail, width 80": Spec((130,), rows=2, group=2, tail=5, keys=key(80), values=value(112)),
    # logits
    "soft cap": Spec((257,), rows=3, group=2, softcap=50.0, means=True),
    "soft cap, saturated": Spec((257,), rows=3, group=2, softcap=50.0, q_scale=2000.0),
    "soft cap, wide": Spec((257,), rows=9, group=2, softcap=5.0, q_scale=10.0, tail=3),
    "sink logits": Spec((257,), rows=3, kv_heads=2, group=2, sink_logits=True),
    "sink logits, blind rows": Spec((257,), rows=3, kv_heads=2, group=2, sink_logits=True, mask="shared"),
    "means": Spec((257,), rows=3, kv_heads=2, group=2, means=True, tail=9),
    "means, wide": Spec((257,), rows=9, kv_heads=2, group=2, means=True, sinks=4),
    "noisy keys": Spec((257, 100), rows=3, kv_heads=2, group=2, key_noise=0.03, tail=9, sinks=4),
    "noisy keys, wide": Spec((257,), rows=9, kv_heads=2, group=2, key_noise=0.03, means=True, softcap=20.0),
    "noisy keys, 2 bits": Spec((130,), group=3, keys=key(64, 2), values=value(64, 2), key_noise=0.12, q_scale=3.0),
    "large logits": Spec((257,), rows=2, group=2, q_scale=20.0),
    "everything": Spec(
        (513, 129),
        rows=9,
        kv_heads=2,
        group=3,
        keys=key(192, 4, scale_group=64),
        values=value(128, 3, scale_dtype="fp16"),
        tail=33,
        sinks=4,
        dense_dtype=torch.bfloat16,
        window=300,
        softcap=30.0,
        sink_logits=True,
        means=True,
        mask="per head",
    ),
}  # fmt: skip

CASES = [
    Case(name, partial(run, name=name, spec=spec), partial(compare, name=name, spec=spec))
    for name, spec in SPECS.items()
]
