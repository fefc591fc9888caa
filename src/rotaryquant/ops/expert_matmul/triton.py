"""One launch a step for all experts of up to `MOST` tokens, and nothing that waits for the GPU; beyond that experts'
weights are unpacked for a grouped product.

inputs → bytes | first products | gate, rotation, bytes | second products | weighted sums
"""

import torch
from torch import Tensor

from rotaryquant.ops import triton_weights as programs
from rotaryquant.ops.expert_matmul import Gate
from rotaryquant.ops.triton_weights import missing as missing
from rotaryquant.ops.weights import PackedWeight, rotate_inputs

#: Entries (tokens times experts of each) that are multiplied as codes are decoded.
MOST = 1024

#: Tokens of an expert that share one decoding.
TOGETHER = programs.TILE_TOKENS


def unsupported(
    x: Tensor, experts: Tensor, weights: Tensor, first: PackedWeight, second: PackedWeight, gate: Gate
) -> str | None:
    """Why this kernel cannot take the call, or None."""
    if experts.device != x.device or weights.device != x.device:
        return f"experts on {experts.device} and weights on {weights.device}, x on {x.device}"
    return programs.unsupported(x, first, second)


def run(x: Tensor, experts: Tensor, weights: Tensor, first: PackedWeight, second: PackedWeight, gate: Gate) -> Tensor:
    """[tokens, rows of second] in x's dtype."""
    x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
    out = torch.empty(len(x), second.shape[-2], dtype=x.dtype, device=x.device)
    if not experts.numel():
        return out.zero_()
    ready = programs.decodable(first.codec.format) and programs.decodable(second.codec.format)
    parts = (_few if ready and experts.numel() <= MOST else _many)(x, experts, first, second, gate)
    programs.combine(parts, experts, weights, len(first.codes), out)
    return out


def _few(x: Tensor, experts: Tensor, first: PackedWeight, second: PackedWeight, gate: Gate) -> Tensor:
    """Products of each of a token's experts, fp32 [tokens · k, rows of second]; of experts elsewhere nothing."""
    tokens, k = experts.shape
    count, digits = len(first.codes), programs.digits_of(x)
    if tokens == 1:
        items = programs.Items(count, experts.view(-1), k)
        later = programs.Items(count, experts.view(-1), 1)
    else:
        items = programs.plan(experts, count, k, TOGETHER)
        later = programs.Items(count, items.index, 1, items.order, items.count)
    up = torch.empty(tokens * k, first.shape[-2], dtype=x.dtype, device=x.device)
    inputs = programs.prepare(x, first, digits=digits)
    programs.multiply(inputs, first, up, programs.tile_of(first, digits, tokens), items)
    if gate.fused in programs.FUSED:
        inner = programs.prepare(up, second, gate=str(gate.fused), digits=digits)
    else:
        inner = programs.prepare(gate.apply(up).contiguous(), second, digits=digits)
    parts = torch.empty(tokens * k, second.shape[-2], dtype=torch.float32, device=x.device)
    programs.multiply(inner, second, parts, programs.tile_of(second, digits, tokens), later)
    return parts


def _many(x: Tensor, experts: Tensor, first: PackedWeight, second: PackedWeight, gate: Gate) -> Tensor:
    """The same of any number of tokens, [tokens · k, rows of second] in x's dtype."""
    count = len(first.codes)
    flat = experts.view(-1)
    here = torch.where((flat >= 0) & (flat < count), flat, count)
    order = torch.argsort(here, stable=True)
    ends = torch.bincount(here, minlength=count + 1)[:count].cumsum(0)
    rotated = rotate_inputs(x, first.codec.format).to(x.dtype)
    up = _grouped(rotated[order // experts.shape[1]], first, ends)
    inner = rotate_inputs(gate.apply(up), second.codec.format).to(x.dtype)
    parts = torch.empty(len(flat), second.shape[-2], dtype=x.dtype, device=x.device)
    parts[order] = _grouped(inner, second, ends)
    return parts


def _grouped(x: Tensor, stack: PackedWeight, ends: Tensor) -> Tensor:
    """Rows of x, sorted by expert, times their experts' matrices. ends: rows up to each expert's last, [experts]."""
    whole = torch.empty(stack.shape, dtype=x.dtype, device=x.device)
    programs.unpack(stack, whole)
    if x.is_cuda and x.dtype == torch.bfloat16 and stack.shape[-1] % 8 == 0 and stack.shape[-2] % 8 == 0:
        return torch._grouped_mm(x, whole.mT, offs=ends.to(torch.int32))
    out = torch.zeros(len(x), stack.shape[-2], dtype=x.dtype, device=x.device)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            torch.mm(x[begin:end], whole[expert].T, out=out[begin:end])
        begin = end
    return out
