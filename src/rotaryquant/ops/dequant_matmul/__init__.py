"""Products with packed weights, which are not unpacked to memory."""

from functools import lru_cache

import torch
from torch import Tensor

from rotaryquant.formats.rotation import hadamard
from rotaryquant.formats.weight import WeightFormat, input_signs
from rotaryquant.ops import dispatch
from rotaryquant.ops.weights import PackedWeight

KERNELS = ("triton", "cpu", "reference")


def dequant_matmul(x: Tensor, weight: PackedWeight, *, rotated: bool = True, kernel: str = "auto") -> Tensor:
    """Inputs times weightᵀ.

    x: [..., width], any float dtype. weight: one matrix [rows, width]. rotated: whether the inputs are rotated as the
    weight is (`rotate_inputs`); otherwise they are on the way. Returns [..., rows] in x's dtype. Products and sums are
    fp32 or better; kernels may round rotated inputs of 16 bits to 16 bits.
    """
    if weight.codes.dim() != 2 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and a weight {weight.shape}: wanted [..., width] and [rows, width]")
    result: Tensor = dispatch.run("dequant_matmul", kernel, x, weight, rotated)
    return result


def rotate_inputs(x: Tensor, weight: WeightFormat, *, inverse: bool = False) -> Tensor:
    """Inputs as a matrix of that format wants them: fp32 [..., width], or x itself where it takes them as they are.

    inverse: from the space of rotated inputs back (formats.weight.input_rotation; the same for all formats of a width
    and a seed, so that matrices with one input share it).
    """
    if weight.seed is None:
        return x
    signs, matrix = _rotation(weight.width, weight.seed, weight.rotated, x.device)
    blocks = (*x.shape[:-1], weight.width // weight.rotated, weight.rotated)
    if inverse:
        return (x.float().view(blocks) @ matrix.mT).flatten(-2) * signs
    return ((x.float() * signs).view(blocks) @ matrix).flatten(-2)


@lru_cache(maxsize=256)
def _rotation(width: int, seed: int, rotated: int, device: torch.device) -> tuple[Tensor, Tensor]:
    signs, matrix = torch.from_numpy(input_signs(width, seed)), torch.from_numpy(hadamard(rotated))
    return signs.float().to(device), matrix.float().to(device)


def dequantize(weight: PackedWeight) -> Tensor:
    """Weights scale · level, fp32 [..., rows, width], in the space of rotated inputs."""
    from rotaryquant.ops.dequant_matmul import reference

    return reference.dequantize(weight)
