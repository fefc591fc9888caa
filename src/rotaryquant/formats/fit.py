"""The space in which rows of one stream of one layer are coded, where a calibration knows them and what errors cost.

A metric M says what the error e of a row costs: eᵀ·M·e. Of keys it is the second moment of the queries that meet them
(the error of a logit is q·e), of values W·Wᵀ of the weights that their sum goes through. Codes err by a share of a
row's length, alike in all directions. So a row x is coded as y = A·(x - mean), where that is cheapest: with S the
second moment of x - mean, the mean cost of an error is its share times tr(A⁻ᵀ·M·A⁻¹)·tr(A·S·Aᵀ) / width, least for
AᵀA = S⁻¹ # M, the geometric mean of two positive definite matrices (Pusz and Woronowicz, 1975). Directions in which
rows are long and errors cheap shrink, others grow. A query meets codes as A⁻ᵀ·q, a sum of values goes back by A⁻¹, once
each. SmoothQuant (arXiv 2211.10438) and QServe (arXiv 2405.04532) choose a diagonal A by magnitudes.
"""

import hashlib
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Added to a metric and to a moment before they are balanced, in units of their mean eigenvalues: a calibration text
#: has not shown every direction (docs/experiments.md has other values).
METRIC_RIDGE, MOMENT_RIDGE = 0.1, 0.01


class Fit:
    """What a calibration found out about one stream of one layer. Equal where the same codes would mean the same.

    metric: M, symmetric, positive semidefinite, [num_kv_heads, width, width]. balance: A, symmetric, positive definite,
    of the same shape. mean: [num_kv_heads, width], taken off rows before they are coded; zeros for values, whose sum
    would need it back.
    """

    def __init__(self, metric: NDArray[np.floating], balance: NDArray[np.floating], mean: NDArray[np.floating]) -> None:
        heads, width, columns = metric.shape
        if heads < 1 or width != columns:
            raise ValueError(f"a metric has shape [num_kv_heads, width, width], not {metric.shape}")
        if balance.shape != metric.shape or mean.shape != metric.shape[:2]:
            raise ValueError(f"a metric {metric.shape} with a balance {balance.shape} and a mean {mean.shape}")
        self.metric: NDArray[np.float16] = metric.astype(np.float16)
        self.balance: NDArray[np.float32] = balance.astype(np.float32)
        self.mean: NDArray[np.float32] = mean.astype(np.float32)

    @property
    def shape(self) -> tuple[int, int]:
        """(num_kv_heads, width)."""
        return self.mean.shape[0], self.mean.shape[1]

    @cached_property
    def digest(self) -> str:
        """Of all its numbers."""
        parts = (self.metric.astype("<f2"), self.balance.astype("<f4"), self.mean.astype("<f4"))
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]

    @cached_property
    def dual(self) -> Array:
        """A⁻ᵀ of each head, by which queries meet codes; its transpose takes rows back."""
        return np.asarray(np.linalg.inv(self.balance.astype(np.float64)).transpose(0, 2, 1))

    @property
    def coded_metric(self) -> Array:
        """A⁻ᵀ·M·A⁻¹ of each head: what errors of coded rows cost."""
        return np.asarray(self.dual @ self.metric.astype(np.float64) @ self.dual.transpose(0, 2, 1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fit) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def balanced(metric: NDArray[np.floating], moment: NDArray[np.floating]) -> NDArray[np.float32]:
    """A of each head for errors that cost by `metric` and rows with second moment `moment` around their mean.

    Both [num_kv_heads, width, width], symmetric, positive semidefinite. The mean logarithm of A's eigenvalues is 0.
    """
    made = []
    for m, s in zip(_ridged(metric, METRIC_RIDGE), _ridged(moment, MOMENT_RIDGE), strict=True):
        root = _power(s, 0.5)
        back = np.linalg.inv(root)
        a = _power(back @ _power(root @ m @ root, 0.5) @ back, 0.5)
        a = (a / np.exp(np.linalg.slogdet(a)[1] / len(a))).astype(np.float32)
        made.append((a + a.T) / 2)
    return np.stack(made)


def _ridged(matrices: NDArray[np.floating], ridge: float) -> Array:
    """Matrices with a share of their mean eigenvalue added to all; the identity in place of zero."""
    width = matrices.shape[-1]
    mean = np.trace(matrices.astype(np.float64), axis1=1, axis2=2)[:, None, None] / width
    eye = np.eye(width)
    return np.asarray(np.where(mean > 0, matrices / np.where(mean > 0, mean, 1.0) + ridge * eye, eye))


def _power(matrix: Array, power: float) -> Array:
    """A power of a symmetric positive definite matrix."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return np.asarray((vectors * values**power) @ vectors.T)
