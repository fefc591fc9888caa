"""Rotated rows to codes and scales, and back to values in the rotated space (DESIGN section 3)."""

from torch import Tensor

from rotaryquant.ops import dispatch
from rotaryquant.ops.streams import Codec

KERNELS = ("cpu", "reference")


def quantize(y: Tensor, codec: Codec, *, kernel: str = "auto") -> tuple[Tensor, Tensor]:
    """Codes and scales of rotated rows.

    y: fp32 [..., width], with the codec's feedback [..., num_kv_heads, rows, width]. Returns codes uint8 [..., width]
    (int32 bit patterns at 32 bits) and scales scale_dtype [..., groups]. Reductions in fp32 after division by the
    group's largest magnitude, so rows of any finite size are exact; a zero group gets scale 0. Non-finite rows give
    non-finite scales.
    """
    if y.shape[-1] != codec.width:
        raise ValueError(f"y has width {y.shape[-1]}; the codec is for {codec.width}")
    if codec.feedback is not None and (y.dim() < 3 or y.shape[-3] != len(codec.feedback)):
        raise ValueError(f"y has shape {tuple(y.shape)}; feedback wants [..., {len(codec.feedback)}, rows, width]")
    result: tuple[Tensor, Tensor] = dispatch.run("quantize", kernel, y, codec)
    return result


def dequantize(codes: Tensor, scales: Tensor, codec: Codec) -> Tensor:
    """Values scale·level in the rotated space, fp32 [..., width]; the inverse of `quantize` up to rounding."""
    from rotaryquant.ops.quantize import reference

    return reference.dequantize(codes, scales, codec)
