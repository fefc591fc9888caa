"""What the error of a coded row adds to the columns coded after it, so that the errors cancel where they would count.

A metric M says what the error e of a coded row costs: eᵀ·M·e (formats.fit). With M = U·D·Uᵀ, U unit upper triangular in
blocks of 16 columns, the cost is the sum over blocks of (Uᵀe)ᵀ·D·(Uᵀe): codes that are chosen block after block, each
for its columns plus what U carries over from the errors so far, make every term as small as a single block allows
(the rounding of GPTQ, arXiv 2210.17323, and QuIP, arXiv 2307.13304, for the rows of a cache). Only the choice of codes
changes: a reader needs to know nothing of it.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rotaryquant.formats.codebook import CYCLE
from rotaryquant.formats.fit import Array, Fit
from rotaryquant.formats.kv import StreamFormat
from rotaryquant.formats.rotation import rotation_matrix

#: Added to a metric before it is used, in units of its mean eigenvalue: a calibration text has not asked for everything
#: that others will (docs/experiments.md has other values).
RIDGE = 0.5

#: Codes of more bits than this are chosen alone: their error no longer matters.
MOST_BITS = 4

#: Tables that are kept; more than the streams of any model so far.
_KEPT = 512


@lru_cache(maxsize=_KEPT)
def feedback_of(stream: StreamFormat, layer: int, fit: Fit) -> tuple[NDArray[np.float32], float] | None:
    """Factors fp32 [num_kv_heads, width, width] of a stream's heads in `layer`, and the gain; None for 8 bits and more.

    Entry [h, i, j] is what the error of column i adds to column j of a later block, 0 elsewhere. gain: expected cost of
    a row's error over what it would be without, mean over heads. Raises ValueError where the fit is of other rows.
    """
    if stream.bits > MOST_BITS:
        return None
    if fit.shape[1] != stream.width:
        raise ValueError(f"the fit is of rows of {fit.shape[1]} values, the stream's have {stream.width}")
    factors, gains = [], []
    for head, matrix in enumerate(fit.coded_metric):
        turn = rotation_matrix(
            stream.rotation, stream.width, stream.seed, *stream.rotation_source(layer, head), with_signs=stream.signs
        )
        turned = turn @ matrix @ turn.T
        mean = np.trace(turned) / stream.width
        turned = turned / mean if mean > 0 else np.eye(stream.width)
        upper = _block_upper(turned + RIDGE * np.eye(stream.width))
        back = np.linalg.inv(upper)
        gains.append(float(np.trace(back @ turned @ back.T)) / stream.width)
        factors.append(np.triu(upper, 1) * _later_blocks(stream.width))
    return np.stack(factors).astype(np.float32), float(np.mean(gains))


def _block_upper(matrix: Array) -> Array:
    """U of matrix = U·D·Uᵀ, unit upper triangular in blocks of CYCLE columns, D block diagonal."""
    cholesky = np.linalg.cholesky(matrix[::-1, ::-1])[::-1, ::-1]  # upper triangular, matrix = C·Cᵀ
    upper = np.zeros_like(matrix)
    for begin in range(0, len(matrix), CYCLE):
        block = slice(begin, begin + CYCLE)
        upper[:, block] = cholesky[:, block] @ np.linalg.inv(cholesky[block, block])
    return upper


def _later_blocks(width: int) -> NDArray[np.bool_]:
    """[i, j]: column j lies in a later block than column i."""
    block = np.arange(width) // CYCLE
    return np.asarray(block[:, None] < block[None, :])
