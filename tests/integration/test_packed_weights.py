"""Checkpoints with packed weights of every family: quantised, loaded as transformers loads, saved, run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import rotaryquant
from rotaryquant import env
from rotaryquant.errors import ConfigError, ModelFileError, UnsupportedModelError
from rotaryquant.integrations.transformers.fingerprint import checkpoint_fingerprint
from rotaryquant.integrations.transformers.input_moments import InputMoments
from rotaryquant.integrations.transformers.output_projection import output_projection
from rotaryquant.integrations.transformers.packed_modules import PackedEmbedding, PackedExperts, PackedLinear
from rotaryquant.models.roles import Role, layer_number, roles_of
from rotaryquant.weights.conversion import convert
from rotaryquant.weights.headers import read_folder
from rotaryquant.weights.packed_config import PackedConfig
from rotaryquant.weights.recipes import RECIPES
from support.zoo import FAMILIES, build

QUANTISABLE = [name for name in FAMILIES if name != "gpt_oss"]  # its experts are stored transposed
IDS = torch.tensor([[1, 17, 201, 5, 88, 42, 9, 133, 64, 30, 7, 250]])


def quantise(name: str, folder: Path, recipe: str = "role-4-2-8", **base: Any) -> Path:
    """The family's tiny model, packed, with what it hears of random ids unless by rtn; returns the new folder."""
    model = build(name)
    model.save_pretrained(folder / "whole")
    config, tensors = PackedConfig(**base), read_folder(folder / "whole")
    windows = [torch.randint(3, 250, (300,), generator=torch.Generator().manual_seed(2))]
    moments = InputMoments(model, windows, roles_of(one.name for one in tensors), lambda *_: None)
    heard = moments if config.method != "rtn" else lambda _: None
    convert(folder / "whole", folder / recipe, RECIPES[recipe], config, heard, lambda *_: None)
    return folder / recipe


def load(folder: Path) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def unpacked(model: PreTrainedModel, like: PreTrainedModel) -> PreTrainedModel:
    """`like` with the weights that the packed model's codes stand for."""
    state = dict(like.state_dict())
    with torch.no_grad():
        for name, module in model.named_modules():
            for leaf in getattr(module, "_forms", {}):
                state[f"{name}.{leaf}"].copy_(module.unpacked(leaf))
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and name in state and state[name].shape == tensor.shape:
                state[name].copy_(tensor)
    return like


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("method", ["rtn", "awq"])
@pytest.mark.parametrize("family", QUANTISABLE)
def test_a_family_quantised_loaded_run_and_saved(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quantise(family, tmp_path, method=method)
    model = load(folder)
    expected = logits(unpacked(model, build(family)))
    # kernels may round inputs, which sends tokens of random routers to other experts
    monkeypatch.setattr(env, "kernel_override", lambda: "reference")
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    monkeypatch.undo()
    kinds = {type(module) for module in model.modules()}
    assert {PackedLinear, PackedEmbedding} <= kinds
    assert (PackedExperts in kinds) == (Role.ROUTED_EXPERT in roles_of(build(family).state_dict()).values())
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert torch.equal(logits(again), logits(model))
    stored, resaved = load_file(folder / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert any(key.endswith("_inputs") for key in stored) == (method == "awq")
    assert stored.keys() == resaved.keys()
    assert all(torch.equal(stored[key], resaved[key]) for key in stored)
    assert (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        == json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    )
    made = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert made.shape == (1, IDS.shape[1] + 4)


@pytest.mark.parametrize("family", QUANTISABLE)
def test_what_stays_as_it_is_is_bit_for_bit_what_it_was(family: str, tmp_path: Path) -> None:
    folder = quantise(family, tmp_path)
    whole, packed = load_file(tmp_path / "whole" / "model.safetensors"), load_file(folder / "model.safetensors")
    roles = roles_of(whole)
    for name, role in roles.items():
        if role in (Role.ROUTER, Role.SHARED_GATE, Role.NORM, Role.BIAS, Role.STATE):
            assert torch.equal(packed[name], whole[name]), name
            assert name + "_scale" not in packed
    rounded = {name for name in whole if name + "_scale" in packed}
    assert {roles[name] for name in rounded} == set(roles.values()) - {
        Role.ROUTER, Role.SHARED_GATE, Role.NORM, Role.BIAS, Role.STATE,
    }  # fmt: skip


@pytest.mark.parametrize("family", QUANTISABLE)
def test_a_whole_checkpoint_is_packed_while_it_is_loaded(family: str, tmp_path: Path) -> None:
    converted = load(quantise(family, tmp_path))
    config = rotaryquant.RotaryQuantConfig(recipe="role-4-2-8")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", dtype=torch.float32, quantization_config=config
    ).eval()
    assert torch.equal(logits(model), logits(converted))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(converted))
    own = [
        json.loads((tmp_path / one / "config.json").read_text())["quantization_config"]
        for one in ("saved", "role-4-2-8")
    ]
    assert own[0] == own[1]


