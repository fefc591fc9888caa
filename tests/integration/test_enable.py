"""Switching a model to a packed cache and back, and every request that cannot be honored."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.models.llama.modeling_llama import LlamaAttention

import rotaryquant
from rotaryquant import KVCacheConfig, disable, enable, enabled, parse_kv
from rotaryquant.config import PRESETS
from rotaryquant.errors import ConfigError, UnsupportedModelError
from rotaryquant.integrations.transformers.attention import packed_or_dense
from rotaryquant.integrations.transformers.cache import PackedCache
from support.drive import ROUNDED, round_queries
from support.kernels import force_kernel
from support.models import LOSSLESS_STRICT, random_tokens, relative_error, tiny, tiny_moe
from support.zoo import PACKABLE, build, sharpen


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny()


@pytest.fixture(autouse=True)
def _leave_clean(model: PreTrainedModel) -> Any:
    yield
    disable(model)


def _state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that `enable` touches or might."""
    return {
        "attributes": dict(vars(model)),
        "hooks": dict(model._forward_pre_hooks),
        "hooks with kwargs": dict(model._forward_pre_hooks_with_kwargs),
        "attention": {name: m.config._attn_implementation for name, m in model.named_modules() if hasattr(m, "config")},
        "config": model.config.to_json_string(),
        "generation": model.generation_config.to_json_string(),
        "methods": {name: getattr(model, name) for name in ("_prefill", "_prepare_cache_for_generation", "forward")},
        "parameters": {name: (p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()},
    }


@pytest.mark.parametrize("family", PACKABLE)
def test_enabled_leaves_the_model_as_it_was(family: str) -> None:
    model = build(family)
    ids = random_tokens(1, 30, vocab=256)
    with torch.no_grad():
        want = model(ids).logits
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    before = _state_of(model)
    with enabled(model, "iso3"):
        assert model.config._attn_implementation == "rotaryquant"
        model.generate(ids, max_new_tokens=4, do_sample=False)
    assert _state_of(model) == before
    with torch.no_grad():
        assert torch.equal(model(ids).logits, want)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), tokens)


def test_enabled_cleans_up_after_an_exception(model: PreTrainedModel) -> None:
    before = _state_of(model)
    with pytest.raises(RuntimeError, match="inside"), enabled(model, "iso3"):
        raise RuntimeError("inside")
    assert _state_of(model) == before


def test_enabling_twice_replaces_the_first(model: PreTrainedModel) -> None:
    before = _state_of(model)
    enable(model, "iso3")
    second = enable(model, "iso2")
    assert len(model._forward_pre_hooks) == 1
    assert second is not None
    model.generate(random_tokens(1, 5), max_new_tokens=2, do_sample=False)
    assert second.cache is not None
    assert second.cache.kv.key_bits == 2
    disable(model)
    assert _state_of(model) == before
    disable(model)  # and once more does no harm


def test_two_models_do_not_share_anything() -> None:
    small, large = tiny(), tiny(num_hidden_layers=4)
    first, second = enable(small, "iso3"), enable(large, "iso4")
    assert first is not None
    assert second is not None
    ids = random_tokens(1, 5)
    for model in (small, large, small):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert first.cache is not None
    assert second.cache is not None
    assert (len(first.cache.layers), len(second.cache.layers)) == (2, 4)
    assert (first.cache.kv.name, second.cache.kv.name) == ("iso3", "iso4")


def test_fp16_means_stock_and_switches_packing_off(model: PreTrainedModel) -> None:
    before = _state_of(model)
    assert enable(model, "fp16") is None
    assert _state_of(model) == before
    enable(model, "iso3")
    assert enable(model, "fp16") is None
    assert _state_of(model) == before
    with enabled(model, "fp16") as state:
        assert state is None


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_plain_forward_gets_a_packed_cache(model: PreTrainedModel) -> None:
    state = enable(model, LOSSLESS_STRICT)
    assert state is not None
    ids = random_tokens(1, 20)
    with torch.no_grad():
        out = model(ids)
        assert isinstance(out.past_key_values, PackedCache)
        assert out.past_key_values is state.cache
        more = model(ids[:, :1], past_key_values=out.past_key_values)
    assert more.past_key_values.get_seq_length() == 21
    assert state.cache is not None
    assert state.cache.counters.packed_reads > 0


