"""The attention reference against plain softmax attention on the decoded keys and values."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rotaryquant import KVCacheConfig
from rotaryquant.attention import AttentionOptions, attend
from rotaryquant.counters import Counters
from rotaryquant.formats.codebook import relative_error as relative_error_of_codes
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.ops.packed_attention import packed_attention
from rotaryquant.ops.packed_attention import reference as op_reference
from rotaryquant.ops.rotate import rotate
from rotaryquant.ops.streams import block_rows
from support.drive import feed, seen_rows
from support.kernels import force_kernel
from support.models import relative_error

WIDTH, KV_HEADS, HEADS = 64, 2, 6


def strong_mean_keys(batch: int, columns: int, width: int = WIDTH) -> Tensor:
    """Keys whose common part carries most of their energy."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(batch, KV_HEADS, columns, width, generator=generator)
    return keys + 2.0 * torch.randn(1, KV_HEADS, 1, width, generator=generator)


#: Relative error where queries of ordinary size are rounded to int8, which only the reference does not do.
ROUNDED = 1.5e-2


def limit(kernel: str) -> float:
    """Relative error that a kernel may make."""
    return 1e-3 if kernel == "reference" else ROUNDED


def filled(config: KVCacheConfig, columns: int, *, batch: int = 2, pads: list[int] | None = None) -> PackedLayer:
    layer = PackedLayer(config, 1)
    keys = strong_mean_keys(batch, columns)
    values = torch.randn(batch, KV_HEADS, columns, WIDTH, generator=torch.Generator().manual_seed(4))
    feed(layer, keys, values, [columns], prompt=1, pads=pads)
    return layer


def plain_attention(
    queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, mask: Tensor | None = None
) -> Tensor:
    """Softmax attention of the newest queries, one number at a time in fp64: [num_heads, rows, width]."""
    heads, rows, _ = queries.shape
    total = keys.shape[1]
    out = torch.zeros(heads, rows, values.shape[-1], dtype=torch.float64)
    for head in range(heads):
        kv = head * keys.shape[0] // heads
        logits = queries[head].double() @ keys[kv].double().T * options.scale
        if options.softcap > 0:
            logits = options.softcap * torch.tanh(logits / options.softcap)
        for row in range(rows):
            position = total - rows + row
            visible = [
                j
                for j in range(total)
                if (j <= position if mask is None else bool(mask[min(head, mask.shape[0] - 1), row, j]))
                and (options.window == 0 or position - j < options.window)
            ]
            if not visible or position < 0:
                continue
            chosen = logits[row, visible]
            extra = [] if options.sink_logits is None else [options.sink_logits[head].double()]
            weights = torch.softmax(torch.cat([chosen, *(e[None] for e in extra)]), 0)[: len(visible)]
            out[head, row] = weights @ values[kv, visible].double()
    return out


