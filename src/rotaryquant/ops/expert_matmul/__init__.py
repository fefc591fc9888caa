"""A layer of routed experts on packed weights: only the experts that tokens go to are read."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rotaryquant.ops import dispatch
from rotaryquant.ops.weights import PackedWeight

KERNELS = ("triton", "cpu", "reference")


@dataclass(frozen=True, slots=True)
class Gate:
    """What lies between the two products of an expert.

    apply: [n, rows of the first] to [n, width of the second], in the dtype that it is given. fused: "silu" or
    "gelu_tanh" where it is that activation of the first half times the second half, so that a kernel may compute it in
    fp32 itself; None for anything else.
    """

    apply: Callable[[Tensor], Tensor]
    fused: str | None = None


def expert_matmul(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    first: PackedWeight,
    second: PackedWeight,
    gate: Gate,
    *,
    kernel: str = "auto",
) -> Tensor:
    """Σ over a token's experts of weight · second · gate(first · x), inputs of both products rotated on the way.

    x: [tokens, width], any float dtype. experts: int64 or int32 [tokens, k]; one outside the stack is elsewhere and
    adds nothing. weights: [tokens, k], float. first: a stack [experts, rows, width]; second: [experts, rows, inner].
    Returns [tokens, rows of second] in x's dtype. The first product and what the gate makes of it have x's dtype,
    products and sums are fp32 or better. Raises ValueError where shapes do not fit.
    """
    if (
        x.dim() != 2
        or experts.dim() != 2
        or experts.shape != weights.shape
        or len(experts) != len(x)
        or first.codes.dim() != 3
        or second.codes.dim() != 3
        or len(first.codes) != len(second.codes)
        or first.shape[-1] != x.shape[-1]
    ):
        raise ValueError(
            f"x {tuple(x.shape)}, experts {tuple(experts.shape)}, weights {tuple(weights.shape)}, stacks {first.shape} "
            f"and {second.shape}: wanted [tokens, width], twice [tokens, k], [experts, rows, width] and [..., inner]"
        )
    result: Tensor = dispatch.run("expert_matmul", kernel, x, experts, weights, first, second, gate)
    return result
