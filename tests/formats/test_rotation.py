"""The rotation against its mathematics, and against numbers published for its generator."""

import numpy as np
import pytest

from rotaryquant.formats import rotation as rotations

#: (start, first words), published with the generator and by independent implementations.
SPLITMIX64 = {
    0: (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F),
    1234567: (
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ),
}

#: Every head width in use: powers of two, and 3, 5 and 7 times one (Paley orders 12, 20, 28).
WIDTHS = (8, 16, 32, 64, 80, 96, 112, 128, 192, 256, 320, 512)


@pytest.mark.parametrize("start", SPLITMIX64)
def test_splitmix64_gives_the_published_words(start: int) -> None:
    want = SPLITMIX64[start]
    assert tuple(int(word) for word in rotations.splitmix64(start, len(want))) == want


def test_splitmix64_wraps_at_64_bits() -> None:
    assert np.array_equal(rotations.splitmix64(2**64 + 5, 3), rotations.splitmix64(5, 3))


def test_signs_are_fixed_by_their_seed_alone() -> None:
    first = rotations.signs(128, 0, 3, 1, 0)
    assert set(np.unique(first)) == {-1.0, 1.0}
    assert np.array_equal(first, rotations.signs(128, 0, 3, 1, 0))
    # a wider draw starts with the same signs, so a padded width keeps them
    assert np.array_equal(rotations.signs(200, 0, 3, 1, 0)[:128], first)


@pytest.mark.parametrize("other", [(1, 3, 1, 0), (0, 4, 1, 0), (0, 3, 2, 0), (0, 3, 1, 1)])
def test_signs_differ_by_seed_layer_head_and_stream(other: tuple[int, int, int, int]) -> None:
    same = np.mean(rotations.signs(512, *other) == rotations.signs(512, 0, 3, 1, 0))
    assert 0.4 < same < 0.6


def test_signs_are_balanced() -> None:
    drawn = np.stack([rotations.signs(128, 0, layer, head, 0) for layer in range(32) for head in range(8)])
    assert abs(drawn.mean()) < 0.02
    assert np.abs(drawn.mean(0)).max() < 0.3  # no coordinate is stuck


@pytest.mark.parametrize("width", WIDTHS)
def test_hadamard_is_orthogonal_with_equal_entries(width: int) -> None:
    matrix = rotations.hadamard(width)
    assert matrix.shape == (width, width)
    assert np.allclose(np.abs(matrix) * np.sqrt(width), 1.0, atol=1e-12)
    assert np.allclose(matrix @ matrix.T, np.eye(width), atol=1e-12)


@pytest.mark.parametrize("order", [12, 20, 28])
def test_paley_matrices_are_hadamard(order: int) -> None:
    matrix = rotations.paley_base(order)
    assert set(np.unique(matrix)) == {-1.0, 1.0}
    assert np.array_equal(matrix @ matrix.T, order * np.eye(order))


@pytest.mark.parametrize(
    ("width", "factors"), [(64, (64, 1)), (80, (4, 20)), (96, (8, 12)), (112, (4, 28)), (192, (16, 12)), (12, (1, 12))]
)
def test_hadamard_factors(width: int, factors: tuple[int, int]) -> None:
    assert rotations.hadamard_factors(width) == factors


@pytest.mark.parametrize("width", [0, 24 * 3, 88, 36, 100])
def test_width_without_a_hadamard_matrix_is_refused_with_a_way_out(width: int) -> None:
    with pytest.raises(ValueError, match=rf"head width {width}:.*rotation=dense or rotation=so4"):
        rotations.hadamard_factors(width)


@pytest.mark.parametrize("kind", ["so4", "so3"])
def test_blocks_are_rotations_with_an_exact_inverse(kind: str) -> None:
    blocks = rotations.so4_blocks(kind, 128, 0, 1, 2, 0)
    assert blocks is not None
    assert blocks.shape == (32, 4, 4)
    assert np.allclose(blocks @ blocks.transpose(0, 2, 1), np.eye(4), atol=1e-14)
    assert np.allclose(np.linalg.det(blocks), 1.0, atol=1e-13)


