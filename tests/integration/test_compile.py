"""A compiled forward with a static packed cache: one graph, no break, no recompilation, the same tokens."""

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo as dynamo
from transformers import CompileConfig

import rotaryquant
from support.models import LOSSLESS, random_tokens
from support.zoo import build

_LAYER_KINDS = {"qwen3_moe": 1, "gpt_oss": 2, "gemma4_kvshared": 2, "nemotron_h": 1}


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


def compile_config() -> CompileConfig:
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize("family", list(_LAYER_KINDS))
@pytest.mark.parametrize("kv", [LOSSLESS, "iso3"], ids=["lossless", "iso3"])
def test_static_cache_compiles_whole_and_gives_the_same_tokens(family: str, kv: object) -> None:
    model = build(family)
    ids = random_tokens(2, 203, vocab=256)  # 128 packed; in row 1 another 32 on the way
    mask = torch.ones_like(ids)
    mask[0, :17] = 0
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    with rotaryquant.enabled(model, kv):
        plain = model.generate(ids, **options)
    with rotaryquant.enabled(model, kv) as state:
        for _ in range(3):  # each call makes a cache of its own, and must not compile again
            got = model.generate(ids, cache_implementation="static", compile_config=compile_config(), **options)
            assert torch.equal(got, plain)
            assert state.cache.counters.packed_calls > 0
            assert [row.packed_len for row in state.cache.packed_layers()[0].rows] == [128, 160]
    assert dynamo.utils.counters["stats"]["unique_graphs"] == _LAYER_KINDS[family]
    assert not dynamo.utils.counters["graph_break"]


def test_static_cache_refuses_more_than_it_has_room_for() -> None:
    model = build("qwen3_moe")
    with rotaryquant.enabled(model, "iso3") as state, torch.no_grad():
        cache = state.new_cache(max_tokens=16)
        model(random_tokens(1, 16, vocab=256), cache=cache)
        with pytest.raises(ValueError, match="exceed max_tokens=16"):
            model(random_tokens(1, 1, vocab=256), cache=cache)


def test_static_cache_never_grows() -> None:
    model = build("qwen3_moe")
    with rotaryquant.enabled(model, "iso3") as state, torch.no_grad():
        cache = state.new_cache(max_tokens=600)
        model(random_tokens(1, 300, vocab=256), cache=cache)
        model(random_tokens(1, 1, vocab=256), cache=cache)
        sizes = {layer.packed_nbytes for layer in cache.packed_layers()}
        for _ in range(150):
            model(random_tokens(1, 1, vocab=256), cache=cache)
        assert {layer.packed_nbytes for layer in cache.packed_layers()} == sizes
        assert int(cache.get_seq_length()) == 451
