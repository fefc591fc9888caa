"""Products with packed weights, which are not unpacked to memory."""

from functools import lru_cache

import torch
from torch import Tensor

from rotaryquant.formats.rotation import hadamard
from rotaryquant.formats.weight import WeightFormat, input_signs
from rotaryquant.ops import dispatch
from rotaryquant.ops.weights import PackedWeight

KERNELS = ("cpu", "reference")


def dequant_matmul(x: Tensor, weight: PackedWeight, *, kernel: str = "auto") -> Tensor:
    """Inputs times weightᵀ, of inputs that are rotated as the weight is.

    x: [..., width], any float dtype. weight: one matrix [rows, width]. Returns [..., rows] in x's dtype; products
    and sums are fp32 or better.
    """
    if weight.codes.dim() != 2 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and a weight {weight.shape}: wanted [..., width] and [rows, width]")
    result: Tensor = dispatch.run("dequant_matmul", kernel, x, weight)
    return result


def rotate_inputs(x: Tensor, weight: WeightFormat, factors: Tensor | None = None, *, inverse: bool = False) -> Tensor:
    """Inputs as a matrix of that format wants them: fp32 [..., width], or x itself where it takes them as they are.

    factors: of each input (formats.weight), any float dtype, of a shape that fits x's. inverse: rows of a matrix that
    is stored so, as rows for inputs as they are: turned back, then times the same factors. The rotation is the same
    for all formats of a width and a seed, so that matrices with one input and one set of factors share it.
    """
    if factors is not None and not inverse:
        x = x.float() * factors.float()
    if weight.seed is not None:
        signs, matrix = _rotation(weight.width, weight.seed, weight.rotated, x.device)
        blocks = x.float() if inverse else x.float() * signs
        blocks = blocks.view(*x.shape[:-1], -1, weight.rotated) @ (matrix.mT if inverse else matrix)
        x = blocks.flatten(-2) * signs if inverse else blocks.flatten(-2)
    return x.float() * factors.float() if factors is not None and inverse else x


@lru_cache(maxsize=256)
def _rotation(width: int, seed: int, rotated: int, device: torch.device) -> tuple[Tensor, Tensor]:
    signs, matrix = torch.from_numpy(input_signs(width, seed)), torch.from_numpy(hadamard(rotated))
    return signs.float().to(device), matrix.float().to(device)


def dequantize(weight: PackedWeight) -> Tensor:
    """Weights scale · level, fp32 [..., rows, width], in the space of rotated inputs."""
    from rotaryquant.ops.dequant_matmul import reference

    return reference.dequantize(weight)
