"""Factors of inputs: that they lower the cost, by the definition of both, and what is kept where nothing was heard."""

import pytest
import torch
from torch import Tensor

from rotaryquant.errors import NonFiniteError, UnsupportedModelError
from rotaryquant.formats.weight import GRIDS, WeightFormat, fit
from rotaryquant.models.roles import ExpertMatrix, Role, expert_matrix, packed_name, roles_of
from rotaryquant.ops.dequant_matmul import dequant_matmul, dequantize
from rotaryquant.ops.weights import rotate_inputs
from rotaryquant.weights import awq
from rotaryquant.weights.awq import find_factors, round_scaled, spread
from rotaryquant.weights.rounding import round_matrix
from rotaryquant.weights.stacks import round_tensor, squared_error


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moment(width: int, decades: float = 1.0, seed: int = 1) -> Tensor:
    """Of inputs whose columns differ by up to 10^±decades, and that are correlated."""
    mixed = numbers(4 * width, width, seed=seed) + 0.5 * numbers(4 * width, 1, seed=seed + 1)
    sizes = 10 ** (decades * (2 * torch.rand(width, generator=torch.Generator().manual_seed(seed)) - 1))
    return (mixed * sizes).T @ (mixed * sizes) / len(mixed)


def cost(weight: Tensor, found: Tensor, hessian: Tensor) -> float:
    error = found - weight
    return float(((error @ hessian) * error).sum() / ((weight @ hessian) * weight).sum())


def rebuilt(weight: Tensor, form: WeightFormat, hessian: Tensor, factors: Tensor) -> Tensor:
    return rotate_inputs(dequantize(round_scaled(weight, form, hessian, factors)), form, inverse=True) * factors


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("seed", [None, 0])
def test_factors_lower_what_errors_cost_in_the_outputs(grid: str, seed: int | None) -> None:
    form, weight, hessian = fit(128, 2, grid, 64, seed), numbers(48, 128), moment(128)
    assert form is not None
    factors = find_factors(weight, form, hessian)
    assert factors.dtype == torch.bfloat16
    assert factors.shape == (128,)
    ones = torch.ones(128, dtype=torch.bfloat16)
    nearest = rotate_inputs(dequantize(round_matrix(weight, form)), form, inverse=True)
    plain, scaled = (cost(weight, rebuilt(weight, form, hessian, one), hessian) for one in (ones, factors))
    # without a rotation a column's errors are its own, and a group's scale grows with its largest column
    assert scaled <= plain * (1.0 if seed is None else 0.8)
    assert plain < 0.85 * cost(weight, nearest, hessian)


def test_inputs_times_factors_meet_the_matrix_over_them() -> None:
    form, weight, hessian = WeightFormat(64, 4, "trellis", 32, 3), numbers(9, 64), moment(64)
    factors, x = find_factors(weight, form, hessian), numbers(5, 64, seed=9)
    packed = round_scaled(weight, form, hessian, factors)
    found = dequant_matmul(x * factors, packed, kernel="reference")
    torch.testing.assert_close(found, x @ rebuilt(weight, form, hessian, factors).mT, rtol=1e-4, atol=1e-4)


def test_large_inputs_get_small_factors_and_the_exponent_is_the_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    form, weight, hessian = WeightFormat(64, 3, "normal", 64, 0), numbers(40, 64), moment(64)
    factors = find_factors(weight, form, hessian).float()
    assert float(torch.corrcoef(torch.stack([hessian.diagonal().log(), factors.log()]))[0, 1]) < -0.999
    monkeypatch.setattr(awq, "_STEPS", (1.0,))
    found = []
    for exponent in awq._EXPONENTS:
        with monkeypatch.context() as patch:
            patch.setattr(awq, "_EXPONENTS", (exponent,))
            one = find_factors(weight, form, hessian)
        found.append((cost(weight, rebuilt(weight, form, hessian, one), hessian), one))
    assert min(found, key=lambda pair: pair[0])[1].tolist() == factors.tolist()
    assert found[0][1].tolist() == [1.0] * 64


def test_first_scales_are_chosen_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    form, weight, hessian = WeightFormat(128, 2, "trellis", 128, 0), numbers(32, 128), moment(128, 0.3)
    ones = torch.ones(128, dtype=torch.bfloat16)

    def by_row() -> Tensor:
        error = rebuilt(weight, form, hessian, ones) - weight
        return ((error @ hessian) * error).sum(-1)

    chosen = by_row()
    monkeypatch.setattr(awq, "_STEPS", (1.0,))
    plain = by_row()
    assert bool((chosen <= 1.05 * plain).all())  # rows were compared with a little on the Hessian's diagonal
    assert float(chosen.sum()) < 0.9 * float(plain.sum())


