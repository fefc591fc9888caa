"""Keys that low bits cannot carry: found before they are packed, kept at more bits, named, or refused."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from rotaryquant import KVCacheConfig
from rotaryquant.attention import AttentionOptions
from rotaryquant.errors import UnsupportedModelError
from rotaryquant.formats.codebook import relative_error
from rotaryquant.kv import protect
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.kv.state import merge_layers
from support.drive import feed, seen_rows

TOKENS, WIDTH = 256, 128
BARE = KVCacheConfig("bare", sinks=0, tail=0, mean=False)
TAILED = dataclasses.replace(BARE, tail=48)


def biased_keys(bias: float, seed: int = 0, rows: int = 1) -> Tensor:
    """Noise of norm 22 plus one constant vector of norm `bias` on 4 channels, as Qwen2's first layers have it."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, 1, TOKENS, WIDTH, generator=generator) * (22 / WIDTH**0.5)
    keys[..., [3, 40, 77, 101]] += bias / 2
    return keys


def filled(config: KVCacheConfig, keys: Tensor, **kwargs: Any) -> PackedLayer:
    layer = PackedLayer(config, 2)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(keys.shape, generator=generator)
    queries = torch.randn(keys.shape, generator=generator)
    feed(layer, keys, values, kwargs.pop("chunks", [TOKENS]), queries=queries, prompt=1, **kwargs)
    return layer


def divergence(layer: PackedLayer, keys: Tensor, row: int = 0) -> float:
    """Mean KL of the attention weights of 64 queries: exact keys against the stored ones."""
    queries = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))
    stored, _ = seen_rows(layer, row)
    exact = (queries @ keys[row, 0].T * WIDTH**-0.5).log_softmax(-1)
    got = (queries @ stored[0].T * WIDTH**-0.5).log_softmax(-1)
    return float((exact.exp() * (exact - got)).sum(-1).mean())


def test_a_huge_bias_ruins_unprotected_keys() -> None:
    """The case itself: decoded rows look fine, attention is gone."""
    keys = biased_keys(605.0)
    layer = filled(dataclasses.replace(BARE, protect=False), keys)
    stored, _ = seen_rows(layer, 0)
    assert float(torch.nn.functional.cosine_similarity(stored[0], keys[0, 0], -1).mean()) > 0.98
    assert divergence(layer, keys) > 3.0
    assert layer.finding is not None
    assert (layer.finding.action, layer.finding.bits) == ("exposed", 3)
    assert layer.finding.logit_error > 5.0


def test_more_bits_save_them() -> None:
    keys = biased_keys(605.0)
    layer = filled(BARE, keys)
    assert layer.finding is not None
    assert (layer.finding.layer, layer.finding.action, layer.finding.bits) == (2, "boosted", 8)
    assert layer.keys is not None
    assert layer.keys.format.bits == 8
    assert layer.values is not None
    assert layer.values.format.bits == 3  # values err by their own norm, which no softmax amplifies
    assert divergence(layer, keys) <= 0.2


def test_removing_the_mean_saves_them_at_three_bits() -> None:
    keys = biased_keys(605.0)
    layer = filled(KVCacheConfig(sinks=0, tail=0), keys)
    assert layer.finding is not None
    assert (layer.finding.action, layer.finding.bits, layer.finding.mean_heads) == ("kept", 3, 1)
    assert divergence(layer, keys) <= 0.2


def test_ordinary_keys_are_left_at_their_bits() -> None:
    layer = filled(BARE, biased_keys(0.0))
    assert layer.finding is not None
    assert (layer.finding.action, layer.finding.bits) == ("kept", 3)
    assert layer.finding.logit_error < 0.5


def test_keys_beyond_eight_bits_are_refused_with_a_way_out() -> None:
    with pytest.raises(UnsupportedModelError, match=r"layer 2: .*max_logit_error=.*Use kv=fp16"):
        filled(BARE, biased_keys(5e4))


def test_refusal_comes_before_anything_is_packed() -> None:
    layer = PackedLayer(BARE, 2)
    keys = biased_keys(5e4)
    layer.begin_prefill()
    feed(layer, keys, keys, [TOKENS], queries=torch.randn(keys.shape))
    with pytest.raises(UnsupportedModelError):
        layer.end_prefill()
    assert layer.all_staged()


def test_the_limit_can_be_raised() -> None:
    layer = filled(dataclasses.replace(BARE, max_logit_error=1000.0), biased_keys(605.0))
    assert layer.finding is not None
    assert (layer.finding.action, layer.finding.bits) == ("kept", 3)


def test_protection_looks_at_the_worst_row_of_a_batch() -> None:
    keys = torch.cat([biased_keys(0.0), biased_keys(605.0, seed=1), biased_keys(0.0, seed=2)])
    layer = filled(BARE, keys)
    assert layer.finding is not None
    assert (layer.finding.action, layer.finding.bits) == ("boosted", 8)
    assert divergence(layer, keys, row=1) <= 0.2


