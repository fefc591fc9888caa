"""The layer from the definition: token by token, expert by expert, on unpacked weights."""

import torch
from torch import Tensor

from rotaryquant.ops.dequant_matmul import dequantize, rotate_inputs
from rotaryquant.ops.expert_matmul import Gate
from rotaryquant.ops.weights import PackedWeight


def unsupported(
    x: Tensor, experts: Tensor, weights: Tensor, first: PackedWeight, second: PackedWeight, gate: Gate
) -> str | None:
    """Takes every call."""
    return None


def run(x: Tensor, experts: Tensor, weights: Tensor, first: PackedWeight, second: PackedWeight, gate: Gate) -> Tensor:
    """[tokens, rows of second] in x's dtype."""
    out = torch.zeros(len(x), second.shape[-2], dtype=torch.float32, device=x.device)
    rotated = rotate_inputs(x, first.codec.format).float()
    for token, chosen in enumerate(experts.tolist()):
        for place, expert in enumerate(chosen):
            if 0 <= expert < len(first.codes):
                up = dequantize(first[expert]) @ rotated[token]
                inner = gate.apply(up[None].to(x.dtype))
                down = rotate_inputs(inner, second.codec.format).float() @ dequantize(second[expert]).mT
                out[token] += down[0] * weights[token, place].float()
    return out.to(x.dtype)