def test_so3_blocks_leave_their_first_coordinate_unmixed_and_so4_blocks_do_not() -> None:
    so3 = rotations.so4_blocks("so3", 128, 0, 1, 2, 0)
    so4 = rotations.so4_blocks("so4", 128, 0, 1, 2, 0)
    assert so3 is not None
    assert so4 is not None
    unmixed = np.tile([1.0, 0.0, 0.0, 0.0], (32, 1))
    assert np.allclose(so3[:, 0], unmixed, atol=1e-14)
    assert np.allclose(so3[:, :, 0], unmixed, atol=1e-14)
    assert np.abs(so4[:, 0, 0]).max() < 0.999


def test_quaternions_are_given_by_three_numbers_each() -> None:
    stored = rotations.quaternions(128, 0, 1, 2, 0)[..., 1:]  # 3 + 3 numbers a block
    assert stored.size == 192
    scalar = np.sqrt(1.0 - np.square(stored).sum(-1, keepdims=True))
    whole = np.concatenate([scalar, stored], -1)
    assert np.allclose(whole, rotations.quaternions(128, 0, 1, 2, 0), atol=1e-7)
    blocks = np.stack([rotations.so4_matrix(left, right) for left, right in whole])
    want = rotations.so4_blocks("so4", 128, 0, 1, 2, 0)
    assert want is not None
    assert np.allclose(blocks, want, atol=1e-6)


def test_so4_matrix_is_the_quaternion_product() -> None:
    """x -> l x conj(r) on the units: l = i, r = 1 sends 1 to i, i to -1, j to k, k to -j."""
    one, i = np.array([1.0, 0, 0, 0]), np.array([0, 1.0, 0, 0])
    want = np.array([[0.0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 0, -1], [0, 0, 1, 0]])
    assert np.array_equal(rotations.so4_matrix(i, one), want)
    # l = 1, r = i is the product with conj(i) = -i from the right: 1 to -i, i to 1, j to k, k to -j
    want = np.array([[0.0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, -1], [0, 0, 1, 0]])
    assert np.array_equal(rotations.so4_matrix(one, i), want)


def test_quaternions_need_a_multiple_of_four() -> None:
    with pytest.raises(ValueError, match=r"head width 30 .*multiple of 4.*rotation=dense"):
        rotations.quaternions(30, 0, 0, 0, 0)


@pytest.mark.parametrize("kind", rotations.KINDS)
@pytest.mark.parametrize("width", [64, 96])
def test_every_kind_is_orthogonal(kind: str, width: int) -> None:
    matrix = rotations.rotation_matrix(kind, width, 7, 1, 2, 1)
    assert np.allclose(matrix @ matrix.T, np.eye(width), atol=1e-12)


def test_isoquant_is_blocks_times_hadamard_times_signs() -> None:
    """Coordinate by coordinate, from the definition y = B·H·S·x."""
    width, where = 96, (7, 1, 2, 1)
    x = np.random.default_rng(0).standard_normal(width)
    y = rotations.hadamard(width) @ (rotations.signs(width, *where) * x)
    blocks = rotations.so4_blocks("isoquant", width, *where)
    assert blocks is not None
    y = np.concatenate([block @ y[4 * index : 4 * index + 4] for index, block in enumerate(blocks)])
    assert np.allclose(rotations.rotation_matrix("isoquant", width, *where) @ x, y, atol=1e-12)


def test_dense_matrices_are_spread_evenly() -> None:
    """Haar: entries have variance 1/width, and no coordinate keeps its sign as a bare QR would."""
    stack = np.stack([rotations.dense_matrix(64, seed, 0, 0, 0) for seed in range(40)])
    assert abs(np.square(stack).mean() * 64 - 1) < 1e-9
    diagonal = np.diagonal(stack, axis1=1, axis2=2)
    assert abs(diagonal.mean()) < 0.02


def test_unknown_kind_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"rotation='wht' is unknown; valid: isoquant, hadamard, so4"):
        rotations.rotation_matrix("wht", 64, 0, 0, 0, 0)