def test_a_row_that_is_packed_later_is_judged_as_well() -> None:
    """Row 1 is short when the layer's bits are fixed; its huge keys must not pass in silence."""
    keys = torch.cat([biased_keys(0.0), biased_keys(605.0, seed=1)])
    layer = filled(TAILED, keys, pads=[0, 100], chunks=[140, *[1] * 116])
    assert layer.rows[1].packed_len == 96
    assert layer.keys is not None
    assert layer.finding is not None
    assert layer.keys.format.bits == 8 or layer.finding.action == "exposed"


def test_a_row_that_joins_before_it_is_packed_is_judged_as_well() -> None:
    """The second cache is all exact when it joins, so its keys are first packed under bits chosen without them."""
    ordinary, huge = biased_keys(0.0), biased_keys(605.0, seed=1)
    waiting = PackedLayer(TAILED, 2)
    feed(waiting, huge[:, :, :100], huge[:, :, :100], [100], queries=huge[:, :, :100], prompt=1)
    merged = merge_layers([filled(TAILED, ordinary), waiting])
    more = torch.cat([ordinary, huge])[:, :, :100]
    feed(merged, more, more, [1] * 100, queries=more)
    assert [row.packed_len for row in merged.rows][1] == 128
    assert merged.finding is not None
    assert merged.finding.action == "exposed"


def test_protection_does_not_depend_on_the_write_route() -> None:
    """Without tail and mean, single steps must not let the first key alone decide."""
    keys = biased_keys(605.0)
    keys[:, :, 0] *= 1e-3
    bulk, steps = filled(BARE, keys), filled(BARE, keys, chunks=[1] * TOKENS)
    assert bulk.keys is not None
    assert steps.keys is not None
    assert bulk.keys.format == steps.keys.format


def test_logit_error_is_what_packing_does_to_a_logit() -> None:
    """The estimate against the measured error, over every head of ordinary keys."""
    keys = biased_keys(100.0)
    layer = filled(dataclasses.replace(BARE, protect=False), keys)
    queries = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(3))
    stored, _ = seen_rows(layer, 0)
    measured = float(((queries @ (stored[0] - keys[0, 0]).T) * WIDTH**-0.5).square().mean().sqrt())
    assert layer.finding is not None
    assert layer.finding.logit_error == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_relative_error_is_what_packing_does_to_a_row(bits: int) -> None:
    config = dataclasses.replace(BARE, key_bits=bits, protect=False)
    keys = torch.randn(1, 1, TOKENS, WIDTH)
    stored, _ = seen_rows(filled(config, keys), 0)
    measured = float((stored[0] - keys[0, 0]).square().sum() / keys.square().sum())
    # the estimate leaves out what the unbiased scale adds: 4% at 3 bits, 13% at 2
    assert relative_error(WIDTH, bits) == pytest.approx(measured, rel=0.2)


def test_lossless_rows_never_err() -> None:
    assert relative_error(WIDTH, 32) == 0.0


def test_unseen_queries_decide_nothing() -> None:
    layer = PackedLayer(BARE, 0)
    keys = biased_keys(605.0)
    layer.update(keys, keys)
    layer.settle(None)
    layer.end_prefill()
    assert layer.finding is not None
    assert layer.finding.action == "kept"


def test_query_heads_of_a_group_count_by_the_largest() -> None:
    """One loud query head among four that share the keys is enough."""
    keys = biased_keys(100.0)
    config = dataclasses.replace(BARE, protect=False)
    quiet, loud = PackedLayer(config, 0), PackedLayer(config, 0)
    queries = torch.randn(1, 4, TOKENS, WIDTH)
    feed(quiet, keys, keys, [TOKENS], queries=queries, prompt=1)
    queries[:, 2] *= 10
    feed(loud, keys, keys, [TOKENS], queries=queries, prompt=1)
    assert quiet.finding is not None
    assert loud.finding is not None
    assert loud.finding.logit_error == pytest.approx(10 * quiet.finding.logit_error, rel=0.05)


def test_attention_scale_counts() -> None:
    keys = biased_keys(100.0)
    config = dataclasses.replace(BARE, protect=False)
    one, half = filled(config, keys), filled(config, keys, options=AttentionOptions(WIDTH**-0.5 / 2))
    assert one.finding is not None
    assert half.finding is not None
    assert half.finding.logit_error == pytest.approx(one.finding.logit_error / 2, rel=1e-5)


@pytest.mark.parametrize(("tau", "heads"), [(0.0, 2), (0.5, 1), (0.99, 0)])
def test_dominating_mean_follows_its_definition(tau: float, heads: int) -> None:
    keys = torch.randn(2, 120, 16)
    keys[0] += 3.0
    mean, count = protect.dominating_mean(keys, tau)
    assert count == heads
    share = keys.mean(1).square().sum(-1) / keys.square().sum(-1).mean(1)
    for head in range(2):
        want = keys[head].mean(0) if share[head] >= tau else torch.zeros(16)
        assert torch.allclose(mean[head], want, atol=1e-6)
