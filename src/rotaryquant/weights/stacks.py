"""A tensor of a checkpoint to codes, scales and factors: one matrix, or a stack of them, matrix by matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rotaryquant.formats.weight import WeightFormat
from rotaryquant.ops.dequant_matmul import dequantize
from rotaryquant.ops.weights import PackedWeight, rotate_inputs
from rotaryquant.weights.awq import find_factors, round_scaled
from rotaryquant.weights.rounding import round_matrix


@dataclass(frozen=True)
class Rounded:
    """What a tensor [..., rows, width] becomes.

    codes: uint8 [..., rows, width · bits / 8]. scales: bf16 [..., rows, groups]. factors: of inputs, bf16 [..., width],
    or None where they are taken as they are. values: what all of them stand for, fp32 in the tensor's shape.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor | None
    values: Tensor


def round_tensor(
    tensor: Tensor, form: WeightFormat, hessian: Tensor | None, *, scaled: bool = False, shared: Tensor | None = None
) -> Rounded:
    """Round a matrix or a stack.

    hessian: inputs' second moment (for a stack: of each matrix too), or None to round to the nearest level. scaled: by
    AWQ, with factors that are found here unless they are `shared` with other tensors (bf16 [width]); else so that
    errors cancel (weights.rounding). Raises NonFiniteError where a number is not finite.
    """
    matrices = tensor if tensor.dim() == 3 else tensor[None]
    packed: list[PackedWeight] = []
    factors: list[Tensor] = []
    values: list[Tensor] = []
    for index, matrix in enumerate(matrices):
        own = hessian if hessian is None or hessian.dim() == 2 else hessian[index]
        one, found = _round(matrix, form, own, shared) if scaled else (round_matrix(matrix, form, own), None)
        packed.append(one)
        values.append(rotate_inputs(dequantize(one), form, inverse=True))
        if found is not None:
            factors.append(found)
            values[-1] = values[-1] * found.float()
    codes, scales = torch.stack([one.codes for one in packed]), torch.stack([one.scales for one in packed])
    return Rounded(
        codes.view(*tensor.shape[:-1], -1),
        scales.view(*tensor.shape[:-1], -1),
        torch.stack(factors).view(*tensor.shape[:-2], -1) if factors else None,
        torch.stack(values).view(tensor.shape),
    )


def squared_error(tensor: Tensor, values: Tensor) -> float:
    """Of values that stand for a tensor, of the tensor's own square; 0 where that is 0."""
    lost = sum(float((one - own.float()).double().square().sum()) for one, own in zip(values, tensor, strict=True))
    return lost / max(sum(float(own.double().square().sum()) for own in tensor), 1e-300)


def _round(
    matrix: Tensor, form: WeightFormat, hessian: Tensor | None, shared: Tensor | None
) -> tuple[PackedWeight, Tensor]:
    """By AWQ; where no inputs are known, to the nearest level, and inputs are taken as they are."""
    if hessian is None:
        return round_matrix(matrix, form), torch.ones(form.width, dtype=torch.bfloat16)
    factors = find_factors(matrix, form, hessian) if shared is None else shared
    return round_scaled(matrix, form, hessian, factors), factors