CONFIGS: dict[str, dict[str, Any]] = {
    "mean tail sinks": {},
    "mean tail": {"sinks": 0},
    "mean sinks": {"tail": 0},
    "mean": {"sinks": 0, "tail": 0},
    "tail sinks": {"mean": False},
    "nothing": {"sinks": 0, "tail": 0, "mean": False},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "learned sinks": {"sink_logits": torch.tensor([4.0, -2.0, 0.0, 4.0, 1.0, 30.0])},
    "soft cap": {"softcap": 2.0},
    "window": {"window": 37},
    "all": {"sink_logits": torch.full((HEADS,), 4.0), "softcap": 3.0, "window": 150},
}


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("config", CONFIGS)
def test_attention_is_softmax_over_what_is_stored(
    config: str, options: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean is a scalar per query and head, added before any cap: exact only if it reaches every packed score."""
    force_kernel(monkeypatch, kernel)
    layer = filled(KVCacheConfig(protect=False, correct=0.0, **CONFIGS[config]), 212, pads=[0, 31])
    asked = AttentionOptions(WIDTH**-0.5, **OPTIONS[options])
    generator = torch.Generator().manual_seed(5)
    new_keys, new_values = strong_mean_keys(2, 3), torch.randn(2, KV_HEADS, 3, WIDTH, generator=generator)
    queries = torch.randn(2, HEADS, 3, WIDTH, generator=generator)
    layer.update(new_keys, new_values)
    got = attend(layer, queries, asked, Counters())
    # with a tail: a sealed and an open block, and a sealed one alone
    assert [row.packed_len for row in layer.rows] == ([160, 128] if layer.config.tail else [215, 184])
    if CONFIGS[config].get("mean", True):
        assert layer.means is not None
        assert bool((layer.means != 0).any(-1).all())
    for row in range(2):
        keys, values = seen_rows(layer, row)
        assert relative_error(got[row], plain_attention(queries[row], keys, values, asked)) < limit(kernel)


@pytest.mark.parametrize("kernel", ["reference", "auto"])
def test_boolean_mask_replaces_the_causal_rule(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_kernel(monkeypatch, kernel)
    layer = filled(KVCacheConfig(protect=False, correct=0.0), 212, batch=1)
    generator = torch.Generator().manual_seed(6)
    layer.update(torch.randn(1, KV_HEADS, 5, WIDTH), torch.randn(1, KV_HEADS, 5, WIDTH))
    queries = torch.randn(1, HEADS, 5, WIDTH, generator=generator)
    mask = torch.rand(1, HEADS, 5, 217, generator=generator) < 0.5
    mask[:, 0, 2] = False  # a query that may see nothing
    asked = AttentionOptions(0.2)
    got = attend(layer, queries, asked, Counters(), mask=mask)
    keys, values = seen_rows(layer, 0)
    assert relative_error(got[0], plain_attention(queries[0], keys, values, asked, mask[0])) < limit(kernel)
    assert (got[0, 0, 2] == 0).all()


@pytest.mark.parametrize("logit", [3000.0, 4450.0, 10000.0, -3000.0, -4450.0, -10000.0])
@pytest.mark.parametrize("tail", [48, 0])
def test_soft_cap_saturates_at_huge_logits(logit: float, tail: int) -> None:
    """Two keys whose logits are ±logit: capped to ±50, so the larger one takes all, and nothing is NaN."""
    layer = PackedLayer(KVCacheConfig(key_bits=32, value_bits=32, sinks=0, mean=False, tail=tail, protect=False), 0)
    keys = torch.zeros(1, 1, 2, 8)
    keys[..., 0, 0], keys[..., 1, 0] = logit, -logit
    values = torch.eye(8)[None, None, :2]
    feed(layer, keys, values, [2], prompt=1, queries=torch.zeros(1, 1, 2, 8))
    layer.update(torch.zeros(1, 1, 1, 8), torch.full((1, 1, 1, 8), 0.5))
    query = torch.zeros(1, 1, 1, 8)
    query[..., 0] = 1.0
    out = attend(layer, query, AttentionOptions(1.0, softcap=50.0), Counters())
    # capped logits 50, -50 and 0: the winner's share differs from 1 by exp(-50)
    winner = 0 if logit > 0 else 1
    assert torch.isfinite(out).all()
    assert out[0, 0, 0, winner] == pytest.approx(1.0, abs=1e-6)
    assert out[0, 0, 0, 1 - winner] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("heads", [(6, 1), (12, 2), (5, 1), (7, 1)])
def test_head_ratios_map_each_query_to_its_own_values(heads: tuple[int, int]) -> None:
    """Each KV head's values are its own pattern of ±(index + 1), so a wrong mapping shows."""
    num_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, kv_heads, 33, 64, generator=generator)
    pattern = torch.sign(torch.randn(kv_heads, 1, 64, generator=generator))
    values = (pattern * torch.arange(1, kv_heads + 1).view(-1, 1, 1)).expand(kv_heads, 33, 64)[None]
    layer = PackedLayer(KVCacheConfig(sinks=0, tail=0, mean=False, protect=False), 0)
    feed(layer, keys, values, [33], prompt=1)
    layer.update(keys[:, :, :1], values[:, :, :1])
    queries = torch.randn(1, num_heads, 1, 64, generator=generator)
    out = attend(layer, queries, AttentionOptions(0.125), Counters())
    for head in range(num_heads):
        kv = head * kv_heads // num_heads
        decoded = layer.decode_values(0)[kv, 0]  # all rows of a head are equal, so any weighting gives this
        assert relative_error(out[0, head, 0], decoded) < 2e-3  # probabilities have 7 bits
        assert torch.nn.functional.cosine_similarity(out[0, head, 0], values[0, kv, 0], 0) > 0.97


