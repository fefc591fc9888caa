"""For a few tokens levels meet inputs as they leave the table; for many, rows by the megabyte for torch's product."""

import torch
from torch import Tensor

from rotaryquant.ops import native
from rotaryquant.ops.native import missing as missing
from rotaryquant.ops.weights import PackedWeight, rotate_inputs

#: From so many tokens on torch's product of unpacked rows is faster.
_MANY = 24
#: Weights that are unpacked at a time then: 16 MB.
_UNPACKED = 1 << 22


def unsupported(x: Tensor, weight: PackedWeight) -> str | None:
    """Why the native kernel cannot take this call, or None."""
    if reason := native.not_on_cpu(x=x, codes=weight.codes, scales=weight.scales):
        return reason
    if weight.scales.dtype not in (torch.bfloat16, torch.float32):
        return f"scales are {weight.scales.dtype}, this kernel reads bf16 and fp32"
    if weight.codec.format.group % 8:
        return f"group={weight.codec.format.group}: this kernel takes multiples of 8"
    if not (weight.codes.is_contiguous() and weight.scales.is_contiguous()):
        return "codes or scales are not contiguous"
    return None


def run(x: Tensor, weight: PackedWeight) -> Tensor:
    """[..., rows] in x's dtype."""
    rows, width = weight.shape
    return multiply(x.reshape(-1, width), weight, 0).view(*x.shape[:-1], rows).to(x.dtype)


def multiply(tokens: Tensor, weight: PackedWeight, index: int) -> Tensor:
    """fp32 [tokens, rows] of tokens [tokens, width] and a matrix of a stack, by its index; of one matrix that is 0."""
    rows, width = weight.shape[-2:]
    packed, native_product, threads = native.weight(weight), native.module().weight, torch.get_num_threads()
    out = torch.empty(len(tokens), rows)
    if len(tokens) < _MANY:
        if tokens.dtype not in (torch.float32, torch.bfloat16):
            tokens = tokens.float()
        native_product(packed, tokens.contiguous(), out, index, 0, threads)
    else:
        tokens = rotate_inputs(tokens, weight.codec.format).float()
        step = max(1, _UNPACKED // width)
        for begin in range(0, rows, step):
            unpacked = torch.empty(min(step, rows - begin), width)
            native_product(packed, None, unpacked, index, begin, threads)
            torch.mm(tokens, unpacked.T, out=out[:, begin : begin + step])
    return out
