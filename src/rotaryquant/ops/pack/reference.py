"""Packing one bit at a time, from the definition of the bit stream."""

import torch
from torch import Tensor

from rotaryquant.formats.kv import sealed_bit_order


def unsupported(step: str, data: Tensor, bits: int, width: int) -> str | None:
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


def _order(bits: int, width: int, device: torch.device) -> Tensor:
    return torch.from_numpy(sealed_bit_order(width, bits)).to(device)


def run(step: str, data: Tensor, bits: int, width: int) -> Tensor:
    """One of the steps pack, unpack, unpack_sealed, seal, unseal."""
    if step == "pack":
        if bits == 32:
            return data.contiguous().view(torch.uint8)
        return _to_bytes(((data[..., None] >> torch.arange(bits, device=data.device)) & 1).flatten(-2))
    if step == "seal":
        return _to_bytes(_to_bits(data)[..., _order(bits, width, data.device)])
    if step in ("unseal", "unpack_sealed"):
        data = _to_bytes(_to_bits(data)[..., torch.argsort(_order(bits, width, data.device))])
        if step == "unseal":
            return data
    if bits == 32:
        return data.contiguous().view(torch.int32)
    weights = 1 << torch.arange(bits, device=data.device)
    return (_to_bits(data).view(*data.shape[:-1], width, bits).to(torch.int32) * weights).sum(-1).to(torch.uint8)
