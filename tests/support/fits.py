"""Fits as a calibration would make them, of rows that lie anywhere and longer in some directions than in others."""

import numpy as np

from rotaryquant.formats.fit import Fit, balanced


def some_moment(heads: int, width: int, seed: int, slope: float = 1.5) -> np.ndarray:
    """Symmetric, positive definite, eigenvalues over 2·slope decades, a mean diagonal of 1: [heads, width, width]."""
    generator = np.random.default_rng(seed)
    roots = generator.standard_normal((heads, width, width)) * np.logspace(0, -slope, width)
    moments = roots @ roots.transpose(0, 2, 1)
    return np.asarray(moments / (np.trace(moments, axis1=1, axis2=2) / width)[:, None, None])


def some_fit(heads: int, width: int, seed: int = 0, *, mean: bool = True) -> Fit:
    """Of rows and errors that care for other directions; mean: rows do not lie around zero."""
    metric, moment = some_moment(heads, width, seed), some_moment(heads, width, seed + 1)
    off = np.random.default_rng(seed + 2).standard_normal((heads, width)) * mean
    return Fit(metric, balanced(metric, moment), off)
