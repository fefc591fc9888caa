"""Rows, headers and the order of bits in a sealed block."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from rotaryquant.formats.kv import BLOCK, STRIP, StreamFormat, sealed_bit_order

DEFAULT = StreamFormat("key", 128, 3, "score", mean="block0", tau=0.5)
#: llama.cpp's fixed blocks of 64 values: one fp16 scale each, one set of signs for all, no mean.
BLOCKS_OF_64 = StreamFormat("key", 128, 3, "score", scale_group=64, scale_dtype="fp16", sign_scope="shared")


def test_three_bit_row_of_width_128_takes_50_bytes() -> None:
    assert (DEFAULT.code_bytes, DEFAULT.scale_bytes, DEFAULT.row_bytes) == (48, 2, 50)
    assert DEFAULT.bits_per_value == 3.125


@pytest.mark.parametrize(
    ("width", "bits", "group", "row_bytes"),
    [
        (64, 3, 64, 26),
        (96, 3, 96, 38),
        (80, 3, 80, 32),
        (112, 2, 112, 30),
        (128, 2, 128, 34),
        (128, 4, 128, 66),
        (128, 8, 128, 130),
        (128, 3, 64, 52),
        (512, 3, 512, 194),
        (128, 32, 128, 512),
    ],
)
def test_row_bytes(width: int, bits: int, group: int, row_bytes: int) -> None:
    assert StreamFormat("value", width, bits, "value", scale_group=group).row_bytes == row_bytes


def test_a_block_has_128_positions() -> None:
    assert BLOCK == 128


@pytest.mark.parametrize("header", [DEFAULT, BLOCKS_OF_64], ids=["default", "blocks-of-64"])
def test_header_survives_json(header: StreamFormat) -> None:
    assert StreamFormat.from_dict(json.loads(json.dumps(header.to_dict()))) == header


def test_header_says_everything_that_changes_the_bytes() -> None:
    assert set(DEFAULT.to_dict()) == {
        "name", "width", "bits", "scale_rule", "rotation", "seed", "signs", "scale_group", "scale_dtype",
        "sign_scope", "mean", "tau", "quantizer",
    }  # fmt: skip


def test_unknown_and_missing_header_fields_are_refused() -> None:
    data = DEFAULT.to_dict()
    with pytest.raises(ValueError, match="zero_point"):
        StreamFormat.from_dict({**data, "zero_point": 1})
    del data["seed"]
    with pytest.raises(ValueError, match="seed"):
        StreamFormat.from_dict(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "latent"),
        ("bits", 5),
        ("scale_rule", "max"),
        ("rotation", "wht"),
        ("scale_dtype", "fp8"),
        ("sign_scope", "model"),
        ("mean", "ema"),
        ("scale_group", 32),
    ],
)
def test_unknown_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{field}={value!r} is unknown; valid: "):
        dataclasses.replace(DEFAULT, **{field: value})


@pytest.mark.parametrize(("width", "group"), [(100, 0), (4, 0), (96, 64)])
def test_width_that_no_row_can_hold_is_refused(width: int, group: int) -> None:
    with pytest.raises(ValueError, match=rf"width={width} must be a multiple of 8"):
        StreamFormat("key", width, 3, "score", scale_group=group)


def test_sign_scope_decides_what_seeds_a_head() -> None:
    values = dataclasses.replace(DEFAULT, name="value")
    assert DEFAULT.rotation_source(3, 5) == (3, 5, 0)
    assert values.rotation_source(3, 5) == (3, 5, 1)
    assert BLOCKS_OF_64.rotation_source(3, 5) == (0, 0, 0)


def test_codebook_belongs_to_the_scale_group() -> None:
    assert BLOCKS_OF_64.codebook.width == 64
    assert DEFAULT.codebook.width == 128
    assert BLOCKS_OF_64.codebook.unit != DEFAULT.codebook.unit


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 4},
        {"seed": 1},
        {"rotation": "hadamard"},
        {"signs": False},
        {"scale_group": 64},
        {"scale_dtype": "fp16"},
        {"sign_scope": "shared"},
        {"mean": "none"},
        {"tau": 0.25},
        {"scale_rule": "norm"},
        {"name": "value"},
        {"width": 64, "scale_group": 64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fingerprint_follows_every_field(change: dict[str, Any]) -> None:
    assert dataclasses.replace(DEFAULT, **change).fingerprint() != DEFAULT.fingerprint()


@pytest.mark.parametrize(
    ("header", "want"),
    [(DEFAULT, "86c6efbcc05ab8f8"), (BLOCKS_OF_64, "d6a9bd47dbca6ce2")],
    ids=["default", "blocks-of-64"],
)
def test_fingerprint_is_the_same_on_every_machine(header: StreamFormat, want: str) -> None:
    assert header.fingerprint() == want


@pytest.mark.parametrize("layout", ["key", "value"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 32])
@pytest.mark.parametrize("width", [8, 40, 64, 80, 96, 112, 128, 192, 256, 512])
def test_sealed_order_is_a_permutation(width: int, bits: int, layout: str) -> None:
    order = sealed_bit_order(width, bits, layout)
    assert order.shape == (STRIP * width * bits,)
    assert np.array_equal(np.sort(order), np.arange(STRIP * width * bits))
    stays = bits == 32 or width % 16 > 0
    assert np.array_equal(order, np.arange(order.size)) == stays


def test_sealed_order_of_a_key_by_hand() -> None:
    """Row 21, column 38 of width 64 at 3 bits: chunk 2, vector 2·1 + 1, lane 4·5 + 2."""
    order = sealed_bit_order(64, 3, "key")
    code, chunk = 3 * (64 * 21 + 38), 8 * 2 * 192
    at = chunk + 8 * (64 + 22) + 3  # the second field of the second plane of 64 bytes
    assert order[at : at + 3].tolist() == [code, code + 1, code + 2]


def test_sealed_order_of_values_by_hand() -> None:
    """Row 27, column 38 of width 64 at 3 bits: chunk 2, vector 6, lane 4·6 + 3."""
    order = sealed_bit_order(64, 3, "value")
    code, chunk = 3 * (64 * 27 + 38), 8 * 2 * 192
    assert order[chunk + 8 * 27 + 6] == code  # bits 6 and 7 of the first plane
    assert order[chunk + 8 * 27 + 7] == code + 1
    assert order[chunk + 8 * (64 + 27) + 6] == code + 2  # bit 6 of the second


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_sealed_order_of_other_bits_by_hand(bits: int) -> None:
    """Row 21, column 6 of width 16: vector 5 of values, lane 4·6 + 1."""
    order = sealed_bit_order(16, bits, "value")
    per_plane = 8 // bits
    at = 8 * (64 * (5 // per_plane) + 25) + bits * (5 % per_plane)
    code = bits * (16 * 21 + 6)
    assert order[at : at + bits].tolist() == list(range(code, code + bits))


def test_sealed_order_of_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="layout='both' is unknown; valid: key, value"):
        sealed_bit_order(64, 3, "both")
