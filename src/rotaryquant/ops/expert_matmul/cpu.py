"""Expert after expert that any token goes to, by the native products of `dequant_matmul`."""

import torch
from torch import Tensor

from rotaryquant.ops import native
from rotaryquant.ops.dequant_matmul import cpu as products
from rotaryquant.ops.expert_matmul import Gate
from rotaryquant.ops.native import missing as missing
from rotaryquant.ops.weights import PackedWeight


def unsupported(
    x: Tensor, experts: Tensor, weights: Tensor, first: PackedWeight, second: PackedWeight, gate: Gate
) -> str | None:
    """Why the native kernel cannot take this call, or None."""
    if reason := native.not_on_cpu(experts=experts, weights=weights):
        return reason
    return products.unsupported(x, first) or products.unsupported(x, second)


def run(x: Tensor, experts: Tensor, weights: Tensor, first: PackedWeight, second: PackedWeight, gate: Gate) -> Tensor:
    """[tokens, rows of second] in x's dtype."""
    out = torch.zeros(len(x), second.shape[-2], dtype=torch.float32)
    for expert in torch.unique(experts).tolist():
        if not 0 <= expert < len(first.codes):  # elsewhere
            continue
        token, place = torch.where(experts == expert)
        inner = gate.apply(products.multiply(x[token], first, expert).to(x.dtype))
        down = products.multiply(inner, second, expert)
        out.index_add_(0, token, down * weights[token, place, None].float())
    return out.to(x.dtype)
