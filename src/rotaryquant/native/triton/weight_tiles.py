"""Products with packed weights on the tensor cores, up to four tokens: 16 rows and 8 columns of inputs a warp.

The columns of inputs are the two digits of each token (`weights.prepare`), so that four tokens cost what one does. One
warp to a program, since each thread's part of the tensors must be what `lookup.tile_ptx_of` says: eight units of a row
lie side by side, two to a thread, and eight rows below each other are the warp.
"""

import triton
import triton.language as tl

from rotaryquant.native.triton.lookup import dot_bytes, table_words
from rotaryquant.native.triton.weights import _decode


@triton.jit  # type: ignore[untyped-decorator]
def _step(
    low: tl.tensor,
    high: tl.tensor,
    inputs: tl.tuple,
    table: tl.tuple,
    levels_ptr: tl.tensor,
    BITS: tl.constexpr,
    CLASSES: tl.constexpr,
    WORDS: tl.constexpr,
    PTX: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
) -> tl.tuple:
    """Products of units of rows g and g + 8, each [tiles, 8, 8], with inputs [1, 8, 8]: int32 [tiles, 8, 8] of both."""
    nothing = tl.zeros(low.shape, tl.int32)
    if PTX == "":
        first = nothing
        second = nothing
        a = _decode((low,), table, levels_ptr, BITS, CLASSES, WORDS, "", "", WORDS)
        b = _decode((high,), table, levels_ptr, BITS, CLASSES, WORDS, "", "", WORDS)
        for word in tl.static_range(WORDS):
            x = inputs[word][:, None, :, :]
            none = tl.zeros([low.shape[0], 8, 8, 8], tl.int32)
            first += tl.sum(dot_bytes(a[word][:, :, None, :], x, none, False), axis=3)
            second += tl.sum(dot_bytes(b[word][:, :, None, :], x, none, False), axis=3)
    else:
        arguments = (low, high)
        for word in tl.static_range(WORDS):
            arguments = arguments + (tl.broadcast_to(inputs[word], low.shape),)
        arguments = arguments + table + (nothing, nothing)
        first, second = tl.inline_asm_elementwise(
            PTX, CONSTRAINTS, arguments, dtype=(tl.int32, tl.int32), is_pure=True, pack=2
        )
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def multiply_tiles(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    words_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_ptr: tl.tensor,
    levels_ptr: tl.tensor,
    order_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    count_ptr: tl.tensor,
    rows: tl.tensor,
    groups: tl.tensor,
    tokens: tl.tensor,
    share: tl.tensor,
    BITS: tl.constexpr,
    CLASSES: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP_STEPS: tl.constexpr,
    TILES: tl.constexpr,
    EXPERTS: tl.constexpr,
    ONE: tl.constexpr,
    TABLE: tl.constexpr,
    PTX: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """16 · TILES rows of a matrix times up to four tokens, as `weights.multiply` does it and for the same items."""
    item = tl.program_id(1)
    first_entry = item * 0
    if EXPERTS > 0:
        expert = tl.load(expert_ptr + item)
        if (expert < 0) | (expert >= EXPERTS):
            return
        codes_ptr += expert.to(tl.int64) * rows * groups * (GROUP_STEPS * 8 * WORDS * 4 * BITS // 8)
        scales_ptr += expert.to(tl.int64) * rows * groups
        first_entry = item
        if not ONE:
            tokens = tl.load(count_ptr + item)
    if ONE:
        tokens = 1
    units = groups * (GROUP_STEPS * 8)
    table = table_words(table_ptr, TABLE)
    eight = tl.arange(0, 8)
    entry = first_entry + eight // 2
    if EXPERTS > 0 and not ONE:
        entry = tl.load(order_ptr + entry, mask=eight // 2 < tokens, other=0)
    token = (entry // share).to(tl.int64)
    used = (eight // 2 < tokens)[None, :, None]
    x_ptr = words_ptr + ((token * 2 + eight % 2) * WORDS * units)[None, :, None] + eight[None, None, :]
    x_scale_ptr = x_scales_ptr + (token * groups)[None, None, :]
    digit_scale = tl.where(eight % 2 == 0, 256.0, 1.0)[None, None, :]
    row = tl.program_id(0) * (16 * TILES) + 16 * tl.arange(0, TILES)[:, None, None] + eight[None, :, None]
    if BITS == 4 and CLASSES > 1:
        held_ptr = codes_ptr.to(tl.pointer_type(tl.int64))
    else:
        held_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    low_ptr = held_ptr + row.to(tl.int64) * units + eight[None, None, :]
    high_ptr = held_ptr + (row + 8).to(tl.int64) * units + eight[None, None, :]
    low_scale_ptr = scales_ptr + row.to(tl.int64) * groups
    high_scale_ptr = scales_ptr + (row + 8).to(tl.int64) * groups
    low_in, high_in = row < rows, row + 8 < rows
    low_sums = tl.zeros([TILES, 8, 8], tl.float32)
    high_sums = tl.zeros([TILES, 8, 8], tl.float32)
    used_columns = (eight // 2 < tokens)[None, None, :]
    for begin in range(0, groups, UNROLL):
        for number in tl.static_range(UNROLL):
            group = begin + number
            inside = (group + tl.arange(0, 1) < groups)[None, None, :]  # a scalar is no mask in some interpreters
            x_scale = tl.load(x_scale_ptr + group, mask=used_columns & inside, other=0.0) * digit_scale
            low_scale = tl.load(low_scale_ptr + group, mask=low_in & inside, other=0.0).to(tl.float32)
            high_scale = tl.load(high_scale_ptr + group, mask=high_in & inside, other=0.0).to(tl.float32)
            for step in tl.static_range(GROUP_STEPS):
                at = (group * GROUP_STEPS + step) * 8
                low = tl.load(low_ptr + at, mask=low_in & inside, other=0)
                high = tl.load(high_ptr + at, mask=high_in & inside, other=0)
                inputs = ()
                for word in tl.static_range(WORDS):
                    inputs = inputs + (tl.load(x_ptr + word * units + at, mask=used & inside, other=0),)
                first, second = _step(low, high, inputs, table, levels_ptr, BITS, CLASSES, WORDS, PTX, CONSTRAINTS)
                low_sums += first.to(tl.float32) * (low_scale * x_scale)
                high_sums += second.to(tl.float32) * (high_scale * x_scale)
    four = tl.arange(0, 4)
    target = first_entry + four
    if EXPERTS > 0 and not ONE:
        target = tl.load(order_ptr + target, mask=four < tokens, other=0)
    flat = tl.program_id(0) * (16 * TILES) + 16 * tl.arange(0, TILES)[:, None] + eight[None, :]
    out_ptr += target.to(tl.int64)[None, None, :] * rows + flat[:, :, None]
    mask = (four < tokens)[None, None, :]
    kind = out_ptr.dtype.element_ty
    low_out = tl.sum(low_sums.reshape(TILES, 8, 4, 2), axis=3)
    high_out = tl.sum(high_sums.reshape(TILES, 8, 4, 2), axis=3)
    tl.store(out_ptr, low_out.to(kind), mask=mask & (flat < rows)[:, :, None])
    tl.store(out_ptr + 8, high_out.to(kind), mask=mask & (flat + 8 < rows)[:, :, None])
