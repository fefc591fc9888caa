"""The bytes of a packed key or value row, of a block of rows, and the header that says how to read them.

Canonical row: a little-endian bit stream in which coordinate i of the rotated vector holds its code at bit
bits·i. A block is 128 rows of one head in four strips of 32. A strip that is full is sealed: the same bytes, with its
bits permuted into the order in which vector units multiply them (sealed_bit_order). The rows of a strip that is not
full yet are open, that is canonical.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rotaryquant.formats import codebook as codebooks
from rotaryquant.formats import rotation as rotations

#: Version of everything in this file; a reader refuses another one.
VERSION = 2

#: Positions in a block (DESIGN section 3).
BLOCK = 128

#: Rows that are sealed together; four strips make a block.
STRIP = 32

#: Columns of a strip whose codes make eight vectors of 64 (see sealed_bit_order).
_CHUNK = 16

SCALE_RULES = ("score", "value", "norm")
SCALE_DTYPES = ("bf16", "fp16")
SIGN_SCOPES = ("layer_head", "shared")
MEANS = ("none", "model", "block0")

#: Which draw of signs and quaternions a stream takes, so that keys and values rotate differently.
_STREAM_INDEX = {"key": 0, "value": 1}


@dataclass(frozen=True)
class StreamFormat:
    """How one stream (the keys or the values of one layer) is stored.

    name: "key" or "value". width: values in a row. bits: 2, 3, 4, 8, or 32 for the lossless test codec.
    scale_rule: "score" |y|²/<y,c> (unbiased products), "value" <y,c>/|c|² (least squares), "norm" |y|.
    scale_group: coordinates that share a scale, `width` or 64. mean: whether and whence a mean is subtracted.
    tau: share of a head's key energy that its mean must carry to be removed. quantizer: "scalar", or "trellis", where
    a code's level depends on the code of the column before it too (`formats.codebook`). fit: digest of the space that
    rows are coded in (`formats.fit`), "" where that is their own.
    """

    name: str
    width: int
    bits: int
    scale_rule: str
    rotation: str = "isoquant"
    seed: int = 0
    signs: bool = True
    scale_group: int = 0
    scale_dtype: str = "bf16"
    sign_scope: str = "layer_head"
    mean: str = "none"
    tau: float = 0.0
    quantizer: str = "scalar"
    fit: str = ""

    def __post_init__(self) -> None:
        if self.scale_group == 0:
            object.__setattr__(self, "scale_group", self.width)
        for field, valid in (
            ("name", tuple(_STREAM_INDEX)),
            ("bits", codebooks.BITS),
            ("scale_rule", SCALE_RULES),
            ("rotation", tuple(rotations.KINDS)),
            ("scale_dtype", SCALE_DTYPES),
            ("sign_scope", SIGN_SCOPES),
            ("mean", MEANS),
            ("quantizer", codebooks.QUANTIZERS),
            ("scale_group", (self.width, 64)),
        ):
            if (value := getattr(self, field)) not in valid:
                raise ValueError(f"{field}={value!r} is unknown; valid: {', '.join(map(str, valid))}")
        if self.width % 8 or self.width < 8 or self.width % self.scale_group:
            raise ValueError(
                f"width={self.width} must be a multiple of 8 and of scale_group={self.scale_group}; "
                f"leave such a layer at 16 bits with kv=fp16"
            )
        if self.quantizer == "trellis" and (self.bits not in codebooks.TRELLISES or self.scale_group % codebooks.CYCLE):
            raise ValueError(
                f"quantizer=trellis has 2 to 4 bits and widths that are multiples of {codebooks.CYCLE}, not "
                f"{self.bits} bits and width={self.width}; use quantizer=scalar"
            )

    @property
    def groups(self) -> int:
        """Scales per row."""
        return self.width // self.scale_group

    @property
    def code_bytes(self) -> int:
        """Bytes of codes in one row: width · bits / 8."""
        return self.width * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales in one row; the lossless codec stores none."""
        return 0 if self.bits == 32 else 2 * self.groups

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row, codes and scales; 50 at width 128 and 3 bits."""
        return self.code_bytes + self.scale_bytes

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value, scales included; 3.125 at width 128 and 3 bits."""
        return 8 * self.row_bytes / self.width

    @property
    def codebook(self) -> codebooks.Codebook:
        """The codebook for this stream; its unit belongs to vectors of `scale_group` values."""
        return codebooks.codebook(self.scale_group, self.bits, self.quantizer)

    def rotation_source(self, layer: int, head: int) -> tuple[int, int, int]:
        """(layer, head, stream) that seed this head's rotation; all zero under the shared scope."""
        return (0, 0, 0) if self.sign_scope == "shared" else (layer, head, _STREAM_INDEX[self.name])

    def with_bits(self, bits: int) -> "StreamFormat":
        """The same at another width of codes, which are scalar where there is no trellis of that width."""
        quantizer = self.quantizer if bits in codebooks.TRELLISES else "scalar"
        return dataclasses.replace(self, bits=bits, quantizer=quantizer)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a JSON header; a fit is named where there is one."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "fit" or value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "StreamFormat":
        """Read a header written by `to_dict`. Raises ValueError on a missing or unknown field."""
        known = {field.name for field in dataclasses.fields(cls)}
        if set(data) | {"fit"} != known:
            raise ValueError(f"stream header fields {sorted(data)} differ from {sorted(known)}")
        return cls(**data)

    def fingerprint(self) -> str:
        """Hash of header, codebook and the rotation of (layer 1, head 2): equal bytes mean equal values."""
        digest = hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode())
        digest.update(json.dumps([VERSION, list(self.codebook.levels)]).encode())
        layer, head, stream = self.rotation_source(1, 2)
        matrix = rotations.rotation_matrix(
            self.rotation, self.width, self.seed, layer, head, stream, with_signs=self.signs
        )
        digest.update(np.round(matrix * 2**20).astype("<i4").tobytes())
        return digest.hexdigest()[:16]


