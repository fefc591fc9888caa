"""Moments of inputs that a model hears: in every family, against hooks, with starved and silent experts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rotaryquant.errors import ConfigError
from rotaryquant.integrations.transformers import input_moments
from rotaryquant.integrations.transformers.input_moments import InputMoments
from rotaryquant.models.roles import KEPT, Role, roles_of
from rotaryquant.weights.headers import read_folder
from support.zoo import FAMILIES, build

HEARD = [name for name in FAMILIES if name != "gpt_oss"]
WINDOWS = [torch.randint(3, 250, (200,), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def names_of(model: PreTrainedModel, folder: Path) -> dict[str, Role]:
    model.save_pretrained(folder)
    tensors = read_folder(folder)
    roles = roles_of(tensor.name for tensor in tensors)
    return {tensor.name: roles[tensor.name] for tensor in tensors if len(tensor.shape) in (2, 3)}


def listen(model: PreTrainedModel, names: dict[str, Role]) -> InputMoments:
    return InputMoments(model, WINDOWS, names, lambda *_: None)


@pytest.mark.parametrize("family", HEARD)
def test_every_matrix_that_is_rounded_is_heard(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_moments, "LEAST_TOKENS", 1)
    model = build(family)
    names = names_of(model, tmp_path)
    moments = listen(model, names)
    shapes = {tensor.name: tensor.shape for tensor in read_folder(tmp_path)}
    for name, role in names.items():
        if role in KEPT:
            continue
        found = moments(name)
        if found is None:
            assert role in (Role.EMBEDDING, Role.PER_LAYER_INPUT), name
            continue
        width = shapes[name][-1]
        assert found.shape == ((shapes[name][0], width, width) if len(shapes[name]) == 3 else (width, width)), name
        assert bool(torch.isfinite(found).all())
        assert float(found.diagonal(dim1=-2, dim2=-1).sum(-1).min()) > 0, name


def test_a_linear_layer_is_heard_as_a_hook_hears_it(tmp_path: Path) -> None:
    model = build("glm4_moe")
    names = names_of(model, tmp_path)
    heard: list[Tensor] = []
    projection = model.get_submodule("model.layers.1.self_attn.o_proj")
    handle = projection.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0].flatten(0, -2)))
    with torch.inference_mode():
        for ids in WINDOWS:
            model(ids[None], use_cache=False)
    handle.remove()
    rows = torch.cat(heard)
    moments = listen(model, names)
    found = moments("model.layers.1.self_attn.o_proj.weight")
    assert found is not None
    torch.testing.assert_close(found, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)
    assert moments.heard["model.layers.1.self_attn.o_proj.weight"] == 400


@pytest.mark.parametrize("family", ["glm4_moe", "nemotron_h", "granitemoehybrid"])
def test_listening_changes_nothing_and_leaves_nothing_behind(family: str, tmp_path: Path) -> None:
    model = build(family)
    names = names_of(model, tmp_path)
    with torch.inference_mode():
        before = model(WINDOWS[0][None], use_cache=False).logits
    moments = listen(model, names)
    name = next(name for name, role in names.items() if role is Role.ROUTED_EXPERT)
    moments._stretch = moments._next_stretch(0)
    with moments._listening(), torch.inference_mode():
        during = model(WINDOWS[0][None], use_cache=False).logits
    torch.testing.assert_close(during, before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))
    moments._stretch = []
    moments(name)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules() if isinstance(module, nn.Linear))


def only_to_two(model: PreTrainedModel) -> None:
    """Send every token of every layer to experts 0 and 1."""
    for name, module in model.named_modules():
        if name.endswith("mlp.gate") and hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.data[:2] = 100.0


def test_starved_experts_fall_back_to_all_tokens_and_are_named(tmp_path: Path) -> None:
    model = build("glm4_moe")
    only_to_two(model)
    names = names_of(model, tmp_path)
    moments = listen(model, names)
    found = [moments(f"model.layers.1.mlp.experts.{expert}.up_proj.weight") for expert in range(8)]
    inner = [moments(f"model.layers.1.mlp.experts.{expert}.down_proj.weight") for expert in range(8)]
    assert all(one is not None and bool(torch.isfinite(one).all()) for one in (*found, *inner))
    assert moments.starved == {f"model.layers.1.mlp.experts.{expert}": 0 for expert in range(2, 8)}
    assert all(torch.equal(one, found[2]) for one in found[3:])
    assert not torch.equal(inner[0], inner[1])
    assert moments.heard["model.layers.1.mlp.experts.0.up_proj.weight"] == 400


def test_what_all_experts_get_is_heard_by_its_own_name(tmp_path: Path) -> None:
    model = build("granitemoehybrid")
    heard: list[Tensor] = []
    experts = model.get_submodule("model.layers.1.block_sparse_moe.experts")
    handle = experts.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0].flatten(0, -2)))
    with torch.inference_mode():
        for ids in WINDOWS:
            model(ids[None], use_cache=False)
    handle.remove()
    rows = torch.cat(heard)
    moments = listen(model, names_of(model, tmp_path))
    found = moments("model.layers.1.block_sparse_moe.experts.up_inputs")
    assert found is not None
    torch.testing.assert_close(found, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)
    assert moments.heard["model.layers.1.block_sparse_moe.experts.up_inputs"] == len(rows) == 400


def test_an_expert_with_a_few_tokens_is_starved_too(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    names = names_of(model, tmp_path)
    moments = InputMoments(model, [WINDOWS[0][:40]], names, lambda *_: None)
    found = [moments(f"model.layers.0.mlp.experts.{expert}.gate_proj.weight") for expert in range(8)]
    assert all(one is not None and torch.equal(one, found[0]) for one in found)
    assert len(moments.starved) == 8
    assert sum(moments.starved.values()) == 40 * 2
    assert max(moments.starved.values()) < input_moments.LEAST_TOKENS


def test_a_stack_is_told_by_the_expert_that_got_the_fewest(tmp_path: Path) -> None:
    model = build("gemma4_moe")
    names = names_of(model, tmp_path)
    moments = InputMoments(model, [WINDOWS[0][:40]], names, lambda *_: None)
    moments("model.layers.0.experts.gate_up_proj")
    got = [moments._tokens("model.layers.0.experts", 0, expert) for expert in range(8)]
    assert len(set(got)) > 1
    assert moments.heard["model.layers.0.experts.gate_up_proj"] == min(got)
    assert moments.starved == {f"model.layers.0.experts.{expert}": tokens for expert, tokens in enumerate(got)}


def test_layers_that_do_not_fit_together_are_heard_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("qwen3_moe")
    names = names_of(model, tmp_path)
    wanted = [name for name, role in names.items() if role is Role.ATTENTION]
    together = listen(model, names)
    expected = {name: together(name) for name in wanted}
    assert together._stretch == [0, 1, 2]
    monkeypatch.setattr(input_moments, "_HELD_BYTES", 1)
    apart = listen(model, names)
    for name in sorted(wanted):
        found, want = apart(name), expected[name]
        assert found is not None and want is not None  # noqa: PT018
        assert torch.equal(found, want)
        assert len(apart._stretch) == 1


def test_no_text_and_nothing_heard_are_errors(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    names = names_of(model, tmp_path)
    with pytest.raises(ConfigError, match="too short for a single window"):
        InputMoments(model, [], names, lambda *_: None)
    deaf = listen(model, names | {"model.layers.0.self_attn.z_proj.weight": Role.ATTENTION})
    with pytest.raises(ConfigError, match=r"no module of the model is '0.self_attn.z_proj'"):
        deaf("model.layers.0.self_attn.z_proj.weight")
    silent = listen(model, names)
    silent._stretch = [0]  # as if a forward had passed the layer by
    with pytest.raises(ConfigError, match=r"no input of 'model.layers.0.self_attn.q_proj.weight' was heard"):
        silent("model.layers.0.self_attn.q_proj.weight")
