"""Packing eight codes at a time in one 64-bit word, strips by the vector."""

import torch
from torch import Tensor

from rotaryquant.ops import native
from rotaryquant.ops.native import missing as missing


def unsupported(step: str, data: Tensor, bits: int, width: int, layout: str) -> str | None:
    """Why the native kernel cannot take this call, or None."""
    return native.not_on_cpu(rows=data) or native.bits_reason(bits, width)


def run(step: str, data: Tensor, bits: int, width: int, layout: str) -> Tensor:
    """One of the steps pack, unpack, unpack_sealed, seal, unseal."""
    rows = data.reshape(-1, *((1, 1, *data.shape)[-2:])).contiguous()
    size = width if step.startswith("unpack") else width * bits // 8
    out = torch.empty(*rows.shape[:2], size, dtype=torch.uint8)
    native.module().repack(
        step=step,
        rows=rows,
        out=out,
        bits=bits,
        width=width,
        layout=layout,
        threads=torch.get_num_threads(),
    )
    return out.view(*data.shape[:-1], size)
