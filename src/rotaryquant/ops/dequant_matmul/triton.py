"""Few tokens meet codes as they are decoded; for many, rows by the stretch are unpacked for torch's product."""

import torch
from torch import Tensor

from rotaryquant.ops import triton_weights as programs
from rotaryquant.ops.triton_weights import missing as missing
from rotaryquant.ops.weights import PackedWeight, rotate_inputs

#: From so many tokens on torch's product of unpacked rows is taken.
MANY = 9

#: Weights that are unpacked at a time then, which fit the cache that all multiprocessors share.
UNPACKED = 1 << 23


def unsupported(x: Tensor, weight: PackedWeight) -> str | None:
    """Why this kernel cannot take the call, or None."""
    return programs.unsupported(x, weight)


def run(x: Tensor, weight: PackedWeight) -> Tensor:
    """[..., rows] in x's dtype. Inputs of 16 bits become integers of as many, others of 24."""
    rows, width = weight.shape
    tokens = x.reshape(-1, width)
    out = torch.empty(len(tokens), rows, dtype=x.dtype, device=x.device)
    if len(tokens) < MANY and programs.decodable(weight.codec.format):
        _few(tokens, weight, out)
    else:
        _many(tokens, weight, out)
    return out.view(*x.shape[:-1], rows)


def _few(tokens: Tensor, weight: PackedWeight, out: Tensor) -> None:
    """Products of fewer than MANY tokens into out [tokens, rows]."""
    if not out.numel():
        return
    digits = programs.digits_of(tokens)
    inputs = programs.prepare(tokens, weight, digits=digits)
    tile = programs.tile_of(weight, digits, len(tokens))
    together = programs.TILE_TOKENS if tile.tiles else MANY
    for begin in range(0, len(tokens), together):
        part = slice(begin, begin + together)
        programs.multiply(programs.Inputs(inputs.words[part], inputs.scales[part], digits), weight, out[part], tile)


def _many(tokens: Tensor, weight: PackedWeight, out: Tensor) -> None:
    """Products of any number of tokens into out [tokens, rows], in the tokens' dtype with sums in fp32."""
    rows, width = weight.shape
    x = rotate_inputs(tokens, weight.codec.format).to(out.dtype)
    step = max(1, min(rows, UNPACKED // width))
    unpacked = torch.empty(step, width, dtype=out.dtype, device=out.device)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        part = PackedWeight(weight.codec, weight.codes[begin:end], weight.scales[begin:end])
        programs.unpack(part, unpacked[: end - begin])
        torch.mm(x, unpacked[: end - begin].T, out=out[:, begin:end])