def test_what_a_wrong_configuration_is_told() -> None:
    with pytest.raises(ConfigError, match="RotaryQuantConfig: bit is unknown; valid: recipe, grid, group, seed"):
        rotaryquant.RotaryQuantConfig(bit=4)
    with pytest.raises(ConfigError, match="recipe 'best' is unknown"):
        rotaryquant.RotaryQuantConfig(recipe="best")
    with pytest.raises(ConfigError, match="grid='cubic' is unknown"):
        rotaryquant.RotaryQuantConfig(grid="cubic")


ORDERS = {
    "ours first": "import rotaryquant; assert 'transformers' not in sys.modules; import transformers",
    "transformers first": "import transformers; import rotaryquant",
    "quantizers there already": "import transformers.quantizers.auto; import transformers; import rotaryquant",
}


@pytest.mark.parametrize("order", ORDERS)
def test_transformers_knows_packed_weights_in_whichever_order_both_are_imported(order: str, tmp_path: Path) -> None:
    """Elsewhere a packed checkpoint would be random numbers and a warning."""
    folder = quantise("qwen3_moe", tmp_path)
    load_it = (
        "model, info = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True); "
        "print(type(model.lm_head).__name__, len(info['missing_keys']), len(info['unexpected_keys']), sys.meta_path[0])"
    )
    code = f"import sys; {ORDERS[order]}; {load_it}"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PackedLinear 0 0")
    assert "_Note" not in done.stdout


def test_factors_come_to_the_inputs_that_they_are_of(tmp_path: Path) -> None:
    """Unpacked, every matrix is the one that was rounded: factors of one expert or matrix are not another's."""
    model, whole = load(quantise("qwen2_moe", tmp_path, "uniform-8", method="awq")), build("qwen2_moe")
    stored = load_file(tmp_path / "uniform-8" / "model.safetensors")
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    assert experts.up_inputs.shape == (64,)
    assert experts.down_proj_inputs.shape == (8, 32)
    assert not torch.equal(experts.down_proj_inputs[0], experts.down_proj_inputs[1])
    factors = [name for name in stored if name.startswith("model.layers.1.mlp.experts.") and "inputs" in name]
    assert sorted(factors) == sorted(
        [f"model.layers.1.mlp.experts.{number}.down_proj.weight_inputs" for number in range(8)]
        + ["model.layers.1.mlp.experts.up_inputs"]
    )
    for name, module in model.named_modules():
        for leaf in getattr(module, "_forms", {}):
            own = whole.get_parameter(f"{name}.{leaf}")
            assert float((module.unpacked(leaf) - own).detach().norm() / own.detach().norm()) < 0.015, name
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "uniform-8", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    saved = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(saved[key], stored[key]) for key in stored if key.endswith("_inputs"))


@pytest.mark.parametrize(("grid", "seed"), [("normal", None), ("uniform", 3), ("trellis", None)])
def test_other_grids(grid: str, seed: int | None, tmp_path: Path) -> None:
    model = load(quantise("qwen2_moe", tmp_path, grid=grid, seed=seed, group=32))
    expected = logits(unpacked(model, build("qwen2_moe")))
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_eight_bits_are_close_to_the_model_itself(tmp_path: Path) -> None:
    model, whole = load(quantise("glm4_moe", tmp_path, "uniform-8")), build("glm4_moe")
    difference = (logits(model) - logits(whole)).norm() / logits(whole).norm()
    assert float(difference) < 0.03


