"""What the planner says a layer keeps is what transformers' caches hold, in every family."""

from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from rotaryquant.errors import ModelFileError, UnsupportedModelError
from rotaryquant.integrations.transformers import geometry as built
from rotaryquant.models.geometry import _FAMILIES, Geometry, Kind, Layer, read_geometry
from support.models import random_tokens
from support.zoo import FAMILIES, VOCAB, build

TOKENS = 40


def held(cache: Cache, index: int) -> tuple[int, int]:
    """Bytes of a layer's keys and values, and of its states."""
    layer: Any = cache.layers[index]
    rows = [tensor for name in ("keys", "values") if isinstance(tensor := getattr(layer, name, None), torch.Tensor)]
    states = [
        tensor
        for name in ("conv_states", "recurrent_states")
        for tensor in (getattr(layer, name, None) or {}).values()
        if isinstance(tensor, torch.Tensor)
    ]
    return sum(one.nbytes for one in rows), sum(one.nbytes for one in states)


def kept_rows(layer: Layer, tokens: int) -> int:
    """Between two steps transformers holds one row less than the window: the next token is the last."""
    return min(tokens, layer.window - 1) if layer.kind is Kind.SLIDING else tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_holds_what_the_configuration_says(family: str, dtype: torch.dtype) -> None:
    model = build(family).to(dtype)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=random_tokens(1, TOKENS, vocab=VOCAB), cache=cache)
    read = read_geometry(model.config.to_dict())
    assert len(read.layers) == len(cache.layers)
    for layer in read.layers:
        rows, states = held(cache, layer.index)
        assert rows == kept_rows(layer, TOKENS) * layer.values_per_token * dtype.itemsize, layer
        assert states == layer.state_bytes(dtype.itemsize), layer
    assert any(layer.values_per_token for layer in read.layers)


def as_built(config: PretrainedConfig) -> list[tuple[int, int, int, int, int]]:
    """Number, heads, KV heads, width and window of the layers with keys and values."""
    return [
        (layer.index, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window)
        for layer in built.read_geometry(built.text_config(config))
        if layer.head_dim
    ]


def as_read(geometry: Geometry) -> list[tuple[int, int, int, int, int]]:
    return [
        (layer.index, layer.num_heads, layer.num_kv_heads, layer.key_width, layer.window)
        for layer in geometry.layers
        if layer.key_width
    ]


ATTENTION_ONLY = [name for name, family in _FAMILIES.items() if not family.latent]


@pytest.mark.parametrize("name", ATTENTION_ONLY)
def test_fields_that_a_file_leaves_out_have_the_values_of_transformers(name: str) -> None:
    """Files written by older versions leave out what equals a default."""
    config = hf.CONFIG_MAPPING[name]()
    whole = {**config.to_dict(), "model_type": name}
    assert as_read(read_geometry(whole)) == as_built(config)
    needed = ("model_type", "num_hidden_layers", "num_attention_heads", "hidden_size", "num_key_value_heads")
    few = {key: whole[key] for key in needed if key in whole}
    assert as_read(read_geometry(few)) == as_built(config)
    states = [layer.state_bytes(2) for layer in read_geometry(whole).layers]
    assert states == [layer.state_bytes(2) for layer in read_geometry(few).layers]
    experts = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 0
    if name != "granitemoehybrid":
        assert read_geometry(few).experts_per_token == experts


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_windows_that_are_switched_on(name: str) -> None:
    config = hf.CONFIG_MAPPING[name](use_sliding_window=True, sliding_window=64, max_window_layers=3)
    assert as_read(read_geometry(config.to_dict())) == as_built(config)
    assert any(layer.kind is Kind.SLIDING for layer in read_geometry(config.to_dict()).layers)


def test_older_names_of_layers() -> None:
    pattern = read_geometry({"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-M"})
    assert [layer.kind for layer in pattern.layers] == [Kind.STATE, Kind.NONE, Kind.FULL, Kind.NONE, Kind.STATE]
    old = {**FAMILIES["granitemoehybrid"].config().to_dict(), "layer_types": ["mamba", "attention"]}
    assert [layer.kind for layer in read_geometry(old).layers] == [Kind.STATE, Kind.FULL]


def test_a_decoder_inside_of_a_composite_model() -> None:
    text = FAMILIES["gemma4_moe"].config().to_dict()
    inside = read_geometry({"model_type": "gemma4", "text_config": text})
    assert inside.layers == read_geometry(text).layers
    assert inside.model_type == "gemma4"


def test_what_is_not_known_is_refused_by_name() -> None:
    plain = FAMILIES["qwen3_moe"].config().to_dict()
    with pytest.raises(UnsupportedModelError, match="model_type='mamba9' is not a family"):
        read_geometry({**plain, "model_type": "mamba9"})
    with pytest.raises(UnsupportedModelError, match="layer_types has 'banded'"):
        read_geometry({**plain, "layer_types": ["banded"]})
    with pytest.raises(UnsupportedModelError, match="layer 0 is recurrent"):
        read_geometry({**plain, "layer_types": ["mamba"]})
    with pytest.raises(ModelFileError, match="num_attention_heads='many' must be a whole number"):
        read_geometry({**plain, "num_attention_heads": "many"})
    with pytest.raises(ModelFileError, match="num_attention_heads is missing or 0"):
        read_geometry({**plain, "num_attention_heads": None})
    with pytest.raises(ModelFileError, match="hybrid_override_pattern has 'Q'"):
        read_geometry({"model_type": "nemotron_h", "hybrid_override_pattern": "MQ"})
