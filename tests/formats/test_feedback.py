"""What errors add to later columns: the algebra, and that it does what it is for."""

import numpy as np
import pytest
import torch

from rotaryquant.formats.feedback import RIDGE, feedback_of
from rotaryquant.formats.fit import Fit
from rotaryquant.formats.kv import StreamFormat
from rotaryquant.formats.rotation import rotation_matrix
from rotaryquant.ops.quantize import dequantize, quantize
from rotaryquant.ops.rotate import build_rotation, rotate
from rotaryquant.ops.streams import Codec

HEADS, LAYER = 2, 3


def unmoved(metric: np.ndarray) -> Fit:
    """Rows coded in their own space, whose errors cost by the metric."""
    heads, width, _ = metric.shape
    return Fit(metric, np.stack([np.eye(width)] * heads), np.zeros((heads, width)))


def metric(width: int) -> Fit:
    """Two heads that look at few directions, each at others; mean eigenvalue 1."""
    g = torch.Generator().manual_seed(width)
    root = torch.randn(HEADS, width, width, generator=g, dtype=torch.float64) * torch.logspace(0, -1.5, width)
    matrices = root @ root.transpose(-1, -2)
    return unmoved((matrices / matrices.diagonal(dim1=-1, dim2=-2).mean(-1)[:, None, None]).numpy())


def normal(matrix: np.ndarray) -> np.ndarray:
    """With a mean eigenvalue of 1, in full precision."""
    wide = matrix.astype(np.float64)
    return wide / (np.trace(wide) / len(wide))


def stream(width: int, bits: int, quantizer: str = "scalar") -> StreamFormat:
    rotation = "isoquant" if width & (width - 1) == 0 else "dense"
    return StreamFormat("key", width, bits, "score", rotation=rotation, quantizer=quantizer)


@pytest.mark.parametrize("width", [64, 72])
def test_factors_split_the_metric_into_blocks(width: int) -> None:
    one, how = metric(width), stream(width, 3)
    found = feedback_of(how, LAYER, one)
    assert found is not None
    for head, factors in enumerate(found[0]):
        turn = rotation_matrix(how.rotation, width, 0, *how.rotation_source(LAYER, head))
        upper = factors.astype(np.float64) + np.eye(width)
        middle = np.linalg.inv(upper) @ (turn @ normal(one.metric[head]) @ turn.T + RIDGE * np.eye(width))
        middle = middle @ np.linalg.inv(upper).T
        block = np.arange(width) // 16
        assert np.abs(middle[block[:, None] != block[None, :]]).max() < 1e-4
        assert (factors[block[:, None] >= block[None, :]] == 0).all()


@pytest.mark.parametrize(("width", "bits", "quantizer"), [(64, 3, "scalar"), (72, 4, "scalar"), (128, 3, "trellis")])
def test_errors_cost_what_the_gain_says(width: int, bits: int, quantizer: str) -> None:
    """Over what they cost without feedback; more where errors widen what is coded, so within a fifth."""
    one, how = metric(width), stream(width, bits, quantizer)
    found = feedback_of(how, LAYER, one)
    assert found is not None
    rotation = build_rotation(how, LAYER, HEADS)
    x = torch.randn(1, HEADS, 1500, width, generator=torch.Generator().manual_seed(1))
    y, costs = rotate(x, rotation), []
    for factors in (None, torch.from_numpy(found[0])):
        codec = Codec.from_format(how, feedback=factors)
        error = rotate(dequantize(*quantize(y, codec, kernel="reference"), codec) - y, rotation, inverse=True)
        costs.append(float((error @ torch.from_numpy(one.metric).float() * error).sum()))
    assert found[1] < 0.6
    assert found[1] <= costs[1] / costs[0] < 1.2 * found[1]


def test_a_metric_without_directions_changes_nothing() -> None:
    found = feedback_of(stream(64, 3), LAYER, unmoved(np.stack([np.eye(64), np.zeros((64, 64))])))
    assert found is not None
    assert np.abs(found[0]).max() < 1e-6
    assert found[1] == pytest.approx(1.0)


def test_eight_bits_are_coded_alone() -> None:
    assert feedback_of(stream(64, 8), LAYER, metric(64)) is None


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 64 values, the stream's have 128"):
        feedback_of(stream(128, 3), LAYER, metric(64))
    factors = torch.zeros(2, 128, 128)
    with pytest.raises(ValueError, match="one scale a row"):
        Codec.from_format(StreamFormat("key", 128, 3, "score", scale_group=64), feedback=factors)
    with pytest.raises(ValueError, match=r"feedback wants \[\.\.\., 2, rows, width\]"):
        quantize(torch.zeros(3, 5, 128), Codec.from_format(stream(128, 3), feedback=factors))
