"""The planner's arithmetic, against figures worked out by hand, the quantiser, and real caches."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rotaryquant.config import parse_kv
from rotaryquant.errors import ConfigError, ModelFileError, UnsupportedModelError
from rotaryquant.kv.footprint import Footprint
from rotaryquant.models.geometry import Kind, Layer
from rotaryquant.models.roles import Role
from rotaryquant.planning.memory import cache_of
from rotaryquant.planning.plan import Model, Plan, Request, make_plan
from rotaryquant.planning.speed import CPU, Rates, Step
from rotaryquant.planning.weights import recipe_named, weigh
from rotaryquant.weights.conversion import plan_items
from rotaryquant.weights.headers import TensorInfo
from rotaryquant.weights.packed_config import PackedConfig
from rotaryquant.weights.recipes import RECIPES
from support.targets import target, tensors_of

GIB = 2**30
GB = 10**9
STRICT = parse_kv("iso3-strict")


def full(index: int, heads: int, width: int) -> Layer:
    return Layer(index, Kind.FULL, heads, heads, width, width)


def test_windows_hold_no_more_than_themselves() -> None:
    """8 global layers of 1 × 512 and 40 windows of 8 × 256, 131,072 tokens; one formula for all says 90 GiB."""
    windows = [Layer(index, Kind.SLIDING, 8, 8, 256, 256, window=1024) for index in range(8, 48)]
    layers = [full(index, 1, 512) for index in range(8)] + windows
    assert cache_of(layers, None, 131_072, 2).total == (2 + 0.3125) * GIB
    packed = Footprint(layers[:8], STRICT).stored_bytes(131_072)
    assert packed == 388 * 2**20
    assert Footprint(layers, STRICT).stored_bytes(131_072) == (388 + 320) * 2**20


def test_a_latent_is_one_row_for_all_heads() -> None:
    layers = [Layer(index, Kind.LATENT, 128, 1, 512, 64) for index in range(61)]
    assert cache_of(layers, STRICT, 163_840, 2).total / GIB == pytest.approx(10.72, rel=0.001)


def test_layers_without_attention_hold_no_tokens() -> None:
    layers = [full(index, 2, 256) if index % 4 == 3 else Layer(index, Kind.STATE) for index in range(40)]
    assert cache_of(layers, None, 262_144, 2).total == 5 * GIB


def test_the_prompt_until_it_is_packed() -> None:
    """28 layers of 8 KV heads, 128 wide, 2,048 tokens: the paper's 235 MB."""
    layers = [full(index, 8, 128) for index in range(28)]
    assert Footprint(layers, parse_kv("iso3")).prompt_bytes(2048) == 2 * 28 * 8 * 128 * 2048 * 2 == 234_881_024
    assert Footprint(layers, parse_kv("iso3,prefill=streaming")).prompt_bytes(2048) == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_are_those_that_the_quantiser_would_write(recipe: str) -> None:
    model = target("Qwen3.6-35B-A3B")
    items = plan_items(model.tensors, RECIPES[recipe], PackedConfig())
    weights = weigh(model.tensors, 40, RECIPES[recipe], None)
    assert weights.total == sum(item.nbytes for item in items)
    for role in weights.roles:
        assert role.planned == sum(item.nbytes for item in items if item.part.role is role.role)
    assert weights.routed == sum(role.planned for role in weights.roles if role.role is Role.ROUTED_EXPERT)


