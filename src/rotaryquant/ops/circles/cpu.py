"""A lane of a vector for each class to end with, in 32-bit integers."""

import torch
from torch import Tensor

from rotaryquant.formats.codebook import TRELLISES
from rotaryquant.ops import native
from rotaryquant.ops.native import missing as missing

#: Differences from a level up to this: their squares, summed over a circle and kept times eight, stay below 2^30.
_FARTHEST = 2896


def unsupported(x: Tensor, levels: Tensor) -> str | None:
    """Why the native kernel cannot take this call, or None."""
    if reason := native.not_on_cpu(x=x, levels=levels):
        return reason
    if levels.shape not in [(trellis.classes, 1 << bits) for bits, trellis in TRELLISES.items()]:
        return f"levels of shape {tuple(levels.shape)} are of no trellis that has a native code path"
    if len(x) and int(x.abs().max()) + int(levels.abs().max()) > _FARTHEST:
        return f"integers of {int(x.abs().max())} are too far from every level for sums of 32 bits"
    return None


def run(x: Tensor, levels: Tensor) -> Tensor:
    """Codes int64 [circles, CYCLE]."""
    codes = torch.empty(x.shape, dtype=torch.uint8)
    native.module().circles(
        x=x.to(torch.int32).contiguous(),
        levels=levels.to(torch.int32).contiguous(),
        codes=codes,
        bits=levels.shape[1].bit_length() - 1,
        threads=torch.get_num_threads(),
    )
    return codes.long()
