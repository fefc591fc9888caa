"""A stress model for low-bit keys: SmolLM2-135M with key biases of hundreds in its first and last layer.

Qwen2.5 checkpoints have key-projection biases of norm 600 to 900 there (llama.cpp issue 21385), and lose all sense
at 3 bits. The same is planted here: each KV head of the two layers gets a bias, most of it on pairs of channels that
RoPE turns slowly (a constant, which a mean removes) and a share on a pair that turns within a few hundred tokens
(which a mean cannot remove). The model stays itself: perplexity on real text remains plausible.

    python benchmarks/make_stress_model.py MODEL_FOLDER OUT_FOLDER --norm 300 --fast-share 0.02
"""

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

#: Channel pairs (i, i + half) of a 64-wide head at theta 1e5 by how RoPE turns them: periods in tokens about
#: 150,000 to 500,000 and about 320.
_SLOW_PAIRS = (28, 29, 30, 31)
_FAST_PAIR = 11


def plant_biases(model: torch.nn.Module, norm: float, fast_share: float) -> None:
    """Add key biases to the first and the last layer in place.

    norm: of each KV head's bias in the first layer; the last layer's is half as large again. fast_share: share of
    the bias' energy on the fast pair.
    """
    layers = model.model.layers
    generator = torch.Generator().manual_seed(0)
    for layer, size in ((layers[0], norm), (layers[-1], 1.5 * norm)):
        attention = layer.self_attn
        width = attention.head_dim
        bias = torch.zeros(attention.k_proj.out_features // width, width)
        for head in bias:
            slow = [c for pair in _SLOW_PAIRS for c in (pair, pair + width // 2)]
            direction = torch.randn(len(slow), generator=generator)
            head[slow] = direction / direction.norm() * size * math.sqrt(1 - fast_share)
            head[_FAST_PAIR] = size * math.sqrt(fast_share)
        attention.k_proj.bias.data.copy_(bias.flatten())


def main() -> None:
    """Write the stress model next to its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--norm", type=float, default=300.0)
    parser.add_argument("--fast-share", type=float, default=0.02)
    args = parser.parse_args()
    config = AutoConfig.from_pretrained(args.model)
    config.attention_bias = True
    model, info = AutoModelForCausalLM.from_pretrained(args.model, config=config, output_loading_info=True)
    for name, parameter in model.named_parameters():
        if name in info["missing_keys"]:
            if not name.endswith("_proj.bias"):
                raise SystemExit(f"{args.model}: {name} is missing; this is made for SmolLM2-135M")
            parameter.data.zero_()
    plant_biases(model, args.norm, args.fast_share)
    model.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)


if __name__ == "__main__":
    main()