def test_no_cache_is_made_where_none_is_wanted(model: PreTrainedModel) -> None:
    want = tiny()(random_tokens(1, 20), use_cache=False).logits
    state = enable(model, "iso3")
    assert state is not None
    out = model(random_tokens(1, 20), use_cache=False)
    assert out.past_key_values is None
    assert state.cache is None
    assert torch.allclose(out.logits, want, atol=1e-5)


# ---- requests that cannot be honored ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated", "ignore:Using the model-agnostic default")
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("call", ["forward", "generate"])
def test_a_foreign_cache_is_refused(model: PreTrainedModel, name: str, call: str) -> None:
    enable(model, "iso3")
    foreign = DynamicCache(config=model.config)
    function = model if call == "forward" else model.generate
    with pytest.raises(ConfigError, match=r"cache is a DynamicCache, but kv=iso3 .*rotaryquant\.disable"):
        function(random_tokens(1, 5), **{name: foreign})
    assert foreign.get_seq_length() == 0


def test_a_static_stock_cache_is_refused(model: PreTrainedModel) -> None:
    enable(model, "iso3")
    with pytest.raises(ConfigError, match="cache is a StaticCache"):
        model(random_tokens(1, 5), cache=StaticCache(config=model.config, max_cache_len=16))


def test_a_cache_of_another_configuration_is_refused(model: PreTrainedModel) -> None:
    state = enable(model, "iso4")
    assert state is not None
    other = state.new_cache()
    enable(model, "iso3")
    with pytest.raises(ConfigError, match=r"made for kv=iso4, but kv=iso3 is in force"):
        model(random_tokens(1, 5), cache=other)


