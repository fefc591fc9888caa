"""The product from the definition: the whole matrix in fp32, then torch's product."""

from torch import Tensor

from rotaryquant.formats.codebook import CYCLE
from rotaryquant.ops.pack import unpack
from rotaryquant.ops.weights import PackedWeight, rotate_inputs, round_inputs


def unsupported(x: Tensor, weight: PackedWeight) -> str | None:
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


def run(x: Tensor, weight: PackedWeight, rounded: bool = False) -> Tensor:
    """[..., rows] in x's dtype. rounded: with inputs in integers, as some kernels take them."""
    inputs = rotate_inputs(x, weight.codec.format).float()
    if rounded:
        inputs = round_inputs(inputs, weight.codec.format)
    return (inputs @ dequantize(weight).mT).to(x.dtype)
