"""Thirteen model families of transformers, tiny and with random weights.

They cover what real models do to a cache: plain grouped heads, sliding windows, several head widths in one
model, layers that share another layer's cache, recurrent state layers, learned sinks, latent attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from transformers import PretrainedConfig, PreTrainedModel

VOCAB = 256

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
_LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def _base(*without: str) -> dict[str, Any]:
    return {key: value for key, value in _BASE.items() if key not in without}


def _qwen2_moe() -> PretrainedConfig:
    return hf.Qwen2MoeConfig(
        **_base("head_dim"),
        **_EXPERTS,
        num_hidden_layers=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    )


def _qwen3_moe() -> PretrainedConfig:
    return hf.Qwen3MoeConfig(
        **_BASE, **_EXPERTS, num_hidden_layers=3, moe_intermediate_size=32, decoder_sparse_step=1, norm_topk_prob=True
    )


def _qwen3_next() -> PretrainedConfig:
    return hf.Qwen3NextConfig(
        **_BASE,
        **_EXPERTS,
        **_LINEAR,
        num_hidden_layers=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def _qwen3_5_moe() -> PretrainedConfig:
    return hf.Qwen3_5MoeTextConfig(
        **_BASE,
        **_EXPERTS,
        **_LINEAR,
        num_hidden_layers=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def _gemma4_moe() -> PretrainedConfig:
    return hf.Gemma4TextConfig(
        **_BASE,
        num_hidden_layers=6,
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=8,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=32,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=0,
    )


def _gemma4_kvshared() -> PretrainedConfig:
    return hf.Gemma4TextConfig(
        **_BASE,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        global_head_dim=64,
        sliding_window=8,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=3,
    )


def _nemotron_h() -> PretrainedConfig:
    blocks = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe", "full_attention"]
    return hf.NemotronHConfig(
        **_BASE,
        layers_block_type=blocks,
        ssm_state_size=16,
        mamba_num_heads=4,
        mamba_head_dim=32,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=8,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
        moe_latent_size=32,
        num_experts_per_tok=2,
    )


def _gpt_oss() -> PretrainedConfig:
    return hf.GptOssConfig(**_BASE, num_hidden_layers=4, num_local_experts=8, num_experts_per_tok=2, sliding_window=8)


def _glm4_moe() -> PretrainedConfig:
    return hf.Glm4MoeConfig(
        **_BASE,
        num_hidden_layers=3,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        use_qk_norm=True,
    )


def _olmoe() -> PretrainedConfig:
    return hf.OlmoeConfig(**_base("head_dim"), **_EXPERTS, num_hidden_layers=3)


def granite_hybrid(attention: tuple[int, ...] = (2,), layers: int = 4) -> PretrainedConfig:
    """A hybrid whose layers `attention` have keys and values and whose other layers are recurrent."""
    return hf.GraniteMoeHybridConfig(
        **_base("head_dim"),
        num_hidden_layers=layers,
        layer_types=["attention" if index in attention else "mamba" for index in range(layers)],
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=16,
        position_embedding_type="rope",
    )


def _deepseek(config: type[PretrainedConfig], **extra: Any) -> PretrainedConfig:
    return config(
        **_base("head_dim", "num_key_value_heads"),
        num_key_value_heads=4,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        **extra,
    )


@dataclass(frozen=True)
class Family:
    """One family: model class, its tiny configuration, and which attention of transformers is the reference."""

    cls: type[PreTrainedModel]
    config: Callable[[], PretrainedConfig]
    stock: str = "sdpa"


FAMILIES: dict[str, Family] = {
    "qwen2_moe": Family(hf.Qwen2MoeForCausalLM, _qwen2_moe),
    "qwen3_moe": Family(hf.Qwen3MoeForCausalLM, _qwen3_moe),
    "qwen3_next": Family(hf.Qwen3NextForCausalLM, _qwen3_next),
    "qwen3_5_moe": Family(hf.Qwen3_5MoeForCausalLM, _qwen3_5_moe),
    "gemma4_moe": Family(hf.Gemma4ForCausalLM, _gemma4_moe),
    "gemma4_kvshared": Family(hf.Gemma4ForCausalLM, _gemma4_kvshared),
    "nemotron_h": Family(hf.NemotronHForCausalLM, _nemotron_h),
    "gpt_oss": Family(hf.GptOssForCausalLM, _gpt_oss, "eager"),  # sdpa refuses its learned sinks
    "glm4_moe": Family(hf.Glm4MoeForCausalLM, _glm4_moe),
    "olmoe": Family(hf.OlmoeForCausalLM, _olmoe),
    "granitemoehybrid": Family(hf.GraniteMoeHybridForCausalLM, granite_hybrid),
    "deepseek_v2": Family(
        hf.DeepseekV2ForCausalLM, lambda: _deepseek(hf.DeepseekV2Config, q_lora_rank=None, topk_method="greedy")
    ),
    "deepseek_v3": Family(hf.DeepseekV3ForCausalLM, lambda: _deepseek(hf.DeepseekV3Config, q_lora_rank=48)),
}

#: Families with latent attention, which the packed layers do not hold.
LATENT = ("deepseek_v2", "deepseek_v3")
PACKABLE = tuple(name for name in FAMILIES if name not in LATENT)


def sharpen(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """Weights large enough that the top token leads clearly and every layer matters; in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "conv1d" not in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (1.2 / parameter.shape[-1] ** 0.5))
    return model


def build(name: str, seed: int = 1) -> PreTrainedModel:
    """The tiny model of a family, on its stock attention, sharpened, in fp32 and in eval mode."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = sharpen(family.cls(family.config()).eval(), seed)
    model.set_attn_implementation(family.stock)
    return model