def tiny(**changes: Any) -> Model:
    """A small mixture of experts, all tensors stacked."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64,
        "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 65536, "dtype": "bfloat16", **changes,
    }  # fmt: skip
    return Model(config, tensors_of(config))


def singly(model: Model) -> Model:
    """The same with experts stored one by one, as most checkpoints have them."""
    tensors = []
    for tensor in model.tensors:
        if "experts." not in tensor.name:
            tensors.append(tensor)
            continue
        each = tensor.nbytes // tensor.shape[0]
        for number in range(tensor.shape[0]):
            name = tensor.name.replace("experts.", f"experts.{number}.") + ".weight"
            tensors.append(TensorInfo(name, "BF16", tensor.shape[1:], each, tensor.file))
    return Model(model.config, tensors)


def plan_of(model: Model, memory: int = 64 * GB, context: int = 4096, **more: Any) -> Plan:
    return make_plan(model, Request(memory, context, **more))


def test_experts_that_are_stored_one_by_one() -> None:
    stacked, single = plan_of(tiny()), plan_of(singly(tiny()))
    assert single.weights.experts == stacked.weights.experts
    assert single.weights.total == stacked.weights.total
    assert (stacked.memory.mapped, single.memory.mapped) == (0, stacked.weights.routed)
    assert single.memory.needed == stacked.memory.needed
    assert single.memory.peak == stacked.memory.peak + stacked.weights.routed


def test_what_a_model_does_not_load_is_left_out() -> None:
    model = tiny()
    extra = [
        TensorInfo("model.layers.4.eh_proj.weight", "BF16", (8, 8), 128, Path("x")),
        TensorInfo("mtp.fc.weight", "BF16", (8, 8), 128, Path("x")),
    ]
    weights = weigh([*model.tensors, *extra], 4, None, None)
    assert weights.left_out == 256
    assert weights.total == weigh(model.tensors, 4, None, None).total


def test_clients_share_weights_and_have_caches_of_their_own() -> None:
    one, four = plan_of(tiny()), plan_of(tiny(), clients=4)
    assert four.memory.caches == 4 * one.memory.caches == 4 * one.cache.total
    assert (four.memory.always, four.memory.prompt) == (one.memory.always, one.memory.prompt)
    assert one.paged.cycle < four.paged.cycle < 4 * one.paged.cycle


def test_experts_that_fit_are_resident() -> None:
    whole = plan_of(tiny())
    assert whole.paged.hit == 1
    assert whole.paged.ceiling(1e9) is None
    half = plan_of(tiny(), memory=whole.memory.needed - whole.weights.routed // 2)
    assert (half.paged.resident, half.paged.experts) == (32, 64)
    assert half.paged.cycle == 8 * whole.weights.largest_expert
    assert half.paged.ceiling(1e9) == pytest.approx(1e9 / (4 * whole.weights.largest_expert))
    assert half.fits_paged
    assert not half.fits
    assert not plan_of(tiny(), memory=whole.memory.with_experts(0).needed + half.paged.cycle // 2).fits_paged


def test_streaming_is_the_advice_where_the_prompt_breaks_the_budget() -> None:
    whole = plan_of(tiny(), context=60_000)
    short = plan_of(tiny(), whole.memory.needed - whole.memory.prompt // 2, 60_000)
    assert short.changes[0].text == "--kv iso3,prefill=streaming"
    assert short.changes[0].memory == whole.memory.needed - whole.memory.prompt
    assert all(change.memory <= short.request.memory for change in short.changes)
    assert not whole.changes


def apply(request: Request, text: str) -> Request:
    words = text.split()
    for name, value in zip(words[::2], words[1::2], strict=True):
        kind = type(getattr(request, name.removeprefix("--")))
        request = dataclasses.replace(request, **{name.removeprefix("--"): kind(value)})
    return request


@pytest.mark.parametrize("short", [0.999, 0.9, 0.75, 0.6, 0.5])
def test_every_advice_holds(short: float) -> None:
    """What is advised fits when it is asked for, and one more token or client would not."""
    whole = plan_of(tiny(), context=20_000, clients=8, kv="fp16")
    request = Request(round(whole.memory.needed * short), 20_000, 8, "fp16")
    plan = make_plan(tiny(), request)
    assert not plan.fits
    for change in plan.changes:
        better = make_plan(tiny(), apply(request, change.text))
        assert better.fits
        assert better.memory.needed == change.memory
        for name in ("clients", "context"):
            if change.text.startswith(f"--{name} "):
                more = dataclasses.replace(better.request, **{name: getattr(better.request, name) + 1})
                assert not make_plan(tiny(), more).fits
    if short >= 0.9:
        assert plan.changes


def test_share_of_attention() -> None:
    """By hand: 100 bytes of cache at 2 s, 3 layers of 10 s; 1000 bytes of weights at 1 s, 5 layers of 4 s, 2 of 5 s."""
    step = Step(weights=1000, cached=100, cached_by_head=400, attention_layers=3, layers=5, expert_layers=2)
    assert step.share(Rates(1, 2, False, 10, 4, 5)) == pytest.approx(230 / (230 + 1030))
    assert step.share(Rates(1, 2, True, 10, 4, 5)) == pytest.approx(830 / (830 + 1030))


def test_packing_pays_from_some_length_on() -> None:
    model = tiny()
    first = plan_of(model).pays_from
    assert first is not None
    assert plan_of(model, context=first).pays
    assert not plan_of(model, context=first - 1).pays
    assert plan_of(model, context=first).share(CPU) == pytest.approx(0.2, abs=0.005)


def test_refusals_name_the_field_the_value_and_a_way_out() -> None:
    model = tiny()
    for options, said in (
        ({"context": 0}, "--context=0 must be at least 1"),
        ({"clients": 0}, "--clients=0 must be at least 1"),
        ({"context": 70_000}, "--context=70000: the model has 65536 positions"),
        ({"recipe": "role-5"}, "--recipe 'role-5' is unknown or not known beforehand; valid: as-is, role-4-2-8"),
        ({"kv": "iso9"}, "kv='iso9' is unknown"),
    ):
        with pytest.raises(ConfigError, match=said):
            plan_of(model, **options)
    unknown = TensorInfo("model.layers.0.riddle.weight", "BF16", (4, 4), 32, Path("x"))
    with pytest.raises(UnsupportedModelError, match=r"'model.layers.0.riddle.weight'"):
        plan_of(Model(model.config, [*model.tensors, unknown]))
    without = {key: value for key, value in model.config.items() if key != "num_experts_per_tok"}
    with pytest.raises(ModelFileError, match="num_experts_per_tok is missing"):
        plan_of(Model({**without, "model_type": "llama"}, model.tensors))


def test_a_packed_checkpoint_is_planned_as_it_is() -> None:
    with pytest.raises(ConfigError, match=r"packed already .* use --recipe as-is"):
        weigh([], 1, recipe_named("uniform-4"), PackedConfig(recipe="role-4-2-8"))
