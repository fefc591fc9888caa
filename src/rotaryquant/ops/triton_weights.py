"""How the Triton programs on packed weights (`native/triton/weights.py`) are launched; `dequant_matmul` and
`expert_matmul` share it.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rotaryquant.formats.weight import WeightFormat
from rotaryquant.ops.weights import PackedWeight

#: Activations that are computed where inputs are prepared.
FUSED = ("silu", "gelu_tanh")

#: Tokens whose two digits fill the columns of a tile.
TILE_TOKENS = 4

#: Columns of one block of `unpack`.
_UNPACKED = 512

#: Warps of a block of inputs.
_PREPARE_WARPS = 4


#: Blocks of rows of one matrix that are worked on at a time, at most, where no tensor core is used.
_PROGRAMS = 4224

#: From so many rows on one token, and several, are multiplied on the tensor cores, by bits of a code. Below, a warp of
#: them has too long a way to go through its rows. Measured on an NVIDIA H200 (docs/weights.md).
_TILE_ROWS = {2: (65536, 8192), 4: (20480, 12288)}

#: Weights that a block of rows holds, of one token and of several.
_BLOCK_WEIGHTS = 8192, 4096


@dataclass(frozen=True)
class Tile:
    """How `multiply` cuts a matrix.

    tiles: how often 16 rows a program takes on the tensor cores, unroll groups of columns at a time; with 0 it takes
    blocks of rows, of which it holds `words` words of codes a row at most, without them.
    """

    rows: int = 4
    words: int = 512
    tiles: int = 0
    unroll: int = 1


def tile_of(weight: PackedWeight, digits: int, tokens: int) -> Tile:
    """How so many tokens meet a matrix, or the experts of a stack, of a `decodable` format."""
    form, rows, stacked = weight.codec.format, weight.codes.shape[-2], weight.codes.dim() == 3
    several, tiles = tokens > 1, tileable(form, digits)
    if interpreted():  # each program costs the interpreter seconds
        return Tile(tiles=8) if tiles and tokens <= TILE_TOKENS else Tile(rows=128, words=4096)
    if tiles and stacked:
        return Tile(tiles=1, unroll=1 if several else 8)
    if tiles and rows >= _TILE_ROWS[form.bits][several] * -(-tokens // TILE_TOKENS):
        if form.bits == 2:
            return Tile(tiles=1, unroll=2)
        return Tile(tiles=1, unroll=4) if form.classes > 1 else Tile(tiles=2, unroll=2)
    return Tile(rows=4 if stacked or _BLOCK_WEIGHTS[several] // form.width >= 4 else 2)


def digits_of(x: Tensor) -> int:
    """Signed bytes that an input becomes."""
    return 3 if x.dtype == torch.float32 else 2


def interpreted() -> bool:
    """Whether Triton's interpreter runs its programs, on the CPU."""
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def missing() -> str | None:
    """Why no Triton program can run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; pip install triton"
    if not torch.cuda.is_available() and not interpreted():
        return "no CUDA device here; TRITON_INTERPRET=1 runs it in Triton's interpreter, for tests"
    return None


def unsupported(x: Tensor, *weights: PackedWeight) -> str | None:
    """Why these kernels cannot take inputs and weights, or None."""
    if x.is_cpu and not interpreted():
        return "x is on the CPU, this kernel reads GPU memory"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"x is {x.dtype}; this kernel reads float32, bfloat16 and float16"
    for weight in weights:
        if weight.codes.device != x.device or weight.scales.device != x.device:
            return f"codes on {weight.codes.device} and scales on {weight.scales.device}, x on {x.device}"
        if not (weight.codes.is_contiguous() and weight.scales.is_contiguous()):
            return "codes or scales that are not contiguous"
    return None


def programs() -> ModuleType:
    """The Triton programs; imported where they are needed, since Triton is an extra."""
    return importlib.import_module("rotaryquant.native.triton.weights")


def lookup() -> ModuleType:
    """How codes become levels in them."""
    return importlib.import_module("rotaryquant.native.triton.lookup")


def decodable(form: WeightFormat) -> bool:
    """Whether `multiply` takes rows of this format: whole units of at least a word, groups that are powers of two."""
    unit: int = lookup().unit_of(form.bits, form.classes)
    return form.group & (form.group - 1) == 0 and form.group % max(unit, 16) == 0


@lru_cache(maxsize=256)
def _table(form: WeightFormat, route: str, device: torch.device) -> Tensor:
    words = lookup().table_of(form.levels, form.bits, form.classes, route)
    return torch.tensor(words, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Inputs:
    """Inputs as `multiply` reads them. words: int32 [tokens, digits · width / 4]. scales: fp32 [tokens, groups]."""

    words: Tensor
    scales: Tensor
    digits: int


def prepare(x: Tensor, weight: PackedWeight, *, gate: str = "none", digits: int = 2) -> Inputs:
    """Rows of inputs [tokens, width], rotated as a `decodable` weight is, as bytes.

    gate: of FUSED, of rows [tokens, 2 · width].
    """
    form, factors, tokens = weight.codec.format, weight.codec.input_factors, len(x)
    words = torch.empty(tokens, digits * form.width // 4, dtype=torch.int32, device=x.device)
    scales = torch.empty(tokens, form.groups, dtype=torch.float32, device=x.device)
    together = 1 if factors is None else form.rotated
    chunk, small = max(together, form.group), 1 << ((together.bit_length() - 1) // 2)
    if tokens:
        programs().prepare[tokens, form.width // chunk](
            x, scales if factors is None else factors, words, scales, form.width, x.stride(0),
            gate, digits, form.bits, lookup().unit_of(form.bits, form.classes), form.group, chunk,
            together // small, small, num_warps=_PREPARE_WARPS,
        )  # fmt: skip
    return Inputs(words, scales, digits)


@dataclass(frozen=True)
class Items:
    """Which tokens meet which experts: `plan` of weights.py. index alone: each entry is an item of its own."""

    experts: int
    index: Tensor
    share: int
    order: Tensor | None = None
    count: Tensor | None = None


def plan(index: Tensor, experts: int, share: int, together: int) -> Items:
    """Entries of index [tokens, k] by expert, up to `together` at a time; share: entries that read one token."""
    flat = index.reshape(-1)
    order, expert, count = (torch.empty(len(flat), dtype=torch.int32, device=index.device) for _ in range(3))
    block = 16
    padded = max(block, 1 << (len(flat) - 1).bit_length())
    programs().plan[(-(-len(flat) // block),)](
        flat, order, expert, count, len(flat), experts, together, block, padded, num_warps=4
    )
    return Items(experts, expert, share, order, count)


def tileable(form: WeightFormat, digits: int) -> bool:
    """Whether the tensor cores take rows of a `decodable` format: groups of whole steps of eight units, two digits."""
    if form.bits not in _TILE_ROWS or digits != 2:
        return False
    whole: bool = form.group % (8 * lookup().unit_of(form.bits, form.classes)) == 0
    return whole


def multiply(inputs: Inputs, weight: PackedWeight, out: Tensor, tile: Tile, items: Items | None = None) -> None:
    """Fill out with products: [tokens, rows] of one matrix, or rows of the items' entries of a stack of them."""
    form, tables = weight.codec.format, lookup()
    route = tables.route_of(form.bits, form.classes, tile.tiles > 0)
    unit, rows, nothing = tables.unit_of(form.bits, form.classes), weight.codes.shape[-2], inputs.words
    one = len(inputs.words) == 1 if items is None else items.order is None
    work: tuple[Any, ...] = (nothing, nothing, nothing)
    if items is not None:
        work = (nothing if one else items.order, items.index, nothing if one else items.count)
    count, experts = (1, 0) if items is None else (items.index.numel(), items.experts)
    arguments = (
        weight.codes, weight.scales, inputs.words, inputs.scales, out, _table(form, route, weight.codes.device),
        weight.codec.levels, *work, rows, form.groups, len(inputs.words), 1 if items is None else items.share,
        form.bits, form.classes,
    )  # fmt: skip
    table = 0 if interpreted() else tables.tables_of(route)
    if tile.tiles:
        ptx, constraints = ("", "") if interpreted() else tables.tile_ptx_of(form.bits, form.classes, route)
        tiles = importlib.import_module("rotaryquant.native.triton.weight_tiles").multiply_tiles
        tiles[-(-rows // (16 * tile.tiles)), count](
            *arguments, unit // 4, form.group // (8 * unit), tile.tiles, experts, one, table, ptx, constraints,
            min(tile.unroll, form.groups), num_warps=1, num_stages=1,
        )  # fmt: skip
        return
    ptx, constraints, outs = ("", "", unit // 4) if interpreted() else tables.ptx_of(form.bits, form.classes, route)
    whole, most = 1 << (form.groups - 1).bit_length(), max(1, tile.words * 32 // (form.group * form.bits))
    block_groups = min(whole, 1 << (most.bit_length() - 1))
    programs().multiply[min(-(-rows // tile.rows), _PROGRAMS), count](
        *arguments, inputs.digits, form.group // unit, unit // 4, tile.rows, block_groups, experts,
        block_groups >= form.groups, table, ptx, constraints, outs, one,
        num_warps=1, num_stages=1,
    )  # fmt: skip


def unpack(weight: PackedWeight, out: Tensor) -> None:
    """Weights scale · level of rows, in the space of rotated inputs, into out [..., rows, width] of any float dtype."""
    form = weight.codec.format
    rows = weight.codes.numel() // form.code_bytes
    block = min(_UNPACKED, 1 << (form.width - 1).bit_length())
    if rows:
        programs().unpack[rows, -(-form.width // block)](
            weight.codes, weight.scales, weight.codec.levels, out, rows, form.width, form.code_bytes,
            form.bits, form.classes, form.group, block, num_warps=4,
        )  # fmt: skip


def combine(parts: Tensor, index: Tensor, weights: Tensor, experts: int, out: Tensor) -> None:
    """Sums of parts [tokens · k, width] times weights [tokens, k] into out [tokens, width], experts here alone."""
    tokens, k = index.shape
    block = 256
    programs().combine[tokens, -(-out.shape[1] // block)](
        parts, index, weights, out, out.shape[1], k, 1 << (k - 1).bit_length(), experts, block, num_warps=4
    )
