"""Codes to bytes and back, and the permutation between open and sealed rows (DESIGN section 3, the bytes)."""

from torch import Tensor

from rotaryquant.ops import dispatch

KERNELS = ("cpu", "reference")


def pack(codes: Tensor, bits: int, *, kernel: str = "auto") -> Tensor:
    """Canonical bytes of codes: code i at bit bits·i, little-endian.

    codes: uint8 [..., width] (int32 at 32 bits). Returns uint8 [..., width · bits / 8].
    """
    result: Tensor = dispatch.run("pack", kernel, "pack", codes, bits, codes.shape[-1], "")
    return result


def unpack(rows: Tensor, bits: int, width: int, *, sealed: str = "", kernel: str = "auto") -> Tensor:
    """Codes uint8 [..., width] (int32 at 32 bits) of rows uint8 [..., width · bits / 8].

    sealed: "" for canonical rows; "key" or "value" for the rows [..., n, width · bits / 8] with which a block of that
    layout begins, whole strips of 32 sealed and the others open.
    """
    result: Tensor = dispatch.run("pack", kernel, "unpack_sealed" if sealed else "unpack", rows, bits, width, sealed)
    return result


def seal(rows: Tensor, bits: int, width: int, layout: str, *, kernel: str = "auto") -> Tensor:
    """Canonical rows uint8 [..., n, width · bits / 8] with every whole strip of 32 sealed: the same bits, reordered.

    layout: "key" or "value" (formats.kv.sealed_bit_order).
    """
    result: Tensor = dispatch.run("pack", kernel, "seal", rows, bits, width, layout)
    return result


def unseal(rows: Tensor, bits: int, width: int, layout: str, *, kernel: str = "auto") -> Tensor:
    """Canonical rows: the inverse of `seal`."""
    result: Tensor = dispatch.run("pack", kernel, "unseal", rows, bits, width, layout)
    return result
