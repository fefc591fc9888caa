"""Codes to bytes and back, and the permutation between open and sealed rows (DESIGN section 3, the bytes)."""

from torch import Tensor

from rotaryquant.ops import dispatch

KERNELS = ("cpu", "reference")


def pack(codes: Tensor, bits: int, *, kernel: str = "auto") -> Tensor:
    """Canonical bytes of codes: code i at bit bits·i, little-endian.

    codes: uint8 [..., width] (int32 at 32 bits). Returns uint8 [..., width · bits / 8].
    """
    result: Tensor = dispatch.run("pack", kernel, "pack", codes, bits, codes.shape[-1])
    return result


def unpack(rows: Tensor, bits: int, width: int, *, sealed: bool = False, kernel: str = "auto") -> Tensor:
    """Codes uint8 [..., width] (int32 at 32 bits) of canonical or sealed rows uint8 [..., width · bits / 8]."""
    result: Tensor = dispatch.run("pack", kernel, "unpack_sealed" if sealed else "unpack", rows, bits, width)
    return result


def seal(rows: Tensor, bits: int, width: int, *, kernel: str = "auto") -> Tensor:
    """Sealed bytes of canonical rows uint8 [..., width · bits / 8]; same shape, same bits in another order."""
    result: Tensor = dispatch.run("pack", kernel, "seal", rows, bits, width)
    return result


def unseal(rows: Tensor, bits: int, width: int, *, kernel: str = "auto") -> Tensor:
    """Canonical bytes of sealed rows: the inverse of `seal`."""
    result: Tensor = dispatch.run("pack", kernel, "unseal", rows, bits, width)
    return result
