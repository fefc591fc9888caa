"""Few tokens meet codes as they are decoded; for many, rows by the stretch are unpacked for torch's product."""

import torch
from torch import Tensor

from rotaryquant.ops import triton_weights as programs
from rotaryquant.ops.dequant_matmul import rotate_inputs
from rotaryquant.ops.triton_weights import Tile
from rotaryquant.ops.triton_weights import missing as missing
from rotaryquant.ops.weights import PackedWeight

#: From so many tokens on torch's product of unpacked rows is taken.
MANY = 9

#: Weights that are unpacked at a time then, which fit the cache that all multiprocessors share.
UNPACKED = 1 << 23


def unsupported(x: Tensor, weight: PackedWeight, rotated: bool) -> str | None:
    """Why this kernel cannot take the call, or None."""
    return programs.unsupported(x, weight)


def run(x: Tensor, weight: PackedWeight, rotated: bool) -> Tensor:
    """[..., rows] in x's dtype. Inputs of 16 bits become integers of as many, others of 24."""
    rows, width = weight.shape
    tokens = x.reshape(-1, width)
    out = torch.empty(len(tokens), rows, dtype=x.dtype, device=x.device)
    if len(tokens) < MANY and programs.decodable(weight.codec.format):
        few(tokens, weight, out, rotated)
    else:
        many(tokens, weight, out, rotated)
    return out.view(*x.shape[:-1], rows)


def few(tokens: Tensor, weight: PackedWeight, out: Tensor, rotated: bool, tile: Tile | None = None) -> None:
    """Products of up to MANY tokens into out [tokens, rows]."""
    if not len(tokens):
        return
    form, digits = weight.codec.format, 3 if tokens.dtype == torch.float32 else 2
    inputs = programs.prepare(tokens, form, rotated=rotated, digits=digits)
    for begin in range(0, len(tokens), programs.TILE_TOKENS):
        part = slice(begin, begin + programs.TILE_TOKENS)
        some = programs.Inputs(inputs.words[part], inputs.scales[part], digits)
        programs.multiply(some, weight, out[part], tile or programs.tile_of(form, digits, len(some.words)))


def many(tokens: Tensor, weight: PackedWeight, out: Tensor, rotated: bool) -> None:
    """Products of any number of tokens into out [tokens, rows], in the tokens' dtype with sums in fp32."""
    rows, width = weight.shape
    x = (tokens if rotated else rotate_inputs(tokens, weight.codec.format)).to(out.dtype)
    step = min(rows, max(1, UNPACKED // width))
    unpacked = torch.empty(step, width, dtype=out.dtype, device=out.device)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        part = PackedWeight(weight.codec, weight.codes[begin:end], weight.scales[begin:end])
        programs.unpack(part, unpacked[: end - begin])
        torch.mm(x, unpacked[: end - begin].T, out=out[:, begin:end])
