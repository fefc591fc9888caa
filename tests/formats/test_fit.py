"""The space that rows are coded in: the algebra, that it costs least there, and that rows come back from it."""

import numpy as np
import pytest
import torch

from rotaryquant.formats.feedback import feedback_of
from rotaryquant.formats.fit import METRIC_RIDGE, MOMENT_RIDGE, Fit, balanced
from rotaryquant.formats.kv import StreamFormat
from rotaryquant.ops.quantize import dequantize, quantize
from rotaryquant.ops.rotate import build_rotation, fitted_rotations, rotate
from rotaryquant.ops.streams import Codec
from support.fits import some_fit, some_moment

HEADS, LAYER = 2, 3
EYE = np.stack([np.eye(64)] * HEADS)


def ridged(matrix: np.ndarray, ridge: float) -> np.ndarray:
    return matrix / (np.trace(matrix) / len(matrix)) + ridge * np.eye(len(matrix))


def cost(a: np.ndarray, metric: np.ndarray, moment: np.ndarray) -> float:
    """What errors cost that are alike in all directions and a share of a row's length, with rows coded by `a`."""
    back = np.linalg.inv(a)
    return float(np.trace(back.T @ metric @ back) * np.trace(a @ moment @ a.T)) / len(a)


def test_balanced_makes_errors_as_dear_as_rows_are_long() -> None:
    metric, moment = some_moment(HEADS, 64, 0), some_moment(HEADS, 64, 1)
    for a, m, s in zip(balanced(metric, moment).astype(np.float64), metric, moment, strict=True):
        m, s, back = ridged(m, METRIC_RIDGE), ridged(s, MOMENT_RIDGE), np.linalg.inv(a)
        left, right = back.T @ m @ back, a @ s @ a.T
        assert np.allclose(left / np.trace(left), right / np.trace(right), atol=1e-5)
        assert np.array_equal(a, a.T)
        assert np.linalg.slogdet(a)[1] == pytest.approx(0.0, abs=1e-3)


def test_no_other_space_is_cheaper() -> None:
    """Not that of the rows, nor one that makes them alike in all directions, nor any close by."""
    metric, moment = ridged(some_moment(1, 64, 0)[0], METRIC_RIDGE), ridged(some_moment(1, 64, 1)[0], MOMENT_RIDGE)
    best = balanced(some_moment(1, 64, 0), some_moment(1, 64, 1))[0].astype(np.float64)
    least, generator = cost(best, metric, moment), np.random.default_rng(0)
    assert least < 0.8 * cost(np.eye(64), metric, moment)
    assert least < 0.8 * cost(np.linalg.inv(np.linalg.cholesky(moment)), metric, moment)
    for _ in range(20):
        near = best @ (np.eye(64) + 0.02 * generator.standard_normal((64, 64)))
        assert cost(near, metric, moment) > least


@pytest.mark.parametrize("matrix", [EYE, np.zeros((HEADS, 64, 64))])
def test_rows_without_directions_stay_as_they_are(matrix: np.ndarray) -> None:
    assert np.allclose(balanced(matrix, EYE), EYE, atol=1e-6)
    assert np.allclose(balanced(EYE, matrix), EYE, atol=1e-6)


@pytest.mark.parametrize("rotation", ["isoquant", "dense", "none"])
def test_products_and_sums_come_out_as_before(rotation: str) -> None:
    """What rows are turned by and what meets them cancel: q·k = (read q)·(write k), and v = readᵀ(write v)."""
    stream, fit = StreamFormat("key", 64, 3, "score", rotation=rotation), some_fit(HEADS, 64)
    written, read = fitted_rotations(stream, LAYER, fit)
    q, k = torch.randn(2, 1, HEADS, 9, 64, generator=torch.Generator().manual_seed(0)).unbind()
    for kernel in ("auto", "reference"):
        met = rotate(q, read, kernel=kernel) @ rotate(k, written, kernel=kernel).mT
        assert torch.allclose(met, q @ k.mT, atol=1e-4)
        assert torch.allclose(
            rotate(rotate(k, written, kernel=kernel), read, inverse=True, kernel=kernel), k, atol=1e-4
        )
    moved = k @ torch.from_numpy(fit.balance).mT
    assert torch.allclose(rotate(k, written), rotate(moved, build_rotation(stream, LAYER, HEADS)), atol=1e-4)


@pytest.mark.parametrize(("bits", "quantizer"), [(2, "scalar"), (3, "scalar"), (3, "trellis")])
def test_fitted_rows_err_where_it_costs_less(bits: int, quantizer: str) -> None:
    """On rows as they were foretold, with and without errors that cancel, less than as they are."""
    fit, width = some_fit(HEADS, 64, mean=False), 64
    roots = np.linalg.cholesky(some_moment(HEADS, width, 1))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, HEADS, 2000, width, generator=generator) @ torch.from_numpy(roots).float().mT
    stream = StreamFormat("key", width, bits, "score", quantizer=quantizer)
    plain = build_rotation(stream, LAYER, HEADS)
    fed = feedback_of(stream, LAYER, fit)
    assert fed is not None
    costs = []
    for (write, read), factors in (
        ((plain, plain), None),
        (fitted_rotations(stream, LAYER, fit), None),
        (fitted_rotations(stream, LAYER, fit), torch.from_numpy(fed[0])),
    ):
        codec = Codec.from_format(stream, feedback=factors)
        coded = dequantize(*quantize(rotate(x, write), codec), codec)
        error = rotate(coded, read, inverse=True) - x
        costs.append(float((error @ torch.from_numpy(fit.metric).float() * error).sum()))
    assert costs[1] < 0.75 * costs[0]
    assert costs[2] < 0.9 * costs[1]


def test_fits_are_equal_by_their_numbers() -> None:
    one, same, other = some_fit(HEADS, 64), some_fit(HEADS, 64), some_fit(HEADS, 64, 5)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != Fit(one.metric, one.balance, one.mean + 1)
    assert one != Fit(one.metric, 2 * one.balance, one.mean)
    assert one != Fit(2 * one.metric, one.balance, one.mean)
    assert one.shape == (HEADS, 64)
    assert fitted_rotations(StreamFormat("key", 64, 3, "score"), 0, one) is fitted_rotations(
        StreamFormat("key", 64, 3, "score"), 0, same
    )


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_heads, width, width"):
        Fit(np.zeros((2, 64, 32)), EYE, np.zeros((2, 64)))
    with pytest.raises(ValueError, match="with a balance"):
        Fit(EYE, EYE[:1], np.zeros((2, 64)))
    with pytest.raises(ValueError, match="and a mean"):
        Fit(EYE, EYE, np.zeros((2, 63)))


def test_a_format_names_its_fit() -> None:
    plain, fitted = StreamFormat("key", 64, 3, "score"), StreamFormat("key", 64, 3, "score", fit="abc")
    assert "fit" not in plain.to_dict()
    assert [StreamFormat.from_dict(one.to_dict()) for one in (plain, fitted)] == [plain, fitted]
    assert plain.fingerprint() != fitted.fingerprint()
