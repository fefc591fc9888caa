"""A GGUF file of glm4moe-70m as a model folder, so that its weights are measured in the same harness as ours.

    python benchmarks/gguf_peer.py glm4moe-70m-Q2_K.gguf glm4moe-70m OUT
    rotaryquant eval fidelity OUT --reference glm4moe-70m --kv fp16 --text FILE --context 2048 --tokens 20000

transformers has no reader for GGUF files of this family. The file itself comes from llama.cpp: convert_hf_to_gguf.py
with any pre-tokenizer (tokens are not read from it), then llama-quantize. Every tensor is held against the one it
stands for; one that differs by more than a quarter of its square means that a name or a layout was mistaken.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

#: Squared error over the square of a tensor from which on it is taken for another one.
MISTAKEN = 0.25

IN_LAYER = {
    "self_attn.q_proj.weight": "attn_q.weight", "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight", "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight",
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.{side}_proj.weight": f"ffn_{side}.weight" for side in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{side}_proj.weight": f"ffn_{side}_shexp.weight" for side in ("gate", "up", "down")},
}  # fmt: skip
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def source_of(name: str) -> tuple[str, int | None]:
    """The tensor of a GGUF file that holds one of a folder, and which of a stack it is."""
    if name in OUTSIDE:
        return OUTSIDE[name], None
    found = LAYER.fullmatch(name)
    if found is None:
        raise SystemExit(f"{name}: not a tensor of glm4moe-70m")
    layer, tail = found.groups()
    if expert := EXPERT.fullmatch(tail):
        return f"blk.{layer}.ffn_{expert[2]}_exps.weight", int(expert[1])
    return f"blk.{layer}.{IN_LAYER[tail]}", None


def main() -> None:
    """Write the folder, fp32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("like", type=Path, help="folder of the model that the file was made of")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    stored = {tensor.name: tensor for tensor in GGUFReader(args.gguf).tensors}
    whole: dict[str, Tensor] = {}
    with safe_open(args.like / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - a file is no mapping
            source, number = source_of(name)
            wanted = file.get_tensor(name).float()
            values = dequantize(stored[source].data, stored[source].tensor_type).astype(np.float32)
            found = torch.from_numpy(values if number is None else values[number]).reshape(wanted.shape).clone()
            error = float((found - wanted).square().sum() / wanted.square().sum().clamp(min=1e-30))
            if error > MISTAKEN:
                raise SystemExit(f"{name}: {source} differs from it by {error:.2f} of its square")
            whole[name] = found
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(whole, args.out / "model.safetensors", {"format": "pt"})
    for path in args.like.glob("*.json"):
        shutil.copyfile(path, args.out / path.name)
    config = json.loads((args.out / "config.json").read_text())
    (args.out / "config.json").write_text(json.dumps(config | {"dtype": "float32", "torch_dtype": "float32"}))
    print(f"{sum(tensor.n_bytes for tensor in stored.values()):,} bytes of tensors in {args.gguf.name}")


if __name__ == "__main__":
    main()
