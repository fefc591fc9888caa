"""Golden files: bytes fixed once, equal on every kernel that can run here."""

import json
from typing import Any

import pytest
import torch
from make_golden import FOLDER, HEADS, LAYER, MARGIN, ROWS, build, clear_of_boundaries, file_name, formats
from safetensors import safe_open
from torch import Tensor

from rotaryquant.formats.kv import BLOCK, STRIP, VERSION, StreamFormat
from rotaryquant.ops import dispatch
from rotaryquant.ops.append_packed import append_packed
from rotaryquant.ops.pack import pack, seal, unpack, unseal
from rotaryquant.ops.quantize import dequantize, quantize
from rotaryquant.ops.rotate import build_rotation, rotate
from rotaryquant.ops.streams import Codec, PackedStream

FORMATS = {file_name(stream): stream for stream in formats()}


def kernels(op: str) -> list[str]:
    return [name for name in dispatch.kernels_of(op) if dispatch.missing(op, name) is None]


def load(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(str(FOLDER / name), "pt") as file:
        header = json.loads(file.metadata()["header"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    tensors["scales"] = tensors["scales"].view(Codec.from_format(FORMATS[name]).scale_dtype)
    return header, tensors


def equal_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_the_files_are_those_of_the_script_and_small() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(FORMATS)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 240_000


@pytest.mark.parametrize("name", FORMATS)
def test_header_means_what_this_version_means(name: str) -> None:
    header, _ = load(name)
    assert header["version"] == VERSION
    assert StreamFormat.from_dict(header["format"]) == FORMATS[name]
    assert header["fingerprint"] == FORMATS[name].fingerprint()


@pytest.mark.parametrize("name", FORMATS)
def test_no_coordinate_is_near_a_boundary(name: str) -> None:
    assert MARGIN >= 1e-5
    _, golden = load(name)
    assert golden["rows"].shape == (HEADS, ROWS, FORMATS[name].width)
    clear = clear_of_boundaries(golden["rows"], FORMATS[name])
    assert clear[:, 1:].all()
    assert (golden["rows"][:, 0] == 0).all()  # the zero row lies on the middle boundary by definition


@pytest.mark.parametrize("name", FORMATS)
def test_the_script_writes_these_very_files(name: str) -> None:
    assert build(FORMATS[name]) == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", FORMATS)
def test_steps_give_the_golden_bytes_on_every_kernel(name: str) -> None:
    stream, (_, golden) = FORMATS[name], load(name)
    codec = Codec.from_format(stream)
    for rotating in kernels("rotate"):
        y = rotate(golden["rows"][None], build_rotation(stream, LAYER, HEADS), kernel=rotating)[0]
        for quantizing in kernels("quantize"):
            codes, scales = quantize(y, codec, kernel=quantizing)
            assert equal_bits(scales, golden["scales"]), (rotating, quantizing)
            for packing in kernels("pack"):
                rows = pack(codes, stream.bits, kernel=packing)
                assert equal_bits(rows, golden["codes"]), (rotating, quantizing, packing)
                strip, args = rows[:, torch.arange(STRIP) % ROWS], (stream.bits, stream.width)
                sealed = seal(strip, *args, stream.name, kernel=packing)
                assert equal_bits(sealed, golden["sealed"]), packing
                assert equal_bits(unseal(sealed, *args, stream.name, kernel=packing), strip), packing
                assert equal_bits(
                    unpack(golden["sealed"], *args, sealed=stream.name, kernel=packing)[:, :ROWS], codes
                ), packing


@pytest.mark.parametrize("filled", [ROWS, STRIP, BLOCK])
@pytest.mark.parametrize("name", FORMATS)
def test_fused_write_gives_the_golden_bytes_on_every_kernel(name: str, filled: int) -> None:
    stream, (_, golden) = FORMATS[name], load(name)
    index = torch.arange(filled) % STRIP % ROWS
    one, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for kernel in kernels("append_packed"):
        codec = Codec.from_format(stream)
        packed = PackedStream(
            codec,
            1,
            [torch.zeros(1, HEADS, BLOCK, codec.code_bytes, dtype=torch.uint8)],
            [torch.zeros(1, HEADS, BLOCK, codec.groups, dtype=codec.scale_dtype)],
        )
        bad = append_packed(
            golden["rows"][None, :, index].contiguous(),
            build_rotation(stream, LAYER, HEADS),
            packed,
            zero[None],
            zero,
            one * filled,
            zero,
            kernel=kernel,
        )
        assert bad == -1
        stored = golden["codes"] if filled == ROWS else golden["sealed"].repeat(1, filled // STRIP, 1)
        assert equal_bits(packed.codes[0][0, :, :filled], stored), kernel
        assert equal_bits(packed.scales[0][0, :, :filled], golden["scales"][:, index]), kernel


@pytest.mark.parametrize("name", FORMATS)
def test_golden_bytes_decode_to_their_rows(name: str) -> None:
    stream, (_, golden) = FORMATS[name], load(name)
    codec = Codec.from_format(stream)
    values = dequantize(unpack(golden["codes"], stream.bits, stream.width), golden["scales"], codec)
    back = rotate(values[None], build_rotation(stream, LAYER, HEADS), inverse=True)[0]
    rows = golden["rows"][:, 1:]
    cosine = (back[:, 1:] * rows).sum(-1) / (back[:, 1:].norm(dim=-1) * rows.norm(dim=-1))
    assert float(cosine.min()) > {2: 0.88, 3: 0.96, 4: 0.985, 8: 0.9999}[stream.bits]
    assert (back[:, 0] == 0).all()
