"""The attention function that transformers calls for every layer of an enabled model."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from rotaryquant.attention import AttentionOptions, attend, dense_attention
from rotaryquant.errors import UnsupportedModelError
from rotaryquant.integrations.transformers.cache import KVHandle
from rotaryquant.integrations.transformers.geometry import CARRIED, HARMLESS
from rotaryquant.integrations.transformers.masks import NAME
from rotaryquant.integrations.transformers.static import StaticKVHandle, attend_static

_KNOWN = CARRIED | HARMLESS


def packed_or_dense(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | KVHandle,
    value: Tensor | KVHandle,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention on a packed layer's handle, or on the plain tensors of any other layer.

    query: [batch, num_heads, rows, width]. attention_mask: as `masks.padding_mask` makes it. Returns
    [batch, rows, num_heads, value_width] and no weights. Raises UnsupportedModelError for an argument that it does
    not carry.
    """
    if dropout or not _KNOWN.issuperset(kwargs):
        _refuse_unknown(module, dropout, kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    pads, mask = _read_mask(attention_mask)
    if isinstance(key, KVHandle):
        if mask is not None and mask.dtype != torch.bool:
            raise UnsupportedModelError(
                f"{type(module).__name__}: an additive attention_mask of dtype {mask.dtype} reached a packed layer; "
                f"pass a 2-D mask or a boolean one"
            )
        options = AttentionOptions(scale, sliding_window or 0, softcap or 0.0, s_aux)
        if isinstance(key, StaticKVHandle):
            out = _attend_in_graph(key, query, options, pads, mask)
        else:
            counts = pads.flatten().tolist() if pads is not None else None
            out = attend(key.layer, query, options, key.counters, pads=counts, mask=mask, append=not key.settled)
        key.settled = True
    else:
        # stock layers hand over exactly the keys that the mask describes, so a window is in the mask already
        options = AttentionOptions(scale, 0, softcap or 0.0, s_aux)
        if mask is None and kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)
        if mask is not None:
            mask = mask[..., : key.shape[2]] if mask.shape[-1] > 1 else mask.expand(1, 1, query.shape[2], key.shape[2])
        assert isinstance(value, Tensor)
        if pads is not None:
            mask = padded_mask(pads, query.shape[2], key.shape[2])
        out = dense_attention(query, key, value, options, mask=mask)
    if out.shape[2] == 1:  # a step: its one row lies either way
        return out.reshape(out.shape[0], 1, out.shape[1], out.shape[3]), None
    return out.transpose(1, 2).contiguous(), None


def _refuse_unknown(module: torch.nn.Module, dropout: float, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedModelError for what would be left out of attention without a word."""
    for name, given in arguments.items():
        if given is not None and name not in _KNOWN:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {name!r} to attention; use kv=fp16 for this model"
            )
    if dropout:
        raise UnsupportedModelError(f"{type(module).__name__}: dropout={dropout} in attention; call model.eval() first")


def _attend_in_graph(
    handle: StaticKVHandle, query: Tensor, options: AttentionOptions, pads: Tensor | None, mask: Tensor | None
) -> Tensor:
    if mask is not None:
        raise UnsupportedModelError("a static packed cache takes no custom attention mask; use the dynamic cache")
    layer = handle.static
    out: Tensor = attend_static(
        layer.key,
        layer.length,
        query,
        handle.keys,
        handle.values,
        pads,
        options.sink_logits,
        options.scale,
        options.window,
        options.softcap,
        not handle.settled,
    )
    return out


def padded_mask(pads: Tensor, rows: int, columns: int) -> Tensor:
    """Bool [batch, 1, rows, columns] of the causal rule with left pads, int32 [batch, 1, 1, 1]."""
    query = torch.arange(columns - rows, columns, device=pads.device)[:, None]
    key = torch.arange(columns, device=pads.device)[None, :]
    return (key <= query) & (key >= pads) & (query >= pads)


def _read_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(left pads int32 [batch, 1, 1, 1], boolean or additive mask) of what the mask function or the user passed."""
    if mask is not None and mask.dtype == torch.int32 and mask.shape[1:] == (1, 1, 1):
        return mask, None
    return None, mask


def register() -> None:
    """Make the attention function known to transformers."""
    AttentionInterface.register(NAME, packed_or_dense)
