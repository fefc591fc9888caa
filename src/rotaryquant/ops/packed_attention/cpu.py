"""Packed attention in tiles of query rows: every packed row is unpacked once for all queries of a tile.

Products with the codes are exact in integers, since queries and probabilities are rounded to bytes first.
"""

import torch
from torch import Tensor

from rotaryquant.ops import native
from rotaryquant.ops.native import missing as missing
from rotaryquant.ops.packed_attention import Options
from rotaryquant.ops.streams import CacheView

_READ = (torch.float32, torch.bfloat16)  # dtypes of queries that need no copy


def unsupported(q: Tensor, view: CacheView, options: Options, mask: Tensor | None) -> str | None:
    """Why the native kernel cannot take this call, or None."""
    if options.q_dtype not in (None, torch.int8):
        return f"q_dtype={options.q_dtype}: this kernel rounds queries to int8"
    if options.p_dtype is not None:
        return f"p_dtype={options.p_dtype}: this kernel rounds probabilities by a rule of its own"
    return native.not_on_cpu(q=q, sink_logits=options.sink_logits, mask=mask) or native.view_reason(view)


def run(q: Tensor, view: CacheView, options: Options, mask: Tensor | None) -> Tensor:
    """See the op's docstring. Raises ValueError where the view's table, lengths or shapes do not fit together."""
    dtype = q.dtype
    if dtype not in _READ:
        q = q.float()
    q = q.contiguous()
    width = view.values.codec.width
    out = torch.empty_like(q) if width == view.keys.codec.width else q.new_empty((*q.shape[:3], width))
    native.module().attention(q, native.plan(view, options), mask, out, torch.get_num_threads())
    return out if dtype in _READ else out.to(dtype)
