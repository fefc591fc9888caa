"""Rotation row by row: signs, Hadamard butterflies and SO(4) blocks without building a matrix."""

import torch
from torch import Tensor

from rotaryquant.ops import native
from rotaryquant.ops.native import missing as missing
from rotaryquant.ops.rotate import Rotation


def unsupported(x: Tensor, rotation: Rotation, inverse: bool) -> str | None:
    """Why the native kernel cannot take this call, or None."""
    return native.rows_reason("x", x) or native.rotation_reason(rotation)


def run(x: Tensor, rotation: Rotation, inverse: bool) -> Tensor:
    """Product y = R x, or x = Rᵀ y; reads x with its own batch, head and row strides."""
    out = torch.empty(x.shape, dtype=torch.float32)
    native.module().rotate(
        x=x,
        out=out,
        rotation=native.rotation(rotation),
        inverse=inverse,
        threads=torch.get_num_threads(),
    )
    return out
