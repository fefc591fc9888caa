"""Every family through the packed cache: the same logits and the same tokens as through transformers' own."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from rotaryquant import KVCacheConfig, enable, enabled
from rotaryquant.errors import UnsupportedModelError
from support.drive import ROUNDED, round_queries, teacher_forced
from support.kernels import force_kernel
from support.models import LOSSLESS, LOSSLESS_STRICT, random_tokens, relative_error
from support.zoo import LATENT, PACKABLE, VOCAB, build

SCHEDULES: dict[str, list[int]] = {
    "full": [20] + [1] * 20,
    "left-padded": [20] + [1] * 20,
    "chunked": [16, 8, 8] + [1] * 8,
    "multi-token": [20, 4, 1, 5, 10],
}

GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.7},
    "beams": {"do_sample": False, "num_beams": 3},
    "returned-sequences": {"do_sample": True, "top_k": 20, "num_return_sequences": 3},
    "prompt-lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "chunked-prefill": {"do_sample": False, "prefill_chunk_size": 7},
}


@pytest.fixture(scope="module", params=PACKABLE)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kv", [LOSSLESS, LOSSLESS_STRICT], ids=lambda kv: kv.name)
def test_logits_equal_stock_attention(model: PreTrainedModel, schedule: str, kv: KVCacheConfig) -> None:
    ids = random_tokens(2, 40, vocab=VOCAB)
    mask = torch.ones_like(ids)
    if schedule == "left-padded":
        mask[0, :6] = 0
    chunks = SCHEDULES[schedule]
    want = teacher_forced(model, ids, mask, DynamicCache(config=model.config), chunks)
    with enabled(model, kv) as state:
        assert state is not None
        cache = state.new_cache()
        got = teacher_forced(model, ids, mask, cache, chunks)
    seen = mask.bool()
    assert relative_error(got[seen], want[seen]) <= 1e-5
    if kv is LOSSLESS_STRICT:
        assert cache.counters.packed_calls > 0


def test_packed_blocks_of_a_long_prompt_are_read(model: PreTrainedModel) -> None:
    ids = random_tokens(2, 275, vocab=VOCAB)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    chunks = [150, 1, 1, 109, 3] + [1] * 11
    want = teacher_forced(model, ids, mask, DynamicCache(config=model.config), chunks)
    with enabled(model, LOSSLESS) as state:
        assert state is not None
        cache = state.new_cache()
        got = teacher_forced(model, ids, mask, cache, chunks)
    assert cache.counters.packed_calls > 0
    assert cache.counters.packed_reads > 0
    # 32 positions of the second block are packed before row 0 grows to 275 tokens, and to 272 without the last three
    assert [row.packed_len for row in cache.packed_layers()[0].rows] == [224, 192]
    seen = mask.bool()
    assert relative_error(got[seen], want[seen]) <= 1e-5


def _generate(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(5)
    options = {"max_new_tokens": 16, **options}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert isinstance(out, Tensor)
    return out


def _prompt(columns: int) -> Tensor:
    """One prompt whose second half repeats the first, so that prompt lookup finds something."""
    return random_tokens(1, columns // 2, seed=3, vocab=VOCAB).repeat(1, 2)


@pytest.mark.parametrize("mode", GENERATE)
def test_generated_tokens_equal_stock_attention(model: PreTrainedModel, mode: str) -> None:
    ids = _prompt(34)
    if mode == "prompt-lookup" and model._is_stateful:
        with enabled(model, LOSSLESS_STRICT), pytest.raises(ValueError, match="not supported with stateful models"):
            _generate(model, ids, **GENERATE[mode])  # transformers' own refusal, not an error of ours
        return
    want = _generate(model, ids, **GENERATE[mode])
    with enabled(model, LOSSLESS_STRICT) as state:
        got = _generate(model, ids, **GENERATE[mode])
        assert state is not None
        assert state.cache is not None
        assert state.cache.counters.packed_calls > 0
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *((family, "beams") for family in ("qwen3_moe", "gemma4_kvshared", "gpt_oss", "granitemoehybrid")),
        *((family, "prompt-lookup") for family in ("olmoe", "gemma4_moe")),
    ],
)
@pytest.mark.parametrize(("tail", "columns", "packed"), [(48, 296, 256), (1, 212, 224), (1, 244, 256)])
def test_generated_tokens_equal_when_rows_are_packed_on_the_way(
    family: str, mode: str, tail: int, columns: int, packed: int
) -> None:
    """32 more rows seal a block or leave it open; with a tail of 1, some of them were generated."""
    # packed just before the end, where beams still differ; prompt lookup ends with a forward of several tokens
    model, ids = build(family), _prompt(columns + (2 if mode == "prompt-lookup" else 0))
    want = _generate(model, ids, **GENERATE[mode])
    with enabled(model, dataclasses.replace(LOSSLESS, tail=tail)) as state:
        got = _generate(model, ids, **GENERATE[mode])
        assert state is not None
        assert state.cache is not None
        layer = state.cache.packed_layers()[0]
    assert torch.equal(got, want)
    assert layer.rows[0].packed_len == packed
    assert state.cache.counters.packed_calls > 0


def test_second_turn_on_the_same_cache(model: PreTrainedModel) -> None:
    first = _prompt(34)

    def two_turns(cache: Cache) -> Tensor:
        said = _generate(model, first, cache=cache)
        more = torch.cat([said, random_tokens(1, 9, seed=4, vocab=VOCAB)], 1)
        return _generate(model, more, cache=cache)

    want = two_turns(DynamicCache(config=model.config))
    with enabled(model, LOSSLESS_STRICT) as state:
        assert state is not None
        cache = state.new_cache()
        got = two_turns(cache)
    assert torch.equal(got, want)
    assert cache.get_seq_length() == want.shape[1] - 1
    assert cache.counters.packed_calls > 0


def test_three_bit_kernels_agree_with_the_reference(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same codes either way; the reference unpacks every row, the kernels never do but round queries."""
    ids = random_tokens(2, 220, vocab=VOCAB)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    logits = []
    round_queries(monkeypatch)
    for kernel in ("reference", None):
        force_kernel(monkeypatch, kernel)
        with enabled(model, "iso3") as state:
            assert state is not None
            cache = state.new_cache()
            with cache.prefill():
                first = teacher_forced(model, ids, mask, cache, [213])
            rest = teacher_forced(model, ids, mask, cache, [1, 1, 1, 1, 3], start=213)
            logits.append(torch.cat([first, rest], 1)[mask.bool()])
            assert cache.counters.packed_calls > 0
            assert [row.packed_len for row in cache.packed_layers()[0].rows] == [160, 160]
    assert relative_error(logits[1], logits[0]) <= ROUNDED


@pytest.mark.parametrize("family", LATENT)
def test_latent_attention_is_refused_before_anything_changes(family: str) -> None:
    model = build(family)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=r"kv_lora_rank=32.*kv=fp16"):
        enable(model, "iso3")
    assert model.config._attn_implementation == before
    assert not model._forward_pre_hooks
