"""The mask of a packed layer: how many columns of left padding each row has.

A causal mask needs no more, while a boolean mask would cost queries × keys bytes. Anything else than the plain
causal rule (image blocks, packed sequences, windows) stays a boolean mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

#: Name under which attention and mask are registered; transformers treats some substrings specially.
NAME = "rotaryquant"


def left_pads(attention_mask: Tensor) -> Tensor:
    """Left pads of each row, int32 [batch], of a 2-D mask (true or 1: a token).

    Raises ValueError where a row has a gap: a packed cache stores each row's tokens contiguously.
    """
    mask = attention_mask.bool()
    pads = (~mask).sum(-1).to(torch.int32)
    if not torch.compiler.is_compiling():
        ordered = (mask[:, 1:] >= mask[:, :-1]).all(-1)
        if not bool(ordered.all()):
            row = int((~ordered).nonzero()[0])
            gap = int((mask[row, 1:] < mask[row, :-1]).nonzero()[0]) + 1
            raise ValueError(
                f"attention_mask row {row} hides column {gap} after a visible one; a packed cache stores each row's "
                f"tokens contiguously, so pad on the left (tokenizer.padding_side='left')"
            )
    return pads


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Mask in the form that `attention.packed_or_dense` reads.

    Returns None (causal, no pads), int32 [batch, 1, 1, 1] (causal, left pads), or bool [batch, 1, q, kv].
    """
    if mask_function is causal_mask_function and kv_offset == 0:
        if attention_mask is None:
            return None
        return left_pads(attention_mask).view(batch_size, 1, 1, 1)
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    return mask


def register() -> None:
    """Make the mask known to transformers; without it a custom attention gets no mask at all."""
    AttentionMaskInterface.register(NAME, padding_mask)
