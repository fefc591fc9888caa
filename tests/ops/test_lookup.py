"""The assembly that looks levels up, run here instruction by instruction, against the definition of a level."""

import importlib.util

import numpy as np
import pytest

from rotaryquant.formats.weight import WeightFormat
from support import ptx

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

FORMS = [
    (bits, grid) for bits in (2, 3, 4, 8) for grid in ("trellis", "normal", "uniform") if bits != 8 or grid == "uniform"
]


def expected(form: WeightFormat, codes: np.ndarray) -> np.ndarray:
    before = codes.reshape(len(codes), -1, min(16, codes.shape[1]))
    before = np.roll(before, 1, 2).reshape(codes.shape) % form.classes
    return np.array(form.levels)[(before << form.bits) + codes if form.classes > 1 else codes]


@pytest.mark.parametrize(("bits", "grid"), FORMS)
@pytest.mark.parametrize("tiles", [False, True])
def test_assembly_decodes_what_the_codes_stand_for(bits: int, grid: str, tiles: bool) -> None:
    from rotaryquant.native.triton import lookup

    form = WeightFormat(64, bits, grid, 64)
    unit, route = lookup.unit_of(bits, form.classes), lookup.route_of(bits, form.classes, tiles)
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (500, unit))
    stream = [sum(int(code) << (bits * i) for i, code in enumerate(row)) for row in codes]
    size = 64 if bits == 4 and form.classes > 1 else 32
    words = [
        np.array([value >> at & ((1 << size) - 1) for value in stream], np.uint64) for at in range(0, unit * bits, size)
    ]
    table = lookup.table_of(form.levels, bits, form.classes, route)
    text, constraints, outputs = lookup.ptx_of(bits, form.classes, route)
    copies = np.array(table, np.int32).view(np.uint32).astype(np.uint64).reshape(-1, lookup.COPIES)
    assert route == "shuffle" or bool((copies == copies[:, :1]).all())
    entries = list(copies if route == "shuffle" else copies[: lookup.tables_of(route), 0])
    assert constraints.count("=r") == outputs
    assert len(constraints.split(",")) == outputs + len(words) + len(entries)
    found = np.stack(ptx.run(text, [*words, *entries], outputs), 1)
    levels = found.astype("<u4").view(np.int8).reshape(500, unit // 4, -1, 4).astype(int).sum(2)
    columns = [lookup.column_of.fn(word, byte, bits) for word in range(unit // 4) for byte in range(4)]
    assert sorted(columns) == list(range(unit))
    assert np.array_equal(levels.reshape(500, unit), expected(form, codes)[:, columns])