@pytest.mark.parametrize("implementation", ["quantized", "offloaded"])
def test_another_cache_implementation_is_refused(model: PreTrainedModel, implementation: str) -> None:
    enable(model, "iso3")
    with pytest.raises(ConfigError, match=rf"cache_implementation='{implementation}' contradicts kv=iso3"):
        model.generate(random_tokens(1, 5), max_new_tokens=2, cache_implementation=implementation)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("iso5", r"kv='iso5' is unknown; valid presets: fp16, iso3, iso3-strict"),
        ("", r"kv='' is empty; valid presets: fp16"),
        (" , ", r"is empty"),
        ("iso3,bits=3", r"option 'bits=3' is unknown; valid keys: key_bits, value_bits, quantizer, rotation"),
        ("iso3,sinks", r"option 'sinks' is unknown"),
        ("iso3,name=x", r"option 'name=x' is unknown"),
        ("iso3,sinks=many", r"kv sinks='many': wanted a value like 4"),
        ("iso3,tail=perhaps", r"kv tail='perhaps': wanted a value like 48"),
        ("iso3,tail=on", r"kv tail='on': wanted a value like 48"),
        ("iso3,mean=perhaps", r"kv mean='perhaps': wanted on or off"),
        ("iso3,sinks=1,sinks=2", r"'sinks' is given twice"),
        ("key_bits=5", r"kv key_bits=5 is unknown; valid: 2, 3, 4, 8, 32"),
        ("value_bits=1", r"kv value_bits=1 is unknown"),
        ("rotation=wht", r"kv rotation='wht' is unknown; valid: isoquant, hadamard"),
        ("scale=max", r"kv scale='max' is unknown; valid: best, mse, norm"),
        ("prefill=eager", r"kv prefill='eager' is unknown; valid: deferred, streaming"),
        ("sinks=-1", r"kv sinks=-1 must be between 0 and 128"),
        ("sinks=129", r"kv sinks=129 must be between 0 and 128"),
        ("tail=-1", r"kv tail=-1 must be a number of tokens"),
        ("tau=1.5", r"kv tau=1\.5 must be between 0 and 1"),
        ("correct=2", r"kv correct=2\.0 must be between 0 and 1"),
        ("max_logit_error=0", r"kv max_logit_error=0\.0 must be above 0"),
        ("fp16,sinks=2", r"fp16 packs nothing, so it takes no options"),
    ],
)
def test_a_misspelt_spec_is_refused_with_the_valid_ones(model: PreTrainedModel, spec: str, message: str) -> None:
    before = _state_of(model)
    with pytest.raises(ConfigError, match=message):
        enable(model, spec)
    assert _state_of(model) == before


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_in_force_as_it_says(model: PreTrainedModel, preset: str) -> None:
    state = enable(model, preset)
    if preset == "fp16":
        assert state is None
        return
    assert state is not None
    wanted = PRESETS[preset]
    assert wanted is not None
    assert state.kv == wanted
    ids = random_tokens(1, 260)
    model.generate(ids, max_new_tokens=4, do_sample=False)
    report = state.report()
    assert report.kv == preset
    assert {(layer.key_bits, layer.value_bits) for layer in report.packed} == {(wanted.key_bits, wanted.value_bits)}
    assert report.rotation == wanted.rotation
    assert state.cache is not None
    layer = state.cache.packed_layers()[0]
    assert layer.keys is not None
    assert layer.values is not None
    assert layer.keys.format.bits == wanted.key_bits
    assert layer.values.format.bits == wanted.value_bits
    # bytes as asked for: no tail means that nothing stays in 16 bits
    assert layer.keys.packed.codes[0].shape[-1] == 64 * wanted.key_bits // 8
    assert layer.dense.count == (263 - 192 if wanted.tail else 0)
    assert state.cache.counters.packed_reads > 0


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [
        ("iso3,key_bits=4", "key_bits", 4),
        ("iso3, value_bits=2", "value_bits", 2),
        ("rotation=so3", "rotation", "so3"),
        ("signs=off", "signs", False),
        ("iso3-strict,tail=64", "tail", 64),
        ("iso3,tail=off", "tail", 0),
        ("iso3,sinks=off", "sinks", 0),
        ("mean=false", "mean", False),
        ("sinks=0", "sinks", 0),
        ("tau=0.25", "tau", 0.25),
        ("correct=0.25", "correct", 0.25),
        ("mean_period=512", "mean_period", 512),
        ("protect=0", "protect", False),
        ("max_logit_error=7", "max_logit_error", 7.0),
        ("prefill=streaming", "prefill", "streaming"),
        ("inverse=off", "inverse", False),
        ("scale=norm", "scale", "norm"),
        ("seed=11", "seed", 11),
    ],
)
def test_every_option_reaches_the_layers(model: PreTrainedModel, spec: str, field: str, value: object) -> None:
    state = enable(model, spec)
    assert state is not None
    assert getattr(state.kv, field) == value
    assert state.report().kv == spec
    for layer in state.new_cache().packed_layers():
        assert getattr(layer.config, field) == value


def test_spec_may_be_a_configuration_or_nothing() -> None:
    config = KVCacheConfig("own", sinks=2)
    assert parse_kv(config) is config
    assert parse_kv(None) is None
    assert parse_kv("iso3") == PRESETS["iso3"]
    with pytest.raises(ConfigError, match="key_bits=5"):
        dataclasses.replace(config, key_bits=5)


# ---- attention that the packed path does not carry -------------------------------------------------------------


