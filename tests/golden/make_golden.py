"""Write the golden files: inputs, and the exact bytes that every kernel must make of them.

Run by hand after a change of the format (and of its VERSION): `python tests/golden/make_golden.py`. Each file is one
format: the rows, their rotation's fingerprint, canonical codes and scales, and the sealed codes of a strip. No
coordinate lies within `MARGIN` of a boundary, so a kernel that rounds otherwise still gives the same bytes.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from rotaryquant.formats.codebook import FINE
from rotaryquant.formats.kv import STRIP, VERSION, StreamFormat
from rotaryquant.ops.pack import pack, seal
from rotaryquant.ops.quantize import quantize
from rotaryquant.ops.rotate import build_rotation, rotate
from rotaryquant.ops.streams import Codec

FOLDER = Path(__file__).parent / "files"

#: Distance in units of the root mean square that every coordinate keeps from every boundary.
MARGIN = 1e-4
#: Distance of a trellis' fine steps that every coordinate keeps from rounding to another integer.
TRELLIS_MARGIN = 1e-3
LAYER, HEADS = 3, 2
#: Rows stored per head; the strip is filled up by repeating them.
ROWS = 8


def formats() -> Iterator[StreamFormat]:
    """Both headers of the design: the default, and the fixed blocks of 64 values of llama.cpp."""
    for bits in (2, 3, 4, 8):
        for width in (64, 128):
            yield StreamFormat("key", width, bits, "score", mean="block0", tau=0.5)
            yield StreamFormat("value", width, bits, "value", scale_group=64, scale_dtype="fp16", sign_scope="shared")
    yield StreamFormat("key", 96, 3, "score", mean="block0", tau=0.5)
    yield StreamFormat("value", 80, 3, "value")
    yield StreamFormat("key", 64, 3, "score", mean="block0", tau=0.5, quantizer="trellis")
    yield StreamFormat("value", 128, 3, "score", quantizer="trellis")
    yield StreamFormat("key", 64, 2, "score", mean="block0", tau=0.5, quantizer="trellis")
    yield StreamFormat("value", 64, 4, "score", quantizer="trellis")


def file_name(stream: StreamFormat) -> str:
    """Name of a format's file."""
    header = "blocks64" if stream.scale_dtype == "fp16" else "default"
    quantizer = "-trellis" if stream.quantizer == "trellis" else ""
    return f"{header}-{stream.name}-d{stream.width}-b{stream.bits}{quantizer}.safetensors"


def clear_of_boundaries(rows: Tensor, stream: StreamFormat) -> Tensor:
    """Bool [heads, rows]: no coordinate of the rotated row is near a boundary between two codes."""
    codec = Codec.from_format(stream)
    y = rotate(rows[None], build_rotation(stream, LAYER, HEADS), kernel="reference")[0].double()
    y = y.view(*y.shape[:-1], codec.groups, codec.scale_group)
    if stream.bits == 8:
        t = y / y.abs().amax(-1, keepdim=True) * 127.0
        distance = (t - t.floor() - 0.5).abs()
    elif codec.trellis:
        t = y / y.square().mean(-1, keepdim=True).sqrt() * FINE / codec.unit + 0.5
        return ((t - t.round()).abs() > TRELLIS_MARGIN).flatten(-2).all(-1)
    else:
        t = y / y.square().mean(-1, keepdim=True).sqrt()
        distance = (t[..., None] - codec.boundaries.double()).abs().amin(-1)
    return (distance > MARGIN).flatten(-2).all(-1)


def golden_rows(stream: StreamFormat, count: int = ROWS) -> Tensor:
    """Rows fp32 [heads, count, width]: a zero row, a tiny, a large and a one-hot row, then noise."""
    generator = torch.Generator().manual_seed(stream.width * 100 + stream.bits)
    special = torch.zeros(4, stream.width)
    special[1:3] = torch.randn(2, stream.width, generator=generator)
    special[1] *= 1e-3
    special[2] *= 1e3
    special[3, 5] = 1.0
    chosen: list[list[Tensor]] = [[] for _ in range(HEADS)]
    pool = torch.cat([special, torch.randn(64, stream.width, generator=generator)])
    clear = clear_of_boundaries(pool.expand(HEADS, -1, -1).contiguous(), stream)
    clear[:, 0] = True  # a zero row has no scale, so its codes are the ones above the middle boundary
    for head in range(HEADS):
        chosen[head] = [row for row, good in zip(pool, clear[head], strict=True) if good][:count]
    return torch.stack([torch.stack(rows) for rows in chosen])


def build(stream: StreamFormat) -> bytes:
    """One golden file."""
    rows = golden_rows(stream)
    codec = Codec.from_format(stream)
    y = rotate(rows[None], build_rotation(stream, LAYER, HEADS), kernel="reference")[0]
    codes, scales = quantize(y, codec, kernel="reference")
    canonical = pack(codes, stream.bits, kernel="reference")
    index = torch.arange(STRIP) % ROWS
    sealed = seal(canonical[:, index], stream.bits, stream.width, stream.name, kernel="reference")
    tensors = {"rows": rows, "codes": canonical, "scales": scales.view(torch.int16), "sealed": sealed}
    header = {"version": VERSION, "layer": LAYER, "format": stream.to_dict(), "fingerprint": stream.fingerprint()}
    metadata = {"header": json.dumps(header, sort_keys=True)}
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)


def main() -> None:
    """Write every file into `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for stream in formats():
        (out / file_name(stream)).write_bytes(build(stream))


if __name__ == "__main__":
    main()