def test_where_nothing_was_heard_inputs_are_taken_as_they_are() -> None:
    form, weight = WeightFormat(64, 3, "trellis", 64, 0), numbers(6, 64)
    found = round_tensor(weight, form, None, scaled=True)
    plain = round_matrix(weight, form)
    assert torch.equal(found.codes, plain.codes)
    assert torch.equal(found.scales, plain.scales)
    silent = round_tensor(weight, form, torch.zeros(64, 64), scaled=True)
    for one in (found, silent):
        assert one.factors is not None
        assert one.factors.tolist() == [1.0] * 64
    assert round_tensor(weight, form, None).factors is None


def test_a_column_that_no_input_reached_has_a_bounded_factor() -> None:
    form, weight, hessian = WeightFormat(64, 3, "trellis", 64, 0), numbers(6, 64), moment(64)
    hessian[5], hessian[:, 5] = 0.0, 0.0
    factors = find_factors(weight, form, hessian)
    assert float(factors.float().max() / factors.float().min()) < 2e3
    assert bool(torch.isfinite(rebuilt(weight, form, hessian, factors)).all())


def test_matrices_of_a_stack_have_their_own_factors_unless_shared() -> None:
    form, stack = WeightFormat(64, 4, "trellis", 64, 0), numbers(3, 16, 64)
    hessians = torch.stack([moment(64, seed=seed) for seed in (1, 4, 7)])
    own = round_tensor(stack, form, hessians, scaled=True)
    assert own.factors is not None
    assert own.factors.shape == (3, 64)
    assert not torch.equal(own.factors[0], own.factors[1])
    assert torch.equal(own.codes[1], round_scaled(stack[1], form, hessians[1], own.factors[1]).codes)
    given = torch.full((64,), 0.5, dtype=torch.bfloat16)
    shared = round_tensor(stack, form, hessians, scaled=True, shared=given)
    assert shared.factors is not None
    assert bool((shared.factors == 0.5).all())
    assert 0 < squared_error(stack, shared.values) < 0.02
    assert squared_error(torch.zeros(2, 3), torch.zeros(2, 3)) == 0.0


def test_rows_that_are_looked_at_are_spread_over_all() -> None:
    rows = torch.arange(1000)[:, None]
    assert spread(rows, 10).flatten().tolist() == list(range(0, 1000, 100))
    assert spread(rows, 1000) is rows


@pytest.mark.parametrize(("what", "weight", "seen"), [("weights", torch.nan, 1.0), ("inputs", 1.0, torch.inf)])
def test_what_is_not_finite_is_refused_under_factors_too(what: str, weight: float, seen: float) -> None:
    form = WeightFormat(64, 3, "normal", 64)
    with pytest.raises(NonFiniteError, match=f"{what} of a matrix"):
        round_tensor(torch.full((2, 64), weight), form, torch.full((64, 64), seen), scaled=True)


@pytest.mark.parametrize(
    ("name", "module", "number", "down"),
    [
        ("model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.1.mlp.experts", 3, True),
        ("layers.1.experts.gate_up_proj", "layers.1.experts", None, False),
        ("layers.1.block_sparse_moe.output_linear.weight", "layers.1.block_sparse_moe.experts", None, True),
        ("layers.1.block_sparse_moe.experts.7.w1.weight", "layers.1.block_sparse_moe.experts", 7, False),
        ("model.layers.1.mlp.experts.up_inputs", "model.layers.1.mlp.experts", None, False),
    ],
)
def test_names_say_which_experts_a_matrix_is_of(name: str, module: str, number: int | None, down: bool) -> None:
    assert expert_matrix(name) == ExpertMatrix(module, number, down)


def test_names_of_scales_and_factors_are_of_their_matrix() -> None:
    with pytest.raises(UnsupportedModelError, match=r"tensor 'model.norm.weight' is of a routed expert"):
        expert_matrix("model.norm.weight")
    names = ["model.layers.1.mlp.experts.up_inputs", "model.layers.1.self_attn.q_proj.weight"]
    names.append(names[1] + "_inputs")
    assert list(roles_of(names).values()) == [Role.ROUTED_EXPERT, Role.ATTENTION, Role.ATTENTION]
    assert [packed_name(name) for name in ("a.weight_scale", "a.weight_inputs", "a.weight")] == ["a.weight"] * 3
