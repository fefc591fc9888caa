"""Roles of real names: of the thirteen families, as files and as modules have them, and of names that mislead."""

from pathlib import Path

import pytest
from tests.support.zoo import FAMILIES, build

from rotaryquant.errors import UnsupportedModelError
from rotaryquant.models.roles import KEPT, Role, grouped, layer_number, roles_of
from rotaryquant.weights.headers import read_folder

#: What a decoder has, with a head of its own.
DECODER = {Role.EMBEDDING, Role.HEAD, Role.ATTENTION, Role.NORM}
ROUTED = {Role.ROUTED_EXPERT, Role.ROUTER}
SHARED = {*ROUTED, Role.SHARED_EXPERT}
RECURRENT = {Role.STATE_SPACE, Role.STATE}

#: Roles of the tensors in a family's file.
EXPECTED: dict[str, set[Role]] = {
    "qwen2_moe": {*DECODER, *SHARED, Role.SHARED_GATE, Role.BIAS},
    "qwen3_moe": {*DECODER, *ROUTED},
    "qwen3_next": {*DECODER, *SHARED, *RECURRENT, Role.SHARED_GATE},
    "qwen3_5_moe": {*DECODER, *SHARED, *RECURRENT, Role.SHARED_GATE},
    "gemma4_moe": {*DECODER, *SHARED} - {Role.HEAD},
    "gemma4_kvshared": {*DECODER, Role.DENSE_MLP, Role.PER_LAYER_INPUT} - {Role.HEAD},
    "nemotron_h": {*DECODER, *SHARED, *RECURRENT, Role.DENSE_MLP, Role.LATENT_PROJECTION},
    "gpt_oss": {*DECODER, *ROUTED, Role.BIAS},
    "glm4_moe": {*DECODER, *SHARED, Role.DENSE_MLP},
    "olmoe": {*DECODER, *ROUTED},
    "granitemoehybrid": {*DECODER, *SHARED, *RECURRENT},
    "deepseek_v2": {*DECODER, *SHARED, Role.DENSE_MLP, Role.LATENT_ATTENTION},
    "deepseek_v3": {*DECODER, *SHARED, Role.DENSE_MLP, Role.LATENT_ATTENTION},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_family_has_a_role_in_its_file_and_in_its_modules(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    stored = roles_of(tensor.name for tensor in read_folder(tmp_path))
    assert set(stored.values()) == EXPECTED[family]
    modules = roles_of(model.state_dict())
    assert set(modules.values()) - {Role.HEAD} == EXPECTED[family] - {Role.HEAD}  # a tied head is a module alone
    for name, role in stored.items():
        if name in modules:
            assert modules[name] is role, name


#: What is easily taken for something else, each with what it is.
NAMES = {
    "model.layers.1.mlp.gate.weight": Role.ROUTER,
    "model.layers.1.mlp.gate_proj.weight": Role.DENSE_MLP,
    "backbone.layers.1.mixer.out_proj.weight": Role.STATE_SPACE,
    "backbone.layers.1.mixer.o_proj.weight": Role.ATTENTION,
    "model.layers.1.router.weight": Role.ROUTER,
    "model.layers.1.router.proj.weight": Role.ROUTER,
    "model.layers.1.block_sparse_moe.gate.weight": Role.ROUTER,
    "model.layers.1.block_sparse_moe.router.layer.weight": Role.ROUTER,
    "backbone.layers.1.mixer.gate.weight": Role.ROUTER,
    "backbone.layers.1.mixer.gate.e_score_correction_bias": Role.ROUTER,
    "model.layers.1.feed_forward.router.weight": Role.ROUTER,
    "model.layers.2.mlp.shared_expert_gate.weight": Role.SHARED_GATE,
    "backbone.layers.1.mixer.norm.weight": Role.NORM,
    "backbone.layers.1.mixer.in_proj.weight": Role.STATE_SPACE,
    "model.layers.1.linear_attn.in_proj_ba.weight": Role.STATE,
    "model.language_model.layers.1.self_attn.q_proj.weight": Role.ATTENTION,
    "model.language_model.embed_tokens.weight": Role.EMBEDDING,
    "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight": Role.OTHER_INPUT,
    "model.embed_vision.embedding_projection.weight": Role.OTHER_INPUT,
    "mtp.layers.0.self_attn.q_proj.weight": Role.ATTENTION,
    "model.layers.1.self_attn.q_proj.bias": Role.BIAS,
    "blk.0.attn_q.weight": Role.ATTENTION,
    "token_embd.weight": Role.EMBEDDING,
    "output_norm.weight": Role.NORM,
    "output.weight": Role.HEAD,
}


def test_names_that_mislead() -> None:
    assert roles_of(NAMES) == NAMES


def test_experts_of_any_parent_with_or_without_gates() -> None:
    for parent in ("mlp", "mixer", "block_sparse_moe", "feed_forward"):
        for leaf in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"):
            assert roles_of([name := f"model.layers.3.{parent}.experts.17.{leaf}.weight"]) == {name: Role.ROUTED_EXPERT}
    for leaf in ("gate_up_proj", "up_proj", "down_proj"):
        assert roles_of([name := f"model.layers.3.mixer.experts.{leaf}"]) == {name: Role.ROUTED_EXPERT}


def test_what_runs_beside_experts_is_shared_and_what_is_called_shared_alone_is_dense() -> None:
    gemma = [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.experts.down_proj",
        "model.layers.1.mlp.up_proj.weight",
    ]
    assert list(roles_of(gemma).values()) == [Role.SHARED_EXPERT, Role.ROUTED_EXPERT, Role.DENSE_MLP]
    assert list(roles_of(["model.layers.0.shared_mlp.input_linear.weight"]).values()) == [Role.DENSE_MLP]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.mlp.router_projection.weight",
        "model.layers.0.mlp.gates.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "score.weight",
        "weight",
        "",
    ],
)
def test_a_name_that_no_rule_knows_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"tensor '{name}': no rule") as error:
        roles_of(["model.embed_tokens.weight", name])
    assert "models.roles" in str(error.value)
    with pytest.raises(UnsupportedModelError, match="and 1 more"):
        roles_of([name, name + "x.y"])


def test_what_stays_as_it_is() -> None:
    assert {Role.ROUTER, Role.SHARED_GATE, Role.NORM, Role.BIAS, Role.STATE} <= KEPT
    assert not KEPT & {Role.ATTENTION, Role.ROUTED_EXPERT, Role.SHARED_EXPERT, Role.DENSE_MLP, Role.HEAD}


def test_layers_and_groups() -> None:
    assert layer_number("model.language_model.layers.17.mlp.experts.3.up_proj.weight") == 17
    assert layer_number("blk.9.ffn_up.weight") == 9
    assert layer_number("lm_head.weight") is None
    roles = roles_of(["lm_head.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"])
    assert grouped(roles) == {
        Role.HEAD: ["lm_head.weight"],
        Role.DENSE_MLP: ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"],
    }
