"""How fast RoPE turns each coordinate of a key, asked of the model's own rotary module."""

import inspect
import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rotaryquant.errors import UnsupportedModelError
from rotaryquant.integrations.transformers.geometry import LayerGeometry, text_config


def angular_speeds(model: PreTrainedModel, layer_type: str) -> Tensor | None:
    """Radians per token of each rotated coordinate, fp32 [rotated], or None for a model without RoPE.

    Coordinates past the end are not rotated. Read from the angles at positions 0 and 1, so the order of the pairs
    (halves or neighbors) does not matter.
    """
    module = next((m for name, m in model.named_modules() if name.split(".")[-1] == "rotary_emb"), None)
    if module is None:
        return None
    parameter = next(model.parameters())
    x = torch.zeros(1, 2, 1, dtype=torch.float32, device=parameter.device)
    positions = torch.arange(2, device=parameter.device)[None]
    wanted = inspect.signature(module.forward).parameters
    arguments = {"layer_type": layer_type} if "layer_type" in wanted else {}
    with torch.no_grad():
        out = module(x, positions, **arguments)
    if not (isinstance(out, tuple) and len(out) == 2):
        raise UnsupportedModelError(
            f"{type(module).__name__} gives {type(out).__name__}, not (cos, sin): where RoPE turns keys is unknown; "
            f"use kv=...,mean=off for this model"
        )
    cos, sin = (part[0, 1].float().cpu() for part in out)
    speeds = torch.atan2(sin, cos).abs()
    # both coordinates of a pair turn together; gpt-oss gives one angle for the two, coordinate i and i + half
    halves = speeds.chunk(2)
    in_halves = len(speeds) % 2 == 0 and torch.allclose(halves[0], halves[1], rtol=1e-4)
    in_neighbors = len(speeds) % 2 == 0 and torch.allclose(speeds[0::2], speeds[1::2], rtol=1e-4)
    return speeds if in_halves or in_neighbors else torch.cat([speeds, speeds])


def slow_coordinates(model: PreTrainedModel, layers: list[LayerGeometry], period: int) -> dict[int, Tensor]:
    """For each packable layer, bool [head_dim]: coordinates that RoPE turns once in `period` tokens or slower."""
    found: dict[int, Tensor] = {}
    for layer in layers:
        if not layer.packable:
            continue
        speeds = angular_speeds(model, layer.layer_type)
        slow = torch.ones(layer.head_dim, dtype=torch.bool)
        if speeds is not None:
            if len(speeds) > layer.head_dim:
                raise UnsupportedModelError(
                    f"layer {layer.index}: RoPE turns {len(speeds)} coordinates of a key that has {layer.head_dim}; "
                    f"use kv=...,mean=off for this model"
                )
            slow[: len(speeds)] = speeds <= 2 * math.pi / period
        found[layer.index] = slow
    return found


#: Kinds of RoPE whose angles change once a context is longer than what the model was first made for.
_CHANGING = ("dynamic", "longrope")


def even_positions(model: PreTrainedModel) -> int:
    """Positions over which RoPE turns keys alike however long the context is, 0 for a model that names none."""
    config = text_config(model)
    most = int(getattr(config, "max_position_embeddings", 0) or 0)
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(part for part in given.values() if isinstance(part, dict))):
        if rope.get("rope_type") in _CHANGING:
            most = min(most, int(rope.get("original_max_position_embeddings") or most))
    return most
