"""The product from the definition: the whole matrix in fp32, then torch's product."""

from torch import Tensor

from rotaryquant.formats.codebook import CYCLE
from rotaryquant.ops.dequant_matmul import rotate_inputs
from rotaryquant.ops.pack import unpack
from rotaryquant.ops.weights import PackedWeight


def unsupported(x: Tensor, weight: PackedWeight, rotated: bool) -> str | None:
    """Takes every call."""
    return None


def dequantize(weight: PackedWeight) -> Tensor:
    """fp32 [..., rows, width]."""
    own = weight.codec.format
    parts = weight.codes.view(*weight.codes.shape[:-1], own.groups, own.group * own.bits // 8)
    codes = unpack(parts, own.bits, own.group).long().flatten(-2)
    if own.classes > 1:
        circles = codes.view(*codes.shape[:-1], own.width // CYCLE, CYCLE)
        codes = ((circles.roll(1, -1) % own.classes << own.bits) + circles).flatten(-2)
    levels = weight.codec.levels[codes].view(*codes.shape[:-1], own.groups, own.group)
    values: Tensor = levels * weight.scales.float()[..., None]
    return values.flatten(-2)


def run(x: Tensor, weight: PackedWeight, rotated: bool) -> Tensor:
    """[..., rows] in x's dtype."""
    given = x if rotated else rotate_inputs(x, weight.codec.format)
    return (given.float() @ dequantize(weight).mT).to(x.dtype)
