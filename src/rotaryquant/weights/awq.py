"""Factors of inputs, so that errors are small where inputs are large (AWQ, arXiv 2306.00978).

A matrix is rounded as W·S, S = diag(s), and its inputs are divided by s. Of candidates s_j = (E x_j²)^(a/2) the one is
taken whose rounded matrix costs least in the outputs: tr(E·H·Eᵀ), H = E x·xᵀ, of errors E that are made, not estimated.
Codes are the nearest to W·S in units of a first scale. That scale is a choice too, made for each row by the same cost
(for AWQ: clipping); what is stored is then fitted to the codes, as everywhere.

Matrices that every expert of a layer multiplies with the same inputs share their factors, so that these are applied,
and inputs rotated, once for all of them. Any other matrix has its own: an expert's second one too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from rotaryquant.formats.weight import WeightFormat
from rotaryquant.ops.pack import pack
from rotaryquant.ops.weights import PackedWeight, WeightCodec, rotate_inputs
from rotaryquant.weights.headers import TensorInfo
from rotaryquant.weights.rounding import (
    choose_codes,
    first_scales,
    fitted_scales,
    levels_of,
    refuse_non_finite,
    steadied,
)

#: Exponents a that are tried: 0 leaves inputs as they are, 1 makes all of them equally large.
_EXPONENTS = tuple(step / 6 for step in range(7))

#: First scales that are tried, in units of what normal numbers want.
_STEPS = (1.0, 0.84, 0.88, 0.92, 0.96, 1.04, 1.08, 1.12)

#: Rows that factors are judged by at most, spread evenly.
_ROWS = 512

#: Inputs count as if their second moment were at least this share of the mean: what calibration has not seen has some.
_FLOOR = 1e-4


def round_scaled(weight: Tensor, form: WeightFormat, hessian: Tensor, factors: Tensor) -> PackedWeight:
    """Codes and scales of a matrix whose inputs are multiplied by factors first.

    weight: [rows, width], any float dtype, finite. hessian: fp32 [width, width], mean of x·xᵀ over inputs as they are.
    factors: bf16 [width], positive. Raises NonFiniteError where a weight or the Hessian is not finite.
    """
    work, metric = _turned(weight, form, hessian, factors)
    codec = WeightCodec.from_format(form, weight.device)
    steps, metric = first_scales(work, form), steadied(metric)
    best = _nearest(work, steps, codec, metric)
    for times in _STEPS[1:] if form.bits < 8 else ():
        other = _nearest(work, steps * times, codec, metric)
        better = (other.cost < best.cost)[:, None]
        best = _Rounded(
            torch.where(better, other.codes, best.codes),
            torch.where(better, other.scales, best.scales),
            torch.minimum(other.cost, best.cost),
        )
    return PackedWeight(codec, pack(best.codes.to(torch.uint8), form.bits), best.scales.to(torch.bfloat16))


def find_factors(rows: Tensor, form: WeightFormat, hessian: Tensor) -> Tensor:
    """Factors, bf16 [width], with which rows of a matrix are rounded at the least cost.

    rows: [any number, width]. hessian: fp32 [width, width], mean of x·xᵀ.
    """
    moment = hessian.diagonal().float()
    if not float(moment.mean()) > 0:
        return torch.ones_like(moment, dtype=torch.bfloat16)
    moment = moment + _FLOOR * moment.mean()
    size = (moment.log() - moment.log().mean()) / 2
    rows = spread(rows, _ROWS)
    codec = WeightCodec.from_format(form, rows.device)
    candidates = [torch.exp(-exponent * size).to(torch.bfloat16) for exponent in _EXPONENTS]
    costs = []
    for factors in candidates:
        work, metric = _turned(rows, form, hessian, factors)
        found = _nearest(work, first_scales(work, form), codec, steadied(metric))
        error = levels_of(found.codes, codec) * found.scales.repeat_interleave(form.group, 1) - work
        costs.append(float(((error @ metric) * error).double().sum()))
    return candidates[min(range(len(costs)), key=costs.__getitem__)]


def spread(rows: Tensor, most: int) -> Tensor:
    """At most so many rows of a matrix, evenly spread."""
    return rows if len(rows) <= most else rows[torch.arange(most) * len(rows) // most]


@dataclass(frozen=True)
class _Rounded:
    """Of some rows: codes int64 [rows, width], scales [rows, groups], and what each row's errors cost [rows]."""

    codes: Tensor
    scales: Tensor
    cost: Tensor


def _turned(weight: Tensor, form: WeightFormat, hessian: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix and what its errors cost, both as its rotated and multiplied inputs have it."""
    refuse_non_finite(weight, hessian)
    own = factors.to(weight.device, torch.float32)
    metric = rotate_inputs(hessian.to(weight.device, torch.float32) * own * own[:, None], form)
    return rotate_inputs(weight.float() / own, form), rotate_inputs(metric.T, form).contiguous()  # rows, then columns


def _nearest(work: Tensor, steps: Tensor, codec: WeightCodec, metric: Tensor) -> _Rounded:
    """Nearest levels in units of first scales [rows, groups], then the scales with which they cost least."""
    codes = choose_codes(work, steps, codec, None)
    levels = levels_of(codes, codec)
    scales = fitted_scales(work, levels, metric, codec.format, steps)
    error = levels * scales.repeat_interleave(codec.format.group, 1) - work
    return _Rounded(codes, scales, ((error @ metric) * error).sum(-1))


class SharedFactors:
    """Factors of what all experts of a layer get, by name (`models.roles.UP_INPUTS`), each found once.

    hessian_of: the second moment of those inputs by the same name, or None where nothing was heard.
    """

    def __init__(self, hessian_of: Callable[[str], Tensor | None]) -> None:
        self._members: dict[str, list[tuple[TensorInfo, WeightFormat]]] = {}
        self._hessian_of = hessian_of
        self._found: tuple[str, Tensor] | None = None  # the last one: layers come one after the other

    def add(self, name: str, source: TensorInfo, form: WeightFormat) -> None:
        """One more matrix, or a stack, that is multiplied with inputs of that name, and how it is stored."""
        self._members.setdefault(name, []).append((source, form))

    def __call__(self, name: str) -> Tensor:
        """bf16 [width]; reads a few rows of every member, so that a run that goes on finds what the first one did."""
        if self._found is None or self._found[0] != name:
            self._found = name, self._find(name)
        return self._found[1]

    def _find(self, name: str) -> Tensor:
        members, hessian = self._members[name], self._hessian_of(name)
        form = members[0][1]
        if hessian is None:
            return torch.ones(form.width, dtype=torch.bfloat16)
        share = max(1, _ROWS // len(members))
        rows = []
        for source, _ in members:
            with safe_open(source.file, "pt") as file:
                rows.append(spread(file.get_tensor(source.name).reshape(-1, form.width), share).float())
        return find_factors(torch.cat(rows), form, hessian)
