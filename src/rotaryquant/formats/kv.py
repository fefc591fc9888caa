"""The bytes of a packed key or value row, of a block of rows, and the header that says how to read them.

Canonical row: a little-endian bit stream in which coordinate i of the rotated vector holds its code at bit
bits·i. A block is 128 rows of one head. An open block holds canonical rows; a sealed block holds the same
bytes with each row's bits permuted into strided planes, which vector units unpack without crossing bytes.
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
VERSION = 1

#: Positions in a block (DESIGN section 3).
BLOCK = 128

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
    tau: share of a head's key energy that its mean must carry to be removed.
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
            ("scale_group", (self.width, 64)),
        ):
            if (value := getattr(self, field)) not in valid:
                raise ValueError(f"{field}={value!r} is unknown; valid: {', '.join(map(str, valid))}")
        if self.width % 8 or self.width < 8 or self.width % self.scale_group:
            raise ValueError(
                f"width={self.width} must be a multiple of 8 and of scale_group={self.scale_group}; "
                f"leave such a layer at 16 bits with kv=fp16"
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
        return codebooks.codebook(self.scale_group, self.bits)

    def rotation_source(self, layer: int, head: int) -> tuple[int, int, int]:
        """(layer, head, stream) that seed this head's rotation; all zero under the shared scope."""
        return (0, 0, 0) if self.sign_scope == "shared" else (layer, head, _STREAM_INDEX[self.name])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a JSON header."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "StreamFormat":
        """Read a header written by `to_dict`. Raises ValueError on a missing or unknown field."""
        known = {field.name for field in dataclasses.fields(cls)}
        if set(data) != known:
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
def sealed_bit_order(width: int, bits: int) -> NDArray[np.int64]:
    """For each bit of a sealed row, the canonical bit it holds; shape [width · bits].

    2 and 4 bits: code i sits in byte i mod n at the (i div n)-th field, n bytes in all. 3 bits: the two low
    bits as a 2-bit plane of width/4 bytes, then the high bits as a plane of width/8 bytes. 8 and 32 bits stay.
    """
    if bits in (8, 32):
        return np.arange(width * bits)
    planes = {2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),)}[bits]
    order = np.empty(width * bits, dtype=np.int64)
    start = 0
    for size, first in planes:
        num_bytes = width * size // 8
        for code in range(width):
            field, byte = divmod(code, num_bytes)
            for bit in range(size):
                order[8 * (start + byte) + size * field + bit] = bits * code + first + bit
        start += num_bytes
    return order
