"""Products with packed weights, which are not unpacked to memory."""

from torch import Tensor

from rotaryquant.ops import dispatch
from rotaryquant.ops.weights import PackedWeight

KERNELS = ("triton", "cpu", "reference")


def dequant_matmul(x: Tensor, weight: PackedWeight, *, kernel: str = "auto") -> Tensor:
    """Inputs times weightᵀ; inputs are rotated as the weight is on the way.

    x: [..., width], any float dtype. weight: one matrix [rows, width]. Returns [..., rows] in x's dtype. A kernel may
    round rotated inputs to integers, of 8 bits (ops.weights.round_inputs) or more; sums of products are fp32.
    """
    if weight.codes.dim() != 2 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and a weight {weight.shape}: wanted [..., width] and [rows, width]")
    result: Tensor = dispatch.run("dequant_matmul", kernel, x, weight)
    return result


def dequantize(weight: PackedWeight) -> Tensor:
    """Weights scale · level, fp32 [..., rows, width], in the space of rotated inputs."""
    from rotaryquant.ops.dequant_matmul import reference

    return reference.dequantize(weight)
