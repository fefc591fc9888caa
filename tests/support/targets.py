"""The four models that this package is for: their config.json, and tensors of transformers' classes on no device."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from rotaryquant.integrations.transformers.quiet import quiet
from rotaryquant.planning.plan import Model
from rotaryquant.weights.headers import TensorInfo

FOLDER = Path(__file__).resolve().parents[1] / "planning" / "targets"
NAMES = ("Qwen3-30B-A3B", "Qwen3.6-35B-A3B", "Gemma-4-26B-A4B", "Nemotron-3-Super-120B")


def config_of(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return data


def tensors_of(config: dict[str, Any]) -> list[TensorInfo]:
    """Tensors of the decoder in bf16, as a checkpoint of the whole model has them (experts stacked)."""
    text = dict(config.get("text_config", config))
    with quiet(), torch.device("meta"):
        built = hf.AutoModelForCausalLM.from_config(hf.CONFIG_MAPPING[text.pop("model_type")](**text), dtype="bfloat16")
    tied = built.config.tie_word_embeddings
    return [
        TensorInfo(name, "BF16", tuple(tensor.shape), 2 * tensor.numel(), Path("model.safetensors"))
        for name, tensor in built.state_dict().items()
        if not (tied and name == "lm_head.weight")
    ]


@cache
def target(name: str) -> Model:
    config = config_of(name)
    return Model(config, tensors_of(config))
