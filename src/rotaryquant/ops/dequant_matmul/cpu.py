"""A few rows at a time as fp32 close to the processor; for many tokens, rows by the megabyte for torch's product."""

import torch
from torch import Tensor

from rotaryquant.ops import native
from rotaryquant.ops.native import missing as missing
from rotaryquant.ops.weights import PackedWeight

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
    return None


def run(x: Tensor, weight: PackedWeight) -> Tensor:
    """[..., rows] in x's dtype."""
    rows, width = weight.shape
    tokens = x.reshape(-1, width).float()
    if len(tokens) < _MANY:
        padded = torch.nn.functional.pad(tokens, (0, -width % 16)).contiguous()
        out = torch.empty(len(tokens), rows)
        _call(weight, 0, rows, padded, out)
    else:
        out = torch.empty(len(tokens), rows)
        step = max(1, _UNPACKED // width)
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            unpacked = torch.empty(end - begin, width)
            _call(weight, begin, end, None, unpacked)
            torch.mm(tokens, unpacked.T, out=out[:, begin:end])
    return out.view(*x.shape[:-1], rows).to(x.dtype)


def _call(weight: PackedWeight, begin: int, end: int, x: Tensor | None, out: Tensor) -> None:
    """Rows begin .. end: their products with x, or where there is none the rows themselves."""
    form = weight.codec.format
    native.module().weight(
        codes=weight.codes[begin:end].contiguous(),
        scales=weight.scales[begin:end].contiguous(),
        levels=weight.codec.small_levels,
        x=x,
        out=out,
        bits=form.bits,
        group=form.group,
        threads=torch.get_num_threads(),
    )
