"""Codebooks against levels and errors that were computed independently of this code."""

import numpy as np
import pytest

from rotaryquant.formats.codebook import (
    BITS,
    CYCLE,
    FINE,
    TRELLISES,
    codebook,
    integer_levels,
    lloyd_max,
    mean_squared_error,
    relative_error,
)

#: Mean squared error per unit variance of the optimal levels for a coordinate of the unit sphere.
SPHERE_ERRORS = {
    64: (0.114526, 0.033391, 0.009132),
    80: (0.11512, 0.03362, 0.00920),
    96: (0.11551, 0.03377, 0.00925),
    128: (0.116000, 0.033966, 0.009315),
    256: (0.116740, 0.034256, 0.009408),
}
SPHERE_128_LEVELS = (0.24442, 0.75333, 1.3366, 2.13147)
NORMAL_LEVELS = (0.24509, 0.75601, 1.34391, 2.15195)
NORMAL_ERRORS = (0.117482, 0.034548, 0.009501)


def _upper_half(levels: tuple[float, ...]) -> np.ndarray:
    return np.array(levels[len(levels) // 2 :])


def test_three_bit_levels_at_width_128() -> None:
    levels = lloyd_max(128, 3)
    assert np.allclose(_upper_half(levels), SPHERE_128_LEVELS, atol=6e-6)
    assert np.allclose(levels, -np.array(levels[::-1]), atol=1e-12)


@pytest.mark.parametrize("width", SPHERE_ERRORS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_of_the_levels(width: int, bits: int) -> None:
    error = mean_squared_error(width, np.array(lloyd_max(width, bits)))
    digits = 6 if width in (64, 128, 256) else 5
    assert error == pytest.approx(SPHERE_ERRORS[width][bits - 2], abs=0.6 * 10**-digits)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_wide_vectors_approach_the_normal_distribution(bits: int) -> None:
    error = mean_squared_error(4096, np.array(lloyd_max(4096, bits)))
    assert error == pytest.approx(NORMAL_ERRORS[bits - 2], rel=1e-3)
    if bits == 3:
        assert np.allclose(_upper_half(lloyd_max(4096, 3)), NORMAL_LEVELS, atol=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_the_means_of_their_cells(bits: int) -> None:
    """The condition of optimality, on samples instead of on the density."""
    levels = np.array(lloyd_max(128, bits))
    x = np.random.default_rng(0).standard_normal((20_000, 128))
    x *= np.sqrt(128) / np.linalg.norm(x, axis=1, keepdims=True)
    cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, x.ravel())
    means = np.bincount(cell, x.ravel(), len(levels)) / np.bincount(cell, minlength=len(levels))
    assert np.allclose(means, levels, atol=4e-3)


def test_three_bit_integers() -> None:
    assert integer_levels(3) == (-113, -71, -40, -13, 13, 40, 71, 113)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("width", [32, 64, 80, 128, 512])
def test_integers_cost_next_to_nothing(bits: int, width: int) -> None:
    book = codebook(width, bits)
    assert max(map(abs, book.levels)) <= 127
    assert len(book.levels) == 2**bits
    optimum = mean_squared_error(width, np.array(lloyd_max(width, bits)))
    error = mean_squared_error(width, np.array(book.levels) * book.unit)
    # at width 128, where the integers were chosen, 3 bits lose 0.002%
    assert optimum <= error <= optimum * (1.00003 if (width, bits) == (128, 3) else 1.005)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_boundaries_are_midpoints(bits: int) -> None:
    book = codebook(128, bits)
    levels = np.array(book.levels) * book.unit
    assert np.allclose(book.boundaries, (levels[1:] + levels[:-1]) / 2, atol=1e-15)
    assert 0.0 in book.boundaries  # symmetric levels split at zero


def test_eight_bits_are_the_int8_grid() -> None:
    book = codebook(128, 8)
    assert book.levels == tuple(range(-128, 128))
    assert book.boundaries == ()


def test_thirty_two_bits_have_no_levels() -> None:
    book = codebook(128, 32)
    assert (book.levels, book.boundaries) == ((), ())


@pytest.mark.parametrize("bits", [0, 1, 5, 16])
def test_unknown_bits_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=rf"bits={bits} is unknown; valid: 2, 3, 4, 8, 32"):
        codebook(128, bits)


def test_bits_list_is_what_the_message_says() -> None:
    assert BITS == (2, 3, 4, 8, 32)


def circle_errors(x: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices into levels [classes, codes] of the best circle for each row of x [n, CYCLE], and its squared error.

    Written anew, without integers: Viterbi over whole codes for each code that a circle may end with.
    """
    classes, codes = levels.shape
    rows, spread = np.arange(len(x)), levels[np.arange(codes) % classes]  # [code before, code]
    best, found = np.full(len(x), np.inf), np.zeros(x.shape, dtype=int)
    for first in range(codes):
        cost = np.full((len(x), codes), np.inf)
        cost[:, first] = 0.0
        came = []
        for column in range(CYCLE):
            total = cost[:, :, None] + (x[:, column, None, None] - spread) ** 2
            came.append(total.argmin(1))
            cost = total.min(1)
        state, indices = np.full(len(x), first), np.zeros(x.shape, dtype=int)
        for column in range(CYCLE - 1, -1, -1):
            before = came[column][rows, state]
            indices[:, column], state = codes * (before % classes) + state, before
        better = cost[:, first] < best
        best, found[better] = np.minimum(best, cost[:, first]), indices[better]
    return found, best


def table_of(bits: int) -> np.ndarray:
    trellis = TRELLISES[bits]
    return np.array(trellis.levels, dtype=float).reshape(trellis.classes, -1) * trellis.unit


@pytest.mark.parametrize("bits", TRELLISES)
def test_a_trellis_is_at_rest(bits: int) -> None:
    """Its error is what it says, far below that of lone levels; a round of Lloyd's algorithm would gain hardly more."""
    book, levels = codebook(128, bits, "trellis"), table_of(bits)
    rng = np.random.default_rng(7)
    train, test = rng.standard_normal((1200, CYCLE)), rng.standard_normal((1200, CYCLE))
    indices, _ = circle_errors(train, levels)
    moved = np.array([train[indices == k].mean() for k in range(levels.size)]).reshape(levels.shape)
    errors = [circle_errors(test, table)[1].mean() / CYCLE for table in (levels, moved)]
    assert errors[0] == pytest.approx(relative_error(128, bits, "trellis"), rel=0.04)
    assert errors[0] < {2: 0.8, 3: 0.67, 4: 0.69}[bits] * relative_error(128, bits)
    assert errors[1] > 0.985 * errors[0]
    assert max(map(abs, book.levels)) <= 127
    assert len(book.levels) == TRELLISES[bits].classes * 2**bits <= 64  # one look-up
    assert book.boundaries == ()


@pytest.mark.parametrize("bits", TRELLISES)
def test_the_reference_finds_the_best_circle(bits: int) -> None:
    """Against the search above: FINE steps of a level are close enough to real numbers."""
    import torch

    from rotaryquant.formats.kv import StreamFormat
    from rotaryquant.ops.quantize import dequantize, quantize
    from rotaryquant.ops.streams import Codec

    x = np.random.default_rng(3).standard_normal((150, 64))
    x /= np.sqrt((x**2).mean(1, keepdims=True))
    codec = Codec.from_format(StreamFormat("key", 64, bits, "norm", quantizer="trellis"))
    codes, _ = quantize(torch.tensor(x, dtype=torch.float32), codec, kernel="reference")
    back = dequantize(codes, torch.full((150, 1), codec.unit, dtype=torch.float32), codec).numpy()
    _, best = circle_errors(x.reshape(-1, CYCLE), table_of(bits))
    error = ((back - x) ** 2).sum()
    assert best.sum() <= error * (1 + 1e-6)
    assert error <= best.sum() * (1 + 1e-3)
    assert FINE * max(map(abs, TRELLISES[bits].levels)) < 2**10  # errors of rows of any width fit 32 bits


@pytest.mark.parametrize(("width", "bits"), [(64, 8), (64, 32), (72, 3)])
def test_a_trellis_that_does_not_exist_is_refused(width: int, bits: int) -> None:
    with pytest.raises(ValueError, match="a trellis has 2 to 4 bits"):
        codebook(width, bits, "trellis")
