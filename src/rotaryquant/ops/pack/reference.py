"""Packing one bit at a time, from the definition of the bit stream."""

from functools import lru_cache

import torch
from torch import Tensor

from rotaryquant.formats.kv import STRIP, sealed_bit_order


def unsupported(step: str, data: Tensor, bits: int, width: int, layout: str) -> str | None:
    """Takes every call."""
    return None


@lru_cache(maxsize=64)
def _order(width: int, bits: int, layout: str, inverse: bool, device: torch.device) -> Tensor:
    order = torch.from_numpy(sealed_bit_order(width, bits, layout))
    return (torch.argsort(order) if inverse else order).to(device)


def _split(numbers: Tensor, bits: int) -> Tensor:
    """Bits [..., bits · n] of n numbers, lowest first."""
    return ((numbers[..., None] >> torch.arange(bits, dtype=torch.uint8, device=numbers.device)) & 1).flatten(-2)


def _join(stream: Tensor, bits: int) -> Tensor:
    """The numbers [..., n] whose bits are [..., bits · n]."""
    places = torch.arange(bits, dtype=torch.uint8, device=stream.device)
    groups = stream.reshape(*stream.shape[:-1], stream.shape[-1] // bits, bits)
    return (groups << places).sum(-1, dtype=torch.uint8)


def _reorder_strips(rows: Tensor, order: Tensor) -> Tensor:
    """Rows [..., n, bytes] with the bits of each whole strip put into `order`."""
    whole = rows.shape[-2] // STRIP * STRIP
    strips = rows[..., :whole, :].reshape(*rows.shape[:-2], whole // STRIP, STRIP * rows.shape[-1])
    reordered = _join(_split(strips, 8)[..., order], 8).view(*rows.shape[:-2], whole, rows.shape[-1])
    return torch.cat([reordered, rows[..., whole:, :]], -2)


def run(step: str, data: Tensor, bits: int, width: int, layout: str) -> Tensor:
    """One of the steps pack, unpack, unpack_sealed, seal, unseal."""
    if step == "pack":
        if bits == 32:
            return data.contiguous().view(torch.uint8)
        return _join(_split(data, bits), 8)
    if step != "unpack":
        data = _reorder_strips(data, _order(width, bits, layout, step != "seal", data.device))
        if step != "unpack_sealed":
            return data
    if bits == 32:
        return data.contiguous().view(torch.int32)
    return _join(_split(data, 8), bits)
