"""Rounded matrices: against exhaustive choice, with and without a Hessian, and what is not finite."""

from itertools import product

import pytest
import torch
from torch import Tensor

from rotaryquant.errors import NonFiniteError
from rotaryquant.formats.weight import GRIDS, WeightFormat, fit, input_rotation
from rotaryquant.ops.dequant_matmul import dequantize
from rotaryquant.ops.weights import rotate_inputs
from rotaryquant.weights.rounding import round_matrix


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def back(packed: Tensor, form: WeightFormat) -> Tensor:
    """In the space of inputs as they are."""
    return rotate_inputs(packed, form, inverse=True)


#: Squared error that normal numbers are left with, of 1; of a trellis as formats.codebook states it.
ERRORS = {
    ("uniform", 2): 0.150, ("uniform", 3): 0.042, ("uniform", 4): 0.0125, ("uniform", 8): 3e-5,
    ("normal", 2): 0.117, ("normal", 3): 0.0345, ("normal", 4): 0.0096,
    ("trellis", 2): 0.092, ("trellis", 3): 0.0225, ("trellis", 4): 0.0065,
}  # fmt: skip


@pytest.mark.parametrize(("grid", "bits"), ERRORS)
@pytest.mark.parametrize("seed", [None, 0])
def test_error_of_normal_weights(grid: str, bits: int, seed: int | None) -> None:
    form = fit(512, bits, grid, 128, seed)
    assert form is not None
    weight = 0.03 * numbers(64, 512)
    error = back(dequantize(round_matrix(weight, form)), form) - weight
    assert float(error.square().sum() / weight.square().sum()) <= ERRORS[grid, bits]


@pytest.mark.parametrize("grid", ["normal", "uniform"])
def test_without_a_hessian_every_weight_takes_its_nearest_level(grid: str) -> None:
    form = WeightFormat(64, 3, grid, 32)
    weight = numbers(9, 64)
    packed = round_matrix(weight, form)
    steps = weight.view(9, 2, 32).square().mean(-1).sqrt() * form.unit
    found = dequantize(packed) / packed.scales.float().repeat_interleave(32, 1)
    levels = torch.tensor(form.levels).float()
    nearest = levels[(weight[..., None] / steps.repeat_interleave(32, 1)[..., None] - levels).abs().argmin(-1)]
    torch.testing.assert_close(found, nearest)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("bits", [2, 3])
def test_a_hessian_makes_errors_cancel_where_inputs_lie(grid: str, bits: int) -> None:
    inputs = numbers(4000, 24, seed=1) @ numbers(24, 128, seed=2) + 0.1 * numbers(4000, 128, seed=3)
    hessian = inputs.T @ inputs / len(inputs)
    form, weight = WeightFormat(128, bits, grid, 64, 0), numbers(32, 128)

    def cost(hessian_given: Tensor | None) -> float:
        error = back(dequantize(round_matrix(weight, form, hessian_given)), form) - weight
        return float(((error @ hessian) * error).sum())

    assert cost(hessian) < 0.45 * cost(None)
    assert cost(1e6 * hessian) == pytest.approx(cost(hessian), rel=1e-3)  # its size does not matter


def test_rounding_with_a_hessian_is_the_best_of_a_few_columns() -> None:
    """Two rotated-free columns of two bits: no other pair of codes costs less for a row, scales being as they are."""
    hessian = torch.eye(8)
    hessian[6, 7] = hessian[7, 6] = 0.9
    form, weight = WeightFormat(8, 2, "normal", 8), numbers(200, 8)
    packed = round_matrix(weight, form, hessian)
    found, scales = dequantize(packed), packed.scales.float()

    def cost(candidate: Tensor) -> Tensor:
        error = candidate - weight
        return ((error @ hessian) * error).sum(-1)

    best = torch.full((200,), torch.inf)
    for a, b in product(form.levels, repeat=2):
        other = found.clone()
        other[:, 6:] = torch.tensor([a, b]) * scales
        best = torch.minimum(best, cost(other))
    assert float((cost(found) <= best + 1e-5).float().mean()) > 0.7  # one column after the other, not both at once
    nearest = dequantize(round_matrix(weight, form))
    assert float(cost(found).sum()) < float(cost(nearest).sum())


def test_zeros_constants_and_no_inputs_at_all() -> None:
    form = WeightFormat(64, 2, "trellis", 32)
    weight = numbers(3, 64)
    weight[0], weight[1, :32] = 0.0, 0.0
    for hessian in (None, torch.zeros(64, 64), torch.eye(64)):
        found = dequantize(round_matrix(weight, form, hessian))
        assert bool(torch.isfinite(found).all())
        assert not found[0].any()
        assert not found[1, :32].any()


def test_a_hessian_of_fewer_inputs_than_columns_is_enough() -> None:
    inputs = numbers(3, 64)
    form, weight = WeightFormat(64, 3, "trellis", 64, 0), numbers(16, 64)
    error = back(dequantize(round_matrix(weight, form, inputs.T @ inputs / 3)), form) - weight
    assert float((error @ inputs.T).square().sum()) < 0.1 * float((weight @ inputs.T).square().sum()) * 0.1
    assert float(error.square().sum() / weight.square().sum()) < 0.25


@pytest.mark.parametrize(("what", "weight", "hessian"), [("weights", torch.nan, 1.0), ("inputs", 1.0, torch.inf)])
def test_what_is_not_finite_is_refused(what: str, weight: float, hessian: float) -> None:
    with pytest.raises(NonFiniteError, match=f"{what} of a matrix"):
        round_matrix(torch.full((2, 64), weight), WeightFormat(64, 3, "normal", 64), torch.full((64, 64), hessian))
    with pytest.raises(ValueError, match="64 columns for a format of 32"):
        round_matrix(torch.zeros(2, 64), WeightFormat(32, 3, "normal", 32))


def test_rotation_of_inputs_is_that_of_the_format() -> None:
    form = WeightFormat(96, 3, "normal", 32, 5)
    rotation, x = input_rotation(form), numbers(7, 96)
    assert rotation is not None
    torch.testing.assert_close(rotate_inputs(x, form), x @ torch.from_numpy(rotation).float())
    torch.testing.assert_close(back(rotate_inputs(x, form), form), x)
    assert rotate_inputs(x, WeightFormat(96, 3, "normal", 32)) is x
