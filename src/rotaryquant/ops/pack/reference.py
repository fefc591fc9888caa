"""Packing one bit at a time, from the definition of the bit stream."""

import torch
from torch import Tensor

from rotaryquant.formats.kv import STRIP, sealed_bit_order


def unsupported(step: str, data: Tensor, bits: int, width: int, layout: str) -> str | None:
    """Takes every call."""
    return None


def _to_bits(rows: Tensor) -> Tensor:
    """Bits [..., 8 · bytes] of bytes, lowest first."""
    return ((rows[..., None] >> torch.arange(8, device=rows.device)) & 1).flatten(-2)


def _to_bytes(stream: Tensor) -> Tensor:
    weights = 1 << torch.arange(8, device=stream.device)
    return (
        (stream.reshape(*stream.shape[:-1], stream.shape[-1] // 8, 8).to(torch.int32) * weights).sum(-1).to(torch.uint8)
    )


def _reorder_strips(rows: Tensor, order: Tensor) -> Tensor:
    """Rows [..., n, bytes] with the bits of each whole strip put into `order`."""
    whole = rows.shape[-2] // STRIP * STRIP
    strips = rows[..., :whole, :].reshape(*rows.shape[:-2], whole // STRIP, STRIP * rows.shape[-1])
    reordered = _to_bytes(_to_bits(strips)[..., order]).view(*rows.shape[:-2], whole, rows.shape[-1])
    return torch.cat([reordered, rows[..., whole:, :]], -2)


def run(step: str, data: Tensor, bits: int, width: int, layout: str) -> Tensor:
    """One of the steps pack, unpack, unpack_sealed, seal, unseal."""
    if step == "pack":
        if bits == 32:
            return data.contiguous().view(torch.uint8)
        return _to_bytes(((data[..., None] >> torch.arange(bits, device=data.device)) & 1).flatten(-2))
    if step != "unpack":
        order = torch.from_numpy(sealed_bit_order(width, bits, layout)).to(data.device)
        data = _reorder_strips(data, order if step == "seal" else torch.argsort(order))
        if step != "unpack_sealed":
            return data
    if bits == 32:
        return data.contiguous().view(torch.int32)
    weights = 1 << torch.arange(bits, device=data.device)
    return (_to_bits(data).view(*data.shape[:-1], width, bits).to(torch.int32) * weights).sum(-1).to(torch.uint8)