class BiasedAttention(LlamaAttention):
    """A head that hands an extra bias to the attention function."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        attention_interface: Callable[..., Any] = hf.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
        return attention_interface(self, hidden_states, hidden_states, hidden_states, None, position_bias=1.0)


def test_an_attention_argument_nobody_carries_is_refused_at_enable() -> None:
    model = tiny()
    model.model.layers[1].self_attn.__class__ = BiasedAttention
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=r"BiasedAttention passes 'position_bias' .*kv=fp16"):
        enable(model, "iso3")
    assert model.config._attn_implementation == before


def test_an_attention_argument_nobody_carries_is_refused_at_the_call() -> None:
    x = torch.randn(1, 2, 3, 64)
    with pytest.raises(UnsupportedModelError, match=r"Linear passes 'position_bias' to attention; use kv=fp16"):
        packed_or_dense(torch.nn.Linear(1, 1), x, x, x, None, scaling=1.0, position_bias=x)
    packed_or_dense(torch.nn.Linear(1, 1), x, x, x, None, scaling=1.0, position_bias=None)


def test_dropout_in_attention_is_refused() -> None:
    x = torch.randn(1, 2, 3, 64)
    with pytest.raises(UnsupportedModelError, match=r"dropout=0.1 in attention; call model\.eval\(\)"):
        packed_or_dense(torch.nn.Linear(1, 1), x, x, x, None, scaling=1.0, dropout=0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("attn_temperature_tuning", True), ("attention_chunk_bias", 0.5), ("attn_sink_size", 4), ("use_alibi", True)],
)
def test_an_unknown_attention_field_is_refused(field: str, value: object) -> None:
    model = tiny()
    setattr(model.config, field, value)
    with pytest.raises(UnsupportedModelError, match=rf"unknown attention field {field}={value!r}"):
        enable(model, "iso3")
    setattr(model.config, field, None)
    assert enable(model, "iso3") is not None


def test_known_fields_with_attention_in_their_name_are_fine() -> None:
    assert enable(tiny(attention_bias=True, attention_dropout=0.1), "iso3") is not None


@pytest.mark.parametrize("field", ["kv_lora_rank", "index_topk", "alibi"])
def test_a_kind_of_attention_that_is_not_held_names_its_field(field: str) -> None:
    model = tiny()
    setattr(model.config, field, 16)
    with pytest.raises(UnsupportedModelError, match=rf"{field}=16: .*use kv=fp16"):
        enable(model, "iso3")


def test_a_width_without_a_rotation_is_refused_before_anything_changes() -> None:
    model = tiny(head_dim=72)  # 72 = 8 x 9: no Hadamard matrix of that order
    before = _state_of(model)
    with pytest.raises(ConfigError, match=r"layer 0: head width 72: .*rotation=dense or rotation=so4"):
        enable(model, "iso3")
    assert _state_of(model) == before
    with enabled(model, "iso3,rotation=so4") as state:
        model.generate(random_tokens(1, 140), max_new_tokens=2, do_sample=False)
        assert state is not None
        assert state.cache is not None
        assert state.cache.counters.packed_reads > 0


def test_a_model_of_windows_alone_has_nothing_to_pack() -> None:
    config = hf.MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"no layer of this model can be packed, its layers are sliding_attention"):
        enable(hf.MistralForCausalLM(config).eval(), "iso3")


def test_right_padding_is_refused_by_row(model: PreTrainedModel) -> None:
    enable(model, "iso3")
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    with pytest.raises(ValueError, match=r"attention_mask row 1 hides column 4 after a visible one.*padding_side"):
        model(random_tokens(2, 6), attention_mask=mask)


def test_a_mask_that_changes_its_pads_is_refused(model: PreTrainedModel) -> None:
    state = enable(model, "iso3")
    assert state is not None
    cache, mask = state.new_cache(), torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    ids = random_tokens(2, 7)
    with torch.no_grad():
        model(ids[:, :6], attention_mask=mask[:, :6], cache=cache)
        mask[0, :3] = 0
        with pytest.raises(ValueError, match=r"row 0 3 left pads, but the cache was filled with 2"):
            model(ids[:, 6:], attention_mask=mask, cache=cache)


# ---- extras that are carried -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["lossless", "iso3"])
def test_learned_sinks_reach_the_packed_path(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks of +4 on every head: forgotten, the softmax denominator would be far off."""
    if kv != "lossless":
        round_queries(monkeypatch)
    model = build("gpt_oss")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(4.0)
    ids = random_tokens(1, 213, vocab=256)
    with torch.no_grad():
        if kv == "lossless":
            cache = DynamicCache(config=model.config)
            model(ids[:, :212], cache=cache)
            want = model(ids[:, 212:], cache=cache).logits
        else:
            want = _packed_step(model, "iso3", ids, monkeypatch, "reference")
        got = _packed_step(model, LOSSLESS_STRICT if kv == "lossless" else "iso3", ids, monkeypatch, None)
        assert relative_error(got, want) < (1e-5 if kv == "lossless" else ROUNDED)
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
        without = _packed_step(model, LOSSLESS_STRICT if kv == "lossless" else "iso3", ids, monkeypatch, None)
    assert relative_error(without, want) > 10 * ROUNDED


