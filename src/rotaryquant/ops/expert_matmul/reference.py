"""The layer from the definition: token by token, expert by expert, on unpacked weights."""

import torch
from torch import Tensor

from rotaryquant.ops.dequant_matmul import dequantize
from rotaryquant.ops.expert_matmul import Gate
from rotaryquant.ops.weights import PackedWeight, rotate_inputs, round_inputs


def unsupported(
    x: Tensor, experts: Tensor, weights: Tensor, first: PackedWeight, second: PackedWeight, gate: Gate
) -> str | None:
    """Takes every call."""
    return None


def run(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    first: PackedWeight,
    second: PackedWeight,
    gate: Gate,
    rounded: tuple[bool, bool] = (False, False),
) -> Tensor:
    """[tokens, rows of second] in x's dtype. rounded: whether inputs of each product are, as some kernels take them."""
    out = torch.zeros(len(x), second.shape[-2], dtype=torch.float32, device=x.device)
    for token, chosen in enumerate(experts.tolist()):
        for place, expert in enumerate(chosen):
            if 0 <= expert < len(first.codes):
                up = _product(x[token : token + 1], first[expert], rounded[0])
                down = _product(gate.apply(up.to(x.dtype)), second[expert], rounded[1])
                out[token] += down[0] * weights[token, place].float()
    return out.to(x.dtype)


def _product(x: Tensor, weight: PackedWeight, rounded: bool) -> Tensor:
    """fp32 [tokens, rows]."""
    inputs = rotate_inputs(x, weight.codec.format).float()
    if rounded:
        inputs = round_inputs(inputs, weight.codec.format)
    return inputs @ dequantize(weight).mT
