"""Headers of real checkpoints without their weights: names and shapes of the classes of transformers, on no device."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rotaryquant.models.roles import Role, roles_of
from rotaryquant.planning.checkpoint import Checkpoint, checkpoint
from rotaryquant.weights.headers import TensorInfo

CONFIGS = Path(__file__).resolve().parents[1] / "planning" / "configs"


def config_of(name: str) -> dict[str, Any]:
    """One of the four target models."""
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return found


def tensors_of(config: dict[str, Any]) -> list[TensorInfo]:
    """Tensors of a decoder, all in bf16; experts one by one, as files have them."""
    text = config.get("text_config", config)
    fields = {name: value for name, value in text.items() if name != "model_type"}
    made = AutoConfig.for_model(text["model_type"], **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if made.tie_word_embeddings:
        del shapes["lm_head.weight"]
    roles, found = roles_of(shapes), []
    for name, shape in shapes.items():
        if roles[name] is Role.ROUTED_EXPERT and len(shape) == 3:
            found += [_tensor(f"{_expert(name, index)}.weight", shape[1:]) for index in range(shape[0])]
        else:
            found.append(_tensor(name, shape))
    return found


def _expert(name: str, index: int) -> str:
    before, after = name.split("experts.")
    return f"{before}experts.{index}.{after}"


def _tensor(name: str, shape: tuple[int, ...]) -> TensorInfo:
    count = 1
    for size in shape:
        count *= size
    return TensorInfo(name, "BF16", shape, 2 * count, Path("model.safetensors"))


def target(name: str) -> Checkpoint:
    """A target model as the planner reads it."""
    config = config_of(name)
    return checkpoint(name, config, tensors_of(config), "safetensors")


def header_file(path: Path, tensors: list[TensorInfo]) -> None:
    """A safetensors file with these tensors whose data are a hole: it takes no room, and no reader of headers minds."""
    begin, entries = 0, {}
    for tensor in tensors:
        offsets = [begin, begin + tensor.nbytes]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        begin += tensor.nbytes
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + begin)