def _packed_step(
    model: PreTrainedModel, kv: str | KVCacheConfig, ids: Tensor, monkeypatch: pytest.MonkeyPatch, kernel: str | None
) -> Tensor:
    """Logits of the last of 213 tokens, read through packed rows in a sealed and an open block."""
    force_kernel(monkeypatch, kernel)
    with enabled(model, kv) as state, torch.no_grad():
        assert state is not None
        cache = state.new_cache()
        with cache.prefill():
            model(ids[:, :212], cache=cache)
        logits: Tensor = model(ids[:, 212:], cache=cache).logits
        assert cache.counters.packed_reads > 0
    force_kernel(monkeypatch, None)
    return logits


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_a_soft_cap_in_the_configuration_is_in_force(scale: float) -> None:
    """Gemma-2 caps logits at 50; with queries 60 times as large most of them pass 3,000."""
    config = hf.Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, query_pre_attn_scalar=64, attn_logit_softcapping=50.0, sliding_window=8,
        max_position_embeddings=512, eos_token_id=None,
    )  # fmt: skip
    model = sharpen(hf.Gemma2ForCausalLM(config).eval())
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(scale)
            layer.self_attn.k_proj.weight.mul_(scale)
    ids = random_tokens(2, 40, vocab=256)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids[:, :30], cache=cache)
        want = torch.cat([model(ids[:, i : i + 1], cache=cache).logits for i in range(30, 40)], 1)
        with enabled(model, LOSSLESS_STRICT) as state:
            assert state is not None
            packed = state.new_cache()
            model(ids[:, :30], cache=packed)
            got = torch.cat([model(ids[:, i : i + 1], cache=packed).logits for i in range(30, 40)], 1)
    assert packed.counters.packed_reads > 0
    assert torch.isfinite(got).all()
    assert relative_error(got, want) < 1e-4
    with torch.no_grad(), enabled(model, LOSSLESS_STRICT) as state:
        model.config.attn_logit_softcapping = None
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        assert state is not None
        packed = state.new_cache()
        model(ids[:, :30], cache=packed)
        uncapped = model(ids[:, 30:31], cache=packed).logits
    if scale > 1:
        assert relative_error(uncapped, want[:, :1]) > 1e-3


def test_a_mixture_of_experts_generates(model: PreTrainedModel) -> None:
    moe = tiny_moe()
    with enabled(moe, "iso3") as state:
        out = moe.generate(random_tokens(1, 150), max_new_tokens=8, do_sample=False)
        assert state is not None
        assert state.cache is not None
        assert state.cache.counters.packed_reads > 0
    assert out.shape == (1, 158)


def test_names_at_the_top_are_there() -> None:
    for name in rotaryquant.__all__:
        assert getattr(rotaryquant, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'compress'"):
        rotaryquant.compress  # noqa: B018
