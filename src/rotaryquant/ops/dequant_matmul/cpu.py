"""A few rows at a time as fp32 close to the processor; for many tokens, rows by the megabyte for torch's product."""

import torch
from torch import Tensor

from rotaryquant.ops import native
from rotaryquant.ops.dequant_matmul import rotate_inputs
from rotaryquant.ops.native import missing as missing
from rotaryquant.ops.weights import PackedWeight

#: From so many tokens on torch's product of unpacked rows is faster.
_MANY = 24
#: Weights that are unpacked at a time then: 16 MB.
_UNPACKED = 1 << 22


def unsupported(x: Tensor, weight: PackedWeight, rotated: bool) -> str | None:
    """Why the native kernel cannot take this call, or None."""
    if reason := native.not_on_cpu(x=x, codes=weight.codes, scales=weight.scales):
        return reason
    if weight.scales.dtype not in (torch.bfloat16, torch.float32):
        return f"scales are {weight.scales.dtype}, this kernel reads bf16 and fp32"
    if weight.codec.format.group % 8:
        return f"group={weight.codec.format.group}: this kernel takes multiples of 8"
    return None


def run(x: Tensor, weight: PackedWeight, rotated: bool) -> Tensor:
    """[..., rows] in x's dtype."""
    rows, width = weight.shape
    given = x if rotated else rotate_inputs(x, weight.codec.format)
    tokens = given.reshape(-1, width).float()
    if len(tokens) < _MANY:
        if width % 16:
            tokens = torch.nn.functional.pad(tokens, (0, -width % 16))
        out = torch.empty(len(tokens), rows)
        _call(weight, weight.codes, weight.scales, tokens.contiguous(), out)
    else:
        out = torch.empty(len(tokens), rows)
        step = max(1, _UNPACKED // width)
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            unpacked = torch.empty(end - begin, width)
            _call(weight, weight.codes[begin:end], weight.scales[begin:end], None, unpacked)
            torch.mm(tokens, unpacked.T, out=out[:, begin:end])
    return out.view(*x.shape[:-1], rows).to(x.dtype)


def _call(weight: PackedWeight, codes: Tensor, scales: Tensor, x: Tensor | None, out: Tensor) -> None:
    """Rows of a weight: their products with x, or where there is none the rows themselves."""
    form = weight.codec.format
    native.module().weight(
        codes=codes.contiguous(),
        scales=scales.contiguous(),
        levels=weight.codec.small_levels,
        x=x,
        out=out,
        bits=form.bits,
        group=form.group,
        threads=torch.get_num_threads(),
    )
