"""The codes of a trellis: of every circle of columns the path with the least squared error."""

from torch import Tensor

from rotaryquant.formats.codebook import CYCLE
from rotaryquant.ops import dispatch

KERNELS = ("cpu", "triton", "reference")


def best_circles(x: Tensor, levels: Tensor, *, kernel: str = "auto") -> Tensor:
    """Codes of circles, each chosen for all its columns together.

    x: int64 [circles, CYCLE], contiguous, below 2^24 in magnitude. levels: int64 [classes, 2^bits], what a code after
    one of each class stands for; a code's class is the code modulo their number, and the last code of a circle is the
    one before its first. Returns codes int64 [circles, CYCLE] with the least sum of squared differences. Integers, so
    that ties do not depend on rounding: of equal circles the one that ends with the lowest class is taken, then that
    with the lowest classes before, then the lowest codes (Viterbi's algorithm for each class to end with).
    """
    if x.dim() != 2 or x.shape[1] != CYCLE:
        raise ValueError(f"x has shape {tuple(x.shape)}; circles are [circles, {CYCLE}]")
    result: Tensor = dispatch.run("circles", kernel, x, levels)
    return result
