"""Quantization row by row in registers."""

import torch
from torch import Tensor

from rotaryquant.ops import native
from rotaryquant.ops.native import missing as missing
from rotaryquant.ops.streams import Codec


def unsupported(y: Tensor, codec: Codec) -> str | None:
    """Why the native kernel cannot take this call, or None."""
    if codec.feedback is not None:
        return "codes with feedback are made where rows are written (append_packed)"
    return native.not_on_cpu(y=y) or native.codec_reason(codec)


def run(y: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., width] and scales [..., groups] of y."""
    rows = y.float().reshape(-1, codec.width).contiguous()
    codes = torch.empty(rows.shape, dtype=torch.uint8)
    scales = torch.empty(rows.shape[0], codec.groups, dtype=codec.scale_dtype)
    native.module().quantize(
        y=rows,
        codec=native.codec(codec),
        codes=codes,
        scales=scales,
        threads=torch.get_num_threads(),
    )
    return codes.view(y.shape), scales.view(*y.shape[:-1], codec.groups)
