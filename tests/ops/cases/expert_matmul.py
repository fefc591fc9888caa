"""Layers of routed experts: gated or not, few tokens and many, experts that nobody goes to, and ones elsewhere."""

from functools import partial
from itertools import product

import torch
from torch import Tensor

from rotaryquant.formats.weight import GRIDS, WeightFormat, fit
from rotaryquant.ops.expert_matmul import Gate, expert_matmul, reference
from rotaryquant.ops.pack import pack
from rotaryquant.ops.weights import PackedWeight, WeightCodec

from . import Case, generator

EXPERTS = 6


def silu_gate(up: Tensor) -> Tensor:
    gate, rest = up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * rest


def gelu_gate(up: Tensor) -> Tensor:
    gate, rest = up.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * rest


def clamped_gate(up: Tensor) -> Tensor:
    gate, rest = up.chunk(2, -1)
    return gate.clamp(-1, 1) * rest


#: Name, whether it halves, how kernels know it.
GATES = {
    "silu": (silu_gate, True, "silu"),
    "gelu": (gelu_gate, True, "gelu_tanh"),
    "other": (clamped_gate, True, None),
    "plain": (torch.relu, False, None),
}


def _stack(random: torch.Generator, form: WeightFormat, rows: int) -> PackedWeight:
    """Any codes; the scales of the last expert, to whom nobody goes, are no numbers."""
    codes = torch.randint(0, 1 << form.bits, (EXPERTS, rows, form.width), generator=random, dtype=torch.uint8)
    scales = torch.randn(EXPERTS, rows, form.groups, generator=random).to(torch.bfloat16) / 50
    scales[-1] = torch.nan
    return PackedWeight(WeightCodec.from_format(form), pack(codes, form.bits), scales)


def run(
    kernel: str, *, name: str, bits: tuple[int, int], grid: str, gate: str, tokens: int, k: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """A layer of width 96 and experts of 64: rows of both products are no multiple of any block.

    Of the reference what comes of inputs as they are and of those rounded to 8 bits, for either product.
    """
    random = generator(name)
    apply, halves, fused = GATES[gate]
    inner = 64
    forms = fit(96, bits[0], grid, 32, 5), fit(inner, bits[1], grid, 64, None if gate == "plain" else 7)
    assert forms[0] is not None
    assert forms[1] is not None
    first, second = _stack(random, forms[0], inner * (1 + halves)), _stack(random, forms[1], 77)
    x = torch.randn(tokens, 96, generator=random).to(dtype)
    experts = torch.rand(tokens, EXPERTS - 1, generator=random).argsort(1)[:, :k]
    elsewhere = torch.rand(tokens, k, generator=random) < 0.2
    experts = torch.where(elsewhere, EXPERTS, experts)
    weights = torch.rand(tokens, k, generator=random).to(dtype)
    weights[elsewhere] = torch.nan
    call = x, experts, weights, first, second, Gate(apply, fused)
    if kernel == "reference":
        return tuple(reference.run(*call, rounded) for rounded in product((False, True), repeat=2))
    return (expert_matmul(*call, kernel=kernel),)


def compare(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """A kernel takes inputs in one of these ways; of rounded ones a few fall on the other side (`dequant_matmul`)."""
    for one, allowed in zip(want, (5e-6, 3e-3, 3e-3, 3e-3), strict=True):
        assert got[0].dtype == one.dtype
        assert got[0].shape == one.shape
        tolerance = allowed if one.dtype == torch.float32 else 1.2e-2
        if float((got[0].float() - one.float()).norm()) <= tolerance * float(one.float().norm()):
            return
    raise AssertionError("neither of inputs as they are nor of rounded ones")


CASES = [
    Case(
        name := f"{grid} {bits[0]}-{bits[1]} bits, {gate}, {tokens} tokens to {k}, {str(dtype)[6:]}",
        partial(run, name=name, bits=bits, grid=grid, gate=gate, tokens=tokens, k=k, dtype=dtype),
        compare,
    )
    for grid in GRIDS
    for bits, gate, tokens, k, dtype in (
        ((2, 2), "silu", 1, 4, torch.float32),
        ((2, 2), "silu", 1, 4, torch.bfloat16),
        ((2, 4), "gelu", 2, 3, torch.bfloat16),
        ((3, 3), "other", 7, 2, torch.float32),
        ((4, 2), "plain", 33, 2, torch.bfloat16),
        ((8 if grid == "uniform" else 4, 3), "silu", 9, 1, torch.float32),
        ((2, 2), "silu", 0, 2, torch.float32),
    )
]
