"""Programs on packed weights: inputs to bytes, products of few tokens, weights to memory, and what experts need.

Inputs become integers, a scale for each group of columns: `DIGITS` signed bytes each, of which four make a word, in the
order in which a unit of codes is decoded (`lookup.column_of`): words [tokens, digits, words of a unit, units], scales
fp32 [tokens, groups]. With two digits they have 16 bits, with three 24.
"""

import triton
import triton.language as tl

from rotaryquant.native.triton.lookup import column_of, dot_bytes, level_of, table_words


@triton.jit  # type: ignore[untyped-decorator]
def _hadamard(size: tl.constexpr) -> tl.tensor:
    """Sylvester's matrix [size, size] of ±1, size up to 16: the parity of the bits that row and column share."""
    both = tl.arange(0, size)[:, None] & tl.arange(0, size)[None, :]
    both ^= both >> 2
    both ^= both >> 1
    return 1.0 - 2.0 * (both & 1).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _activated(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """An activation by name, of fp32 values."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # gelu_tanh
    return x / (1.0 + tl.exp(-2.0 * inner))


@triton.jit  # type: ignore[untyped-decorator]
def prepare(
    x_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    GATE: tl.constexpr,
    DIGITS: tl.constexpr,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    ROTATED_A: tl.constexpr,
    ROTATED_B: tl.constexpr,
) -> None:
    """CHUNK columns of a row of inputs: gated, rotated, as bytes.

    x: rows of `width` values, or of twice as many where GATE names an activation: then activation(first half) · second.
    ROTATED_A · ROTATED_B: columns that are rotated together, 1 for none; the matrix is the product of two small ones.
    factors: WeightCodec.input_factors.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * row_stride + column).to(tl.float32)
    if GATE != "none":
        x = _activated(x, GATE) * tl.load(x_ptr + row * row_stride + width + column).to(tl.float32)
    ROTATED: tl.constexpr = ROTATED_A * ROTATED_B
    if ROTATED > 1:
        y = (x * tl.load(factors_ptr + column)).reshape(CHUNK // ROTATED, ROTATED_A, ROTATED_B)
        y = tl.sum(y[:, :, :, None] * _hadamard(ROTATED_B)[None, None, :, :], axis=2)
        y = tl.sum(y[:, :, None, :] * _hadamard(ROTATED_A)[None, :, :, None], axis=1)
        x = y.reshape(CHUNK)
    GROUPS: tl.constexpr = CHUNK // GROUP
    MOST: tl.constexpr = 127.0 * 256 ** (DIGITS - 1)
    x = x.reshape(GROUPS, GROUP)
    largest = tl.max(tl.abs(x), axis=1)
    largest += 0.0 * tl.sum(x, axis=1)  # what is not finite stays so
    inverse = tl.where(largest > 0, MOST / tl.where(largest > 0, largest, 1.0), 0.0)
    rest = tl.floor(x * inverse[:, None] + 0.5).to(tl.int32)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    tl.store(scales_ptr + row * (width // GROUP) + group, largest * (1.0 / MOST))
    UNITS: tl.constexpr = CHUNK // UNIT
    WORDS: tl.constexpr = UNIT // 4
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    for number in tl.static_range(DIGITS):
        digit = rest
        if number < DIGITS - 1:
            digit = ((rest + 128) & 255) - 128  # the lowest first
            rest = (rest - digit) >> 8
        out_ptr = words_ptr + (row * DIGITS + (DIGITS - 1 - number)) * (width // 4)
        if BITS == 2:  # [unit, half of it, byte, even or odd]
            parts = (digit & 255).reshape(UNITS, 2, 4, 2) << (8 * tl.arange(0, 4))[None, None, :, None]
            word = tl.arange(0, 2)[None, :, None] + 2 * tl.arange(0, 2)[None, None, :]
            tl.store(out_ptr + word * (width // UNIT) + unit[:, None, None], tl.sum(parts, axis=2))
        else:
            parts = (digit & 255).reshape(UNITS, WORDS, 4) << (8 * tl.arange(0, 4))[None, None, :]
            word = tl.arange(0, WORDS)[None, :]
            tl.store(out_ptr + word * (width // UNIT) + unit[:, None], tl.sum(parts, axis=2))


@triton.jit  # type: ignore[untyped-decorator]
def _load_units(
    codes_ptr: tl.tensor, at: tl.tensor, mask: tl.tensor, BITS: tl.constexpr, CLASSES: tl.constexpr
) -> tl.tuple:
    """Units by their number: one word each, or three at 3 bits."""
    if BITS == 4 and CLASSES > 1:
        words_ptr = codes_ptr.to(tl.pointer_type(tl.int64))
    else:
        words_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    if BITS == 3:
        first = tl.load(words_ptr + 3 * at, mask=mask, other=0)
        second = tl.load(words_ptr + 3 * at + 1, mask=mask, other=0)
        found = (first, second, tl.load(words_ptr + 3 * at + 2, mask=mask, other=0))
    else:
        found = (tl.load(words_ptr + at, mask=mask, other=0),)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _level(
    unit: tl.tuple,
    levels_ptr: tl.tensor,
    COLUMN: tl.constexpr,
    BITS: tl.constexpr,
    CLASSES: tl.constexpr,
) -> tl.tensor:
    """Levels of one column of units, as bytes in int32."""
    if BITS != 3:
        circle = unit[0].to(tl.int64)
    elif COLUMN < 16:
        circle = (unit[0].to(tl.int64) & 0xFFFFFFFF) | (unit[1].to(tl.int64) & 0xFFFF) << 32
    else:
        circle = ((unit[1].to(tl.int64) >> 16) & 0xFFFF) | (unit[2].to(tl.int64) & 0xFFFFFFFF) << 16
    return level_of(circle, COLUMN % 16, levels_ptr, BITS, CLASSES) & 255


@triton.jit  # type: ignore[untyped-decorator]
def _decode(
    unit: tl.tuple,
    table: tl.tuple,
    levels_ptr: tl.tensor,
    BITS: tl.constexpr,
    CLASSES: tl.constexpr,
    WORDS: tl.constexpr,
    PTX: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    OUTS: tl.constexpr,
) -> tl.tuple:
    """Words of levels of units: OUTS of them, as many or twice as many as WORDS."""
    if PTX == "":
        found = ()
        for word in tl.static_range(WORDS):
            total = tl.zeros(unit[0].shape, tl.int32)
            for byte in tl.static_range(4):
                total |= _level(unit, levels_ptr, column_of(word, byte, BITS), BITS, CLASSES) << (8 * byte)
            found = found + (total,)
    else:
        arguments = unit + table
        if OUTS == 1:
            only = tl.inline_asm_elementwise(PTX, CONSTRAINTS, arguments, dtype=tl.int32, is_pure=True, pack=1)
            found = (only,)
        else:
            found = tl.inline_asm_elementwise(
                PTX, CONSTRAINTS, arguments, dtype=(tl.int32,) * OUTS, is_pure=True, pack=1
            )
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(
    x_ptr: tl.tensor,
    unit: tl.tensor,
    mask: tl.tensor,
    units: tl.tensor,
    COUNT: tl.constexpr,
) -> tl.tuple:
    """COUNT words of inputs for each unit [1, groups, units of a group]: those of a token, digit by digit."""
    found = ()
    for number in tl.static_range(COUNT):
        found = found + (tl.load(x_ptr + number * units + unit, mask=mask, other=0),)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _dots(
    levels: tl.tuple,
    inputs: tl.tuple,
    DIGITS: tl.constexpr,
    WORDS: tl.constexpr,
    OUTS: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """Products of decoded words with inputs, summed over the units of each group: fp32, in steps of the lowest digit.

    Two digits fit one integer together.
    """
    total = tl.zeros(levels[0].shape, tl.int32)
    value = tl.sum(total, axis=2).to(tl.float32)
    for digit in tl.static_range(DIGITS):
        if digit > 0:
            if DIGITS > 2:
                value = (value + tl.sum(total, axis=2).to(tl.float32)) * 256.0
                total = tl.zeros(levels[0].shape, tl.int32)
            else:
                total = total << 8
        for word in tl.static_range(WORDS):
            x = tl.broadcast_to(inputs[digit * WORDS + word], levels[0].shape)
            for part in tl.static_range(OUTS // WORDS):
                total = dot_bytes(levels[word * (OUTS // WORDS) + part], x, total, PTX)
    return value + tl.sum(total, axis=2).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def multiply(
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
    DIGITS: tl.constexpr,
    GROUP_UNITS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WHOLE: tl.constexpr,
    TABLE: tl.constexpr,
    PTX: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    OUTS: tl.constexpr,
    ONE: tl.constexpr,
) -> None:
    """Rows of a matrix times the tokens that it is for.

    EXPERTS 0: one matrix [rows, ...] and `tokens` tokens. Otherwise item program_id(1): of expert `expert_ptr[item]`,
    whose tokens are entries item .. item + `count_ptr[item]` of `order_ptr`; experts from EXPERTS on are elsewhere. An
    entry e is written to row e of out and reads token e // share. WHOLE: a row is one block of groups, which is decoded
    once for all tokens. ONE: there is one token, whose inputs stay for all blocks of rows.
    """
    item = tl.program_id(1)
    first_entry = item * 0
    if EXPERTS > 0:
        expert = tl.load(expert_ptr + item)
        if (expert < 0) | (expert >= EXPERTS):
            return
        codes_ptr += expert.to(tl.int64) * rows * groups * (GROUP_UNITS * WORDS * 4 * BITS // 8)
        scales_ptr += expert.to(tl.int64) * rows * groups
        first_entry = item
        if not ONE:
            tokens = tl.load(count_ptr + item)
    units = groups * GROUP_UNITS
    table = table_words(table_ptr, TABLE)
    inner = tl.arange(0, GROUP_UNITS)[None, None, :]
    if WHOLE:
        group = tl.arange(0, BLOCK_GROUPS)
        group_in = group < groups
        unit = group[None, :, None] * GROUP_UNITS + inner
        if ONE:
            first_token = (first_entry // share).to(tl.int64)
            inputs = _inputs(
                words_ptr + first_token * (DIGITS * WORDS) * units, unit, group_in[None, :, None], units, DIGITS * WORDS
            )
            x_scale = tl.load(x_scales_ptr + first_token * groups + group, mask=group_in, other=0.0)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0)):
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_in = row < rows
        if WHOLE:
            at = row.to(tl.int64)[:, None, None] * units + unit
            held = _load_units(codes_ptr, at, row_in[:, None, None] & group_in[None, :, None], BITS, CLASSES)
            scale = tl.load(
                scales_ptr + row.to(tl.int64)[:, None] * groups + group[None, :],
                mask=row_in[:, None] & group_in[None, :],
                other=0.0,
            ).to(tl.float32)
            levels = _decode(held, table, levels_ptr, BITS, CLASSES, WORDS, PTX, CONSTRAINTS, OUTS)
        for number in range(1 if ONE else tokens):
            entry = first_entry + number
            if EXPERTS > 0 and not ONE:
                entry = tl.load(order_ptr + entry)
            token = (entry // share).to(tl.int64)
            x_ptr = words_ptr + token * (DIGITS * WORDS) * units
            if WHOLE:
                if not ONE:
                    inputs = _inputs(x_ptr, unit, group_in[None, :, None], units, DIGITS * WORDS)
                    x_scale = tl.load(x_scales_ptr + token * groups + group, mask=group_in, other=0.0)
                dots = _dots(levels, inputs, DIGITS, WORDS, OUTS, PTX != "")
                total = tl.sum(dots * (scale * x_scale[None, :]), axis=1)
            else:
                total = tl.zeros([BLOCK_ROWS], tl.float32)
                for first in range(0, groups, BLOCK_GROUPS):
                    part = first + tl.arange(0, BLOCK_GROUPS)
                    part_in = part < groups
                    piece = part[None, :, None] * GROUP_UNITS + inner
                    place = row.to(tl.int64)[:, None, None] * units + piece
                    inside = row_in[:, None, None] & part_in[None, :, None]
                    loaded = _load_units(codes_ptr, place, inside, BITS, CLASSES)
                    found = _decode(loaded, table, levels_ptr, BITS, CLASSES, WORDS, PTX, CONSTRAINTS, OUTS)
                    read = _inputs(x_ptr, piece, part_in[None, :, None], units, DIGITS * WORDS)
                    sums = _dots(found, read, DIGITS, WORDS, OUTS, PTX != "")
                    factor = tl.load(
                        scales_ptr + row.to(tl.int64)[:, None] * groups + part[None, :],
                        mask=row_in[:, None] & part_in[None, :],
                        other=0.0,
                    ).to(tl.float32)
                    x_factor = tl.load(x_scales_ptr + token * groups + part, mask=part_in, other=0.0)
                    total += tl.sum(sums * (factor * x_factor[None, :]), axis=1)
            tl.store(out_ptr + entry.to(tl.int64) * rows + row, total.to(out_ptr.dtype.element_ty), mask=row_in)


@triton.jit  # type: ignore[untyped-decorator]
def unpack(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    levels_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    code_bytes: tl.tensor,
    BITS: tl.constexpr,
    CLASSES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Weights scale · level of BLOCK columns of a row, any width and bits: [rows, width] in out's dtype."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    code = _code_at(codes_ptr + row * code_bytes, column, inside, code_bytes, BITS)
    if CLASSES > 1:
        before = (column & -16) + ((column + 15) & 15)
        code += (_code_at(codes_ptr + row * code_bytes, before, inside, code_bytes, BITS) & (CLASSES - 1)) << BITS
    scale = tl.load(scales_ptr + row * (width // GROUP) + column // GROUP, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(levels_ptr + code) * scale
    tl.store(out_ptr + row * width + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _code_at(
    row_ptr: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    code_bytes: tl.tensor,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Codes of columns of a row of bytes, int32."""
    bit = column * BITS
    found = tl.load(row_ptr + (bit >> 3), mask=inside, other=0).to(tl.int32)
    if BITS == 3:  # the only ones that may lie in two bytes
        following = (bit >> 3) + 1
        found |= tl.load(row_ptr + following, mask=inside & (following < code_bytes), other=0).to(tl.int32) << 8
    return (found >> (bit & 7)) & ((1 << BITS) - 1)


@triton.jit  # type: ignore[untyped-decorator]
def plan(
    index_ptr: tl.tensor,
    order_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    count_ptr: tl.tensor,
    entries: tl.tensor,
    EXPERTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL: tl.constexpr,
) -> None:
    """Entries by expert, in their order, and items of up to TOGETHER entries of one expert.

    index: expert of each entry. order: entries by expert. Item i, at place i of that order: its expert, or -1 where no
    item begins there, and its count.
    """
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    every = tl.arange(0, ALL)
    mine = tl.load(index_ptr + own, mask=own < entries, other=EXPERTS).to(tl.int32)
    theirs = tl.load(index_ptr + every, mask=every < entries, other=2147483647).to(tl.int32)
    less = theirs[None, :] < mine[:, None]
    same = (theirs[None, :] == mine[:, None]) & (every < entries)[None, :]
    rank = tl.sum((same & (every[None, :] < own[:, None])).to(tl.int32), axis=1)
    size = tl.sum(same.to(tl.int32), axis=1)
    place = tl.sum(less.to(tl.int32), axis=1) + rank
    begins = (rank % TOGETHER == 0) & (mine >= 0) & (mine < EXPERTS)
    tl.store(order_ptr + place, own, mask=own < entries)
    tl.store(expert_ptr + place, tl.where(begins, mine, -1), mask=own < entries)
    tl.store(count_ptr + place, tl.minimum(size - rank, TOGETHER), mask=own < entries)


@triton.jit  # type: ignore[untyped-decorator]
def combine(
    parts_ptr: tl.tensor,
    index_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The sum of a token's K parts times their weights; parts of experts that are elsewhere are not read."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K_BLOCK)
    expert = tl.load(index_ptr + token * K + k, mask=k < K, other=EXPERTS)
    here = (k < K) & (expert >= 0) & (expert < EXPERTS)
    weight = tl.load(weights_ptr + token * K + k, mask=here, other=0.0).to(tl.float32)
    inside = here[:, None] & (column < width)[None, :]
    part = tl.load(parts_ptr + (token * K + k)[:, None] * width + column[None, :], mask=inside, other=0.0)
    total = tl.sum(part.to(tl.float32) * weight[:, None], axis=0)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=column < width)