def _rounded(layer: PackedLayer, queries: Tensor) -> Tensor:
    """Queries [1, num_heads, rows, width] as int8 rounds them in the rotated space."""
    assert layer.keys is not None
    grouped = rotate(queries.view(1, KV_HEADS, -1, WIDTH), layer.keys.rotation)
    return rotate(op_reference._round(grouped, torch.int8), layer.keys.rotation, inverse=True).view_as(queries)


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("config", CONFIGS)
def test_correction_takes_half_the_noise_variance_off_packed_logits(
    config: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the definition: v = scale²·(|q|²·|k̂|² - (q·k̂)²)·error/width, on packed rows alone, before the softmax."""
    force_kernel(monkeypatch, kernel)
    layer = filled(KVCacheConfig(protect=False, correct=0.7, **CONFIGS[config]), 212, batch=1)
    assert layer.keys is not None
    generator = torch.Generator().manual_seed(5)
    layer.update(strong_mean_keys(1, 1), torch.randn(1, KV_HEADS, 1, WIDTH, generator=generator))
    queries, scale = 3 * torch.randn(1, HEADS, 1, WIDTH, generator=generator), 0.25
    got = attend(layer, queries, AttentionOptions(scale), Counters())
    keys, values = (rows.double() for rows in seen_rows(layer, 0))
    packed = layer.rows[0].packed_len
    codes = layer.decode_keys(0).double()
    if layer.means is not None:
        codes = codes - layer.means[0, :, None].double()
    blocks = [block_rows(layer.keys.packed, block)[1] for block in layer.rows[0].blocks]
    scales = torch.cat(blocks, 1)[:, :packed, 0].double()
    sizes = WIDTH * (scales / layer.keys.packed.codec.unit).square()  # |k̂|² as the scale tells it
    error = 0.7 * relative_error_of_codes(WIDTH, 3)
    first = min(packed, layer.config.sinks)
    for head in range(HEADS):
        kv, q = head * KV_HEADS // HEADS, queries[0, head, 0].double()
        logits = keys[kv] @ q * scale
        if kernel == "auto":  # which rounds the query where it meets codes
            logits[first:packed] += (codes[kv] @ (_rounded(layer, queries)[0, head, 0].double() - q) * scale)[first:]
        variance = scale**2 * (q.square().sum() * sizes[kv] - (codes[kv] @ q).square()).clamp_min(0) * error / WIDTH
        logits[first:packed] -= variance[first:] / 2
        assert relative_error(got[0, head, 0], torch.softmax(logits, 0) @ values[kv]) < 2e-3


def test_full_correction_makes_the_softmax_weights_right_on_average() -> None:
    """E exp(logit error - v/2) = 1: without it packed rows weigh too much beside exact ones."""
    config = KVCacheConfig(key_bits=2, sinks=0, tail=0, mean=False, protect=False)
    keys = torch.randn(1, 1, 4096, 128, generator=torch.Generator().manual_seed(0))
    layer = PackedLayer(config, 0)
    feed(layer, keys, keys, [4096], prompt=1)
    queries = torch.randn(200, 128, generator=torch.Generator().manual_seed(1))
    stored = layer.decode_keys(0)[0]
    noise = (queries @ (stored - keys[0, 0]).T) * 128**-0.5
    energy = queries.square().sum(-1, keepdim=True) * stored.square().sum(-1)
    variance = (energy - (queries @ stored.T).square()) * relative_error_of_codes(128, 2) / 128 / 128
    weight = noise.exp().mean()
    corrected = (noise - variance / 2).exp().mean()
    assert weight > 1.05
    assert abs(float(corrected) - 1) < 0.02


def _codes_only(columns: int = 300) -> tuple[PackedLayer, Tensor, Tensor]:
    layer = filled(KVCacheConfig(sinks=0, tail=0, mean=False, protect=False), columns, batch=1)
    assert layer.keys is not None
    queries = torch.randn(1, HEADS, 4, WIDTH, generator=torch.Generator().manual_seed(7))
    rotated = rotate(queries.view(1, KV_HEADS, -1, WIDTH), layer.keys.rotation).view_as(queries)
    return layer, queries, rotated


def test_query_rounding_rules() -> None:
    """int8: a step of each row's and head's largest magnitude over 127, to nearest; bf16: to nearest."""
    x = torch.tensor([[127.0, 1.4, -0.6, 0.0], [0.0, 0.0, 0.0, 0.0], [-2.54, 0.011, 0.009, 1.0]])
    rounded = op_reference._round(x, torch.int8)
    want = torch.tensor([[127.0, 1.0, -1.0, 0.0], [0.0] * 4, [-2.54, 0.02, 0.0, 1.0]])
    assert torch.allclose(rounded, want, atol=1e-6)
    assert torch.equal(op_reference._round(x, torch.bfloat16), x.bfloat16().float())
    assert torch.equal(op_reference._round(x, torch.float32), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_rounded_queries_and_probabilities_follow_the_rule(dtype: torch.dtype) -> None:
    """The whole op from its definition, with q rounded before the scores and p before the values."""
    layer, queries, rotated = _codes_only()
    assert layer.keys is not None
    assert layer.values is not None
    scale = 0.3
    got = packed_attention(
        queries, layer.view(), scale=scale, inverse=False, q_dtype=dtype, p_dtype=dtype, kernel="reference"
    )
    keys = rotate(layer.decode_keys(0)[None], layer.keys.rotation)[0].double()
    values = rotate(layer.decode_values(0)[None], layer.values.rotation)[0].double()

    def rounded(x: Tensor) -> Tensor:
        if dtype == torch.bfloat16:
            return x.to(torch.bfloat16).double()
        step = x.abs().amax(-1, keepdim=True) / 127
        return torch.round(x / step) * step

    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        logits = rounded(rotated[0, head]).double() @ keys[kv].T * scale
        for row in range(4):
            visible = 300 - 4 + row + 1
            weights = torch.softmax(logits[row, :visible], 0)
            want = rounded(weights.float()).double() @ values[kv, :visible]
            # a probability half way between two steps may fall to either side
            assert relative_error(got[0, head, row], want) < 2e-2


def test_rounding_costs_little() -> None:
    layer, queries, _ = _codes_only()
    exact = packed_attention(queries, layer.view(), scale=WIDTH**-0.5, kernel="reference")
    for dtype, limit in ((torch.bfloat16, 1e-2), (torch.int8, 3e-2)):
        got = packed_attention(
            queries, layer.view(), scale=WIDTH**-0.5, q_dtype=dtype, p_dtype=dtype, kernel="reference"
        )
        error = relative_error(got, exact)
        assert 0 < error < limit


def test_a_query_at_a_pad_gets_zeros() -> None:
    layer = PackedLayer(KVCacheConfig(sinks=0, tail=0, mean=False, protect=False), 0)
    keys = torch.randn(2, KV_HEADS, 40, WIDTH)
    feed(layer, keys, keys, [38], pads=[0, 37], prompt=1)
    layer.update(keys[:, :, 38:], keys[:, :, 38:])
    out = attend(layer, torch.randn(2, HEADS, 2, WIDTH), AttentionOptions(0.1), Counters())
    assert torch.isfinite(out).all()
    deep = PackedLayer(KVCacheConfig(sinks=0, tail=0, mean=False, protect=False), 0)
    out = feed(deep, keys, keys, [40], pads=[0, 37], queries=torch.randn(2, HEADS, 40, WIDTH))
    assert (out[1, :, :37] == 0).all()
    assert math.isfinite(float(out.sum()))


def test_width_of_values_may_differ_from_keys() -> None:
    layer = PackedLayer(KVCacheConfig(protect=False, correct=0.0), 0)
    keys, values = torch.randn(1, KV_HEADS, 209, 96), torch.randn(1, KV_HEADS, 209, 64)
    feed(layer, keys, values, [208], queries=keys, prompt=1)  # the shortest prompt of which 160 rows are packed
    layer.update(keys[:, :, 208:], values[:, :, 208:])
    queries = torch.randn(1, HEADS, 1, 96)
    got = attend(layer, queries, AttentionOptions(0.1), Counters())
    stored_keys, stored_values = torch.zeros(KV_HEADS, 209, 96), torch.zeros(KV_HEADS, 209, 64)
    stored_keys[:, :160], stored_values[:, :160] = layer.decode_keys(0), layer.decode_values(0)
    stored_keys[:, :4], stored_values[:, :4] = keys[0, :, :4], values[0, :, :4]
    stored_keys[:, 160:], stored_values[:, 160:] = keys[0, :, 160:], values[0, :, 160:]
    want = plain_attention(queries[0], stored_keys, stored_values, AttentionOptions(0.1))
    assert relative_error(got[0], want) < ROUNDED
