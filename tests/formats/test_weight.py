"""The bytes of packed weights: sizes, grids, and which formats a row can have."""

import numpy as np
import pytest

from rotaryquant.formats.weight import GRIDS, WeightFormat, fit, input_rotation, input_signs


def test_sizes_count_codes_and_scales() -> None:
    form = WeightFormat(512, 3, "trellis", 128, 0)
    assert (form.code_bytes, form.groups, form.bits_per_weight) == (192, 4, 3.125)
    assert WeightFormat(64, 8, "uniform", 32).bits_per_weight == 8.5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ((512, 5, "normal", 128), "bits=5"),
        ((512, 3, "linear", 128), "grid='linear'"),
        ((512, 8, "trellis", 32), "at 8 bits"),
        ((500, 3, "normal", 128), "width=500 and group=128"),
        ((24, 3, "trellis", 24), "whole units of 16"),
    ],
)
def test_formats_that_no_row_can_have_say_why(wrong: tuple[int, int, str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WeightFormat(*wrong)


def test_a_group_gives_way_to_the_row() -> None:
    assert fit(512, 3, "trellis", 128, 0) == WeightFormat(512, 3, "trellis", 128, 0)
    assert fit(704, 2, "trellis", 128, 0) == WeightFormat(704, 2, "trellis", 64, 0)
    assert fit(48, 2, "trellis", 128, None) == WeightFormat(48, 2, "trellis", 16)
    assert fit(1536, 8, "trellis", 128, 0) == WeightFormat(1536, 8, "uniform", 32, 0)
    assert fit(40, 4, "normal", 128, None) == WeightFormat(40, 4, "normal", 8)
    assert fit(24, 4, "trellis", 128, None) is None
    assert fit(4, 8, "normal", 128, None) is None


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_small_integers_and_the_unit_suits_normal_numbers(grid: str, bits: int) -> None:
    form = WeightFormat(128, bits, grid, 128)
    levels = np.array(form.levels)
    assert len(levels) == form.classes << bits
    assert np.abs(levels).max() <= 127
    if form.classes == 1:
        assert list(levels) == sorted(levels)
        normal = np.random.default_rng(0).standard_normal(200_000)

        def error(unit: float) -> float:
            return float(np.square(normal[:, None] - unit * levels).min(-1).mean())

        assert error(form.unit) <= min(error(1.03 * form.unit), error(0.97 * form.unit)) * 1.002


@pytest.mark.parametrize("width", [8, 48, 64, 576, 704])
def test_the_rotation_is_orthogonal_and_stays_inside_its_blocks(width: int) -> None:
    form = WeightFormat(width, 4, "normal", 8, 7)
    rotation = input_rotation(form)
    assert rotation is not None
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(width), atol=1e-12)
    block = np.arange(width) // form.rotated
    assert not rotation[block[:, None] != block[None, :]].any()
    assert form.rotated == min(width & -width, 128)
    assert input_rotation(WeightFormat(width, 4, "normal", 8)) is None


def test_signs_are_drawn_once_and_for_all() -> None:
    assert input_signs(16, 0).tolist() == [-1, 1, 1, -1, 1, 1, 1, -1, 1, -1, 1, -1, -1, -1, -1, -1]
    assert abs(float(input_signs(4096, 3).mean())) < 0.05