def test_bits_by_layer_survive_a_reload(tmp_path: Path) -> None:
    model = load(quantise("qwen3_moe", tmp_path, "role-4-2-8-edge"))
    bits = {
        layer_number(name): module.form("down_proj").bits
        for name, module in model.named_modules()
        if isinstance(module, PackedExperts)
    }
    assert bits == {0: 4, 1: 2, 2: 4}


def test_routers_choose_as_before(tmp_path: Path) -> None:
    """The router is not rounded: on the same hidden states it sends every token to the same experts."""
    whole, packed = build("qwen2_moe"), load(quantise("qwen2_moe", tmp_path))
    hidden = torch.randn(1000, 64)
    for a, b in zip(whole.modules(), packed.modules(), strict=False):
        if type(a).__name__.endswith("TopKRouter") and type(b) is type(a):
            assert all(map(torch.equal, a(hidden), b(hidden)))
    routers = [name for name, _ in packed.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(routers) == 3
    assert all(torch.equal(packed.get_parameter(name), whole.get_parameter(name)) for name in routers)


def test_a_shared_gate_of_zero_halves_the_shared_expert(tmp_path: Path) -> None:
    build("qwen2_moe").save_pretrained(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    for name in tensors:
        if name.endswith("shared_expert_gate.weight"):
            tensors[name] = torch.zeros_like(tensors[name])
        if ".experts." in name:
            tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    convert(tmp_path / "whole", tmp_path / "q", RECIPES["uniform-8"], PackedConfig(), lambda _: None, lambda *_: None)
    block: Any = load(tmp_path / "q").get_submodule("model.layers.0.mlp")
    hidden = torch.randn(1, 5, 64)
    with torch.no_grad():
        both, shared = block(hidden), block.shared_expert(hidden)
    found = both[0] if isinstance(both, tuple) else both
    torch.testing.assert_close(found.view_as(shared), 0.5 * shared)


def test_transposed_experts_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="stored transposed"):
        quantise("gpt_oss", tmp_path)
    assert not (tmp_path / "role-4-2-8").exists()


def test_a_configuration_that_does_not_fit_the_tensors_is_refused(tmp_path: Path) -> None:
    folder = quantise("qwen3_moe", tmp_path)
    config = json.loads((folder / "config.json").read_text())

    def changed(**fields: Any) -> None:
        own = {**config, "quantization_config": {**config["quantization_config"], **fields}}
        (folder / "config.json").write_text(json.dumps(own))

    changed(format_version=9)
    with pytest.raises(ModelFileError, match="format_version=9, this package reads 1"):
        load(folder)
    changed(bits={"attention": {"0": 5}})
    with pytest.raises(ModelFileError, match="bits of 5"):
        load(folder)
    changed(bits={**config["quantization_config"]["bits"], "shared expert": {"0": 8}})
    with pytest.raises(ModelFileError, match="bits of 'shared expert', but the model has no such tensor"):
        load(folder)
    changed(method="spqr")
    with pytest.raises(ModelFileError, match="method='spqr' is unknown; valid: rtn, gptq, awq"):
        load(folder)
    changed(grid="cubic")
    with pytest.raises(ModelFileError, match="grid='cubic' is unknown"):
        load(folder)


def test_a_cache_is_calibrated_for_the_packed_checkpoint_itself(tmp_path: Path) -> None:
    folder = quantise("glm4_moe", tmp_path)
    model, whole = load(folder), build("glm4_moe")
    projection: Any = model.get_submodule("model.layers.1.self_attn.o_proj")
    assert torch.equal(output_projection(model, 1), projection.unpacked())
    own = output_projection(whole, 1).detach()
    assert 0 < float((output_projection(model, 1) - own).norm() / own.norm()) < 0.15
    assert checkpoint_fingerprint(model) == checkpoint_fingerprint(load(folder))
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert checkpoint_fingerprint(half) == checkpoint_fingerprint(model)
    assert checkpoint_fingerprint(model) != checkpoint_fingerprint(whole)
    other = quantise("glm4_moe", tmp_path / "other", "uniform-4")
    assert checkpoint_fingerprint(load(other)) != checkpoint_fingerprint(model)


def test_embeddings_of_an_unknown_class_are_refused() -> None:
    class Odd(nn.Embedding):
        pass

    with pytest.raises(UnsupportedModelError, match="class Odd"):
        PackedEmbedding(Odd(4, 8), PackedConfig().form(16, 4), torch.float32)  # type: ignore[arg-type]
