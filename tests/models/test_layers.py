"""What the planner says that layers keep, against the caches that transformers and this package really build."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.support.zoo import FAMILIES, LATENT, PACKABLE, build
from transformers.cache_utils import DynamicCache

import rotaryquant
from rotaryquant.config import parse_kv
from rotaryquant.errors import UnsupportedModelError
from rotaryquant.integrations.transformers.geometry import read_geometry, text_config
from rotaryquant.integrations.transformers.report import layer_bits
from rotaryquant.kv.footprint import Footprint
from rotaryquant.kv.tail import mean_tail
from rotaryquant.models.layers import Decoder, read_decoder

#: Longer than every window (8) of the tiny models; what is packed of it fills four blocks, which are whole slabs.
TOKENS = 500
KINDS = {"full_attention": "full", "sliding_attention": "sliding", "linear_attention": "state", "dummy": "none"}


def decoder_of(model: Any, folder: Path) -> Decoder:
    """From config.json as it is saved."""
    model.config.save_pretrained(folder)
    return read_decoder(json.loads((folder / "config.json").read_text()))


def run(model: Any, cache: Any) -> None:
    ids = torch.randint(3, 200, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for begin in range(0, TOKENS, 100):  # the last forward leaves what a window holds, and no more
            model(input_ids=ids[:, begin : begin + 100], cache=cache, logits_to_keep=1)


def tensors_of(layer: Any) -> list[torch.Tensor]:
    states = [state for name in ("conv_states", "recurrent_states") for state in _states(getattr(layer, name, ()))]
    return [t for t in (getattr(layer, "keys", None), getattr(layer, "values", None), *states) if t is not None]


def _states(found: Any) -> list[torch.Tensor]:
    return list(found.values()) if isinstance(found, dict) else list(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_keep_in_16_bits_what_the_cache_of_transformers_holds(family: str, tmp_path: Path) -> None:
    model = build(family).to(torch.bfloat16)
    decoder = decoder_of(model, tmp_path)
    cache = DynamicCache(config=model.config)
    run(model, cache)
    assert len(cache.layers) == len(decoder.layers)
    for kept, layer in zip(decoder.layers, cache.layers, strict=True):
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(layer))
        alone = Footprint([kept], None)
        said = alone.exact_bytes(TOKENS) + kept.state_bytes(2)
        if kept.window:  # between two steps it has room for the token to come
            said -= alone.exact_bytes(1)
        assert said == held, (kept, held)


@pytest.mark.parametrize("family", PACKABLE)
def test_packed_layers_hold_what_the_planner_says(family: str, tmp_path: Path) -> None:
    kv = parse_kv("iso3,protect=off,mean=off")
    model = build(family).to(torch.bfloat16)
    decoder = decoder_of(model, tmp_path)
    with rotaryquant.enabled(model, kv=kv) as state:
        cache = state.new_cache()
        with torch.inference_mode(), cache.prefill():
            run(model, cache)
    packable = [layer for layer in decoder.layers if layer.packable]
    assert [layer.index for layer in packable] == [layer.layer for layer in cache.packed_layers()]
    for kept, bits, real in zip(packable, layer_bits(cache), cache.packed_layers(), strict=True):
        assert Footprint([kept], kv).stored_bytes(TOKENS) == round(bits.bits(TOKENS, mean_tail(kv.tail)) / 8)
        held = Footprint([kept], kv).held_bytes(TOKENS)
        assert abs(held / real.nbytes - 1) < 0.1, (held, real.nbytes)


@pytest.mark.parametrize("family", PACKABLE)
def test_layers_are_those_that_the_model_is_run_with(family: str, tmp_path: Path) -> None:
    model = build(family)
    decoder = decoder_of(model, tmp_path)
    for kept, real in zip(decoder.layers, read_geometry(text_config(model)), strict=True):
        assert kept.kind == KINDS[real.layer_type]
        assert kept.packable == real.packable
        if kept.num_kv_heads:
            mine = (kept.num_heads, kept.num_kv_heads, kept.key_width, kept.value_width, kept.window)
            assert mine == (real.num_heads, real.num_kv_heads, real.head_dim, real.head_dim, real.window)


#: Fields without which no configuration of these families is one.
LEAST = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 12, "vocab_size": 512}
CLASSES = {
    "llama": hf.LlamaConfig, "mistral": hf.MistralConfig, "mixtral": hf.MixtralConfig, "qwen2": hf.Qwen2Config,
    "qwen3": hf.Qwen3Config, "qwen2_moe": hf.Qwen2MoeConfig, "qwen3_moe": hf.Qwen3MoeConfig,
    "qwen3_next": hf.Qwen3NextConfig, "qwen3_5_text": hf.Qwen3_5TextConfig,
    "qwen3_5_moe_text": hf.Qwen3_5MoeTextConfig, "gemma2": hf.Gemma2Config, "gemma3_text": hf.Gemma3TextConfig,
    "gemma4_text": hf.Gemma4TextConfig, "gpt_oss": hf.GptOssConfig, "glm4_moe": hf.Glm4MoeConfig,
    "olmoe": hf.OlmoeConfig,
}  # fmt: skip


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("extra", [{}, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4}])
def test_what_a_configuration_leaves_out_is_what_its_class_fills_in(family: str, extra: dict[str, Any]) -> None:
    given = {**LEAST, **extra} if family.startswith("qwen") and not family.startswith("qwen3_") else dict(LEAST)
    if family == "qwen3_moe":
        given |= extra
    decoder = read_decoder({"model_type": family, **given})
    real = read_geometry(CLASSES[family](**given))
    for kept, layer in zip(decoder.layers, real, strict=True):
        assert kept.kind == KINDS[layer.layer_type]
        mine = (kept.num_heads, kept.num_kv_heads, kept.key_width, kept.window)
        assert mine == (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window), kept


def test_layers_that_share_keys_keep_none_of_their_own() -> None:
    given = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 20, "vocab_size": 64}
    shared = {**given, "num_kv_shared_layers": 10}
    mine = [layer.kind for layer in read_decoder({"model_type": "gemma3n_text", **shared}).layers]
    cache = DynamicCache(config=hf.Gemma3nTextConfig(**shared))
    stock = {"DynamicLayer": "full", "DynamicSlidingWindowLayer": "sliding", "DummyLayer": "none"}
    assert mine == [stock[type(layer).__name__] for layer in cache.layers]


def test_a_latent_is_one_row_of_its_rank_and_one_of_rope() -> None:
    """Case (b) of a planner that was 80% short: 61 layers of 576 values, 163,840 tokens: 10.72 GiB."""
    config = {"model_type": "deepseek_v3", **LEAST, "num_hidden_layers": 61}
    assert Footprint(read_decoder(config).layers, None).exact_bytes(163_840) / 2**30 == pytest.approx(10.72, rel=1e-3)


def test_windows_are_bounded_and_hybrids_count_their_attention_alone() -> None:
    """Cases (a) and (c): 8 of 48 layers global, 1 x 512 wide, the others 8 x 256 in windows; 10 of 40 attention."""
    types = ["sliding_attention"] * 5 + ["full_attention"]
    windows = {"model_type": "gemma4_text", **LEAST, "num_hidden_layers": 48, "layer_types": types * 8,
               "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 1,
               "attention_k_eq_v": True, "sliding_window": 1024}  # fmt: skip
    layers = read_decoder(windows).layers
    sliding, growing = [[one for one in layers if one.packable is packable] for packable in (False, True)]
    assert Footprint(growing, None).exact_bytes(131_072) == 2 * 2**30
    assert Footprint(sliding, None).exact_bytes(131_072) == 0.3125 * 2**30
    strict = Footprint(layers, parse_kv("iso3-strict")).stored_bytes(131_072)
    assert strict / 2**20 == pytest.approx(388 + 320, rel=0.01)
    hybrid = {"model_type": "qwen3_5_moe_text", **LEAST, "num_hidden_layers": 40}
    assert Footprint(read_decoder(hybrid).layers, None).exact_bytes(262_144) == 5 * 2**30


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"model_type": "mamba9"}, ("model_type='mamba9'", "nothing is guessed", "llama")),
        ({}, ("model_type=''",)),
        ({"model_type": "llama", "num_hidden_layers": 2}, ("hidden_size of llama", "absent")),
        ({"model_type": "llama", **LEAST, "num_hidden_layers": "two"}, ("num_hidden_layers='two'", "whole number")),
        ({"model_type": "llama", **LEAST, "layer_types": ["indexed_attention"]}, ("'indexed_attention'", "unknown")),
        ({"model_type": "qwen3_moe_vl", "text_config": {**LEAST}}, ("model_type='qwen3_moe_vl_text'",)),
    ],
)
def test_what_is_not_known_is_refused_by_name(config: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_decoder(config)
    for part in parts:
        assert part in str(caught.value)


def test_every_family_of_the_zoo_is_known() -> None:
    assert set(LATENT) | set(PACKABLE) == set(FAMILIES)