@cache
def sealed_bit_order(width: int, bits: int, layout: str) -> NDArray[np.int64]:
    """For each bit of a sealed strip, the canonical bit it holds; shape [STRIP · width · bits].

    Canonical bits are counted over the strip's 32 rows one after the other. layout: "key" or "value". A strip is
    cut into chunks of 16 columns, a chunk into eight vectors of 64 codes, in which four neighbours are what one
    32-bit product adds up: four columns of a key, or four rows of values.
    - key: lane 4i + j of vector 2q + h holds column 4q + j of row 16h + i
    - value: lane 4i + j of vector v holds column i of row 4v + j
    Byte l of each 64 belongs to lane l. At 2, 4 and 8 bits a plane of 64 bytes has the next 8 / bits vectors as fields
    from the lowest bit up. At 3 bits plane p < 3 has vectors 2p and 2p + 1 in bits 0 .. 5 of each byte; bits 6 and 7 of
    the three planes, one after the other, are the bits of vectors 6 and 7. Any field that lies whole within the low six
    bits is an index for a 64-entry table as it is. Strips of widths that are not multiples of 16, and 32 bits, stay as
    they are.
    """
    if layout not in _STREAM_INDEX:
        raise ValueError(f"layout={layout!r} is unknown; valid: {', '.join(_STREAM_INDEX)}")
    if bits == 32 or width % _CHUNK:
        return np.arange(STRIP * width * bits)
    order = np.empty((width // _CHUNK, bits, 64, 8), dtype=np.int64)  # chunk, plane, byte, bit
    lanes = np.arange(64)
    places = _sealed_places(bits)
    for chunk in range(width // _CHUNK):
        for vector in range(8):
            if layout == "key":
                row, column = 16 * (vector % 2) + lanes // 4, 4 * (vector // 2) + lanes % 4
            else:
                row, column = 4 * vector + lanes % 4, lanes // 4
            code = bits * (width * row + _CHUNK * chunk + column)
            for bit, (plane, place) in enumerate(places[vector]):
                order[chunk, plane, :, place] = code + bit
    return order.reshape(-1)


def _sealed_places(bits: int) -> list[list[tuple[int, int]]]:
    """Plane and bit of a byte for each bit of each of a chunk's eight vectors."""
    if bits != 3:
        return [[divmod(bits * vector + bit, 8) for bit in range(bits)] for vector in range(8)]
    whole = [(plane, bit) for plane in range(3) for bit in range(6)]
    rest = [(plane, bit) for plane in range(3) for bit in (6, 7)]
    places = whole + rest
    return [places[3 * vector : 3 * vector + 3] for vector in range(8)]
