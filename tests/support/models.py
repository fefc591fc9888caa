"""Llama-like models of the failure cases, and configurations that lose nothing."""

import dataclasses
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from rotaryquant import KVCacheConfig
from support.zoo import sharpen

VOCAB = 512

#: Stores exact values through the whole packed path: rotation, blocks, tail, sinks and means are all in play.
LOSSLESS = KVCacheConfig("lossless", key_bits=32, value_bits=32)
#: The same with every token packed at once and read back from blocks.
LOSSLESS_STRICT = dataclasses.replace(LOSSLESS, name="lossless-strict", sinks=0, tail=0, mean=False, protect=False)

#: Named lossless configurations: each rule on and off.
LOSSLESS_VARIANTS: dict[str, KVCacheConfig] = {
    "default": LOSSLESS,
    "strict": LOSSLESS_STRICT,
    "plain": dataclasses.replace(LOSSLESS_STRICT, name="lossless-plain", rotation="none"),
    "no-tail": dataclasses.replace(LOSSLESS, name="lossless-no-tail", tail=0),
    "short-tail": dataclasses.replace(LOSSLESS, name="lossless-short-tail", tail=1),
    "no-sinks": dataclasses.replace(LOSSLESS, name="lossless-no-sinks", sinks=0),
    "mean-always": dataclasses.replace(LOSSLESS, name="lossless-mean", tau=0.0),
    "streaming": dataclasses.replace(LOSSLESS, name="lossless-streaming", prefill="streaming"),
}


def tiny(**fields: Any) -> PreTrainedModel:
    """Random Llama-like model: 2 layers, vocabulary 512, 4 query and 2 KV heads of 64, with `fields` changed."""
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    return sharpen(hf.LlamaForCausalLM(hf.LlamaConfig(**{**defaults, **fields})).eval())


def tiny_moe(**fields: Any) -> PreTrainedModel:
    """`tiny` with 8 experts of width 64, top-2, and one shared expert."""
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    return sharpen(hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**{**defaults, **fields})).eval())


def random_tokens(rows: int, columns: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    """Token ids int64 [rows, columns], none of them special."""
    return torch.randint(3, vocab, (rows, columns), generator=torch.Generator().manual_seed(seed))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| over all values, in fp64; infinite where either is not finite."""
    if not (torch.isfinite(got).all() and torch.isfinite(want).all()):
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm())
