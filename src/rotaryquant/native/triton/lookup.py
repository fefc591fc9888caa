"""From packed codes to levels, four int8 to a word, and products of such words with inputs of the same form.

A *unit* is what is decoded at once: a word of 32 bits, or a whole circle where a level needs the code before and codes
have 4 bits (64 bits), or two circles at 3 bits (three words). It becomes a word for every four columns. Bytes are
permuted (PRMT), which looks up four levels at a time in a table of eight; tables of 16 and 64 are made of several.

Every lookup exists twice: as PTX for the GPU, and as plain arithmetic from the definition, for Triton's interpreter.
"""

import triton
import triton.language as tl

CIRCLE = 16  # columns of a trellis that are decoded together (formats.codebook.CYCLE)

#: Words of the table of each way to look levels up. split16: two tables of eight whose answers are added by the product
#: (`_split_table`). shuffle: the 32 threads of a warp hold the table, four levels each, and ask one another.
_TABLES = {"split16": 4, "table64": 16, "shuffle": 1, "table8": 2, "bytes": 0}

#: Copies of a table, one a thread: of one copy the compiler knows that it is the same for all threads, and keeps it in
#: registers of which a lookup can read but one.
COPIES = 32

_SPREAD = ((0xFFF, 0xFFF000, 4), (0x003F003F, 0x0FC00FC0, 2), (0x07070707, 0x38383838, 1))


def route_of(bits: int, classes: int, tiles: bool) -> str:
    """How levels of codes of so many bits are looked up. tiles: on the way to the tensor cores."""
    if bits == 8:
        return "bytes"
    if bits == 2 or (bits == 4 and classes == 1):
        return "split16"
    if classes == 1:
        return "table8"
    return "shuffle" if bits == 4 and tiles else "table64"


def unit_of(bits: int, classes: int) -> int:
    """Columns of a unit."""
    if bits == 3:
        return 2 * CIRCLE
    return CIRCLE if classes > 1 else 32 // bits


def table_of(levels: tuple[int, ...], bits: int, classes: int, route: str) -> list[int]:
    """The words that a route looks up in, as int32, each as often as there are threads that read it (COPIES).

    levels: formats.weight.WeightFormat.levels. Of `shuffle` each thread has a word of its own: the levels of a code
    after each class.
    """
    if route == "bytes":
        return [0] * COPIES
    table = list(levels)
    if route == "shuffle":
        table = [levels[16 * kind + code] for code in (*range(16), *range(16)) for kind in range(4)]
    if bits == 2:  # four bits of the stream are the code before and then the code
        table = [levels[(i % 4) * 4 + i // 4] if classes > 1 else levels[i // 4] for i in range(16)]
    if route == "split16":
        table = _split_table(table)
    raw = bytes(level & 0xFF for level in table)
    words = [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)]
    return words if route == "shuffle" else [word for word in words for _ in range(COPIES)]


def _split_table(levels: list[int]) -> list[int]:
    """Two tables of eight whose answers sum to the level.

    An index that is none of a table's gets the sign of the entry eight away, 0 or -1, instead of nothing: PRMT fills a
    byte with a sign where the top bit of its selector is set. So each entry takes away what the other will add.
    """
    low, high = [], []
    for a, b in zip(levels[:8], levels[8:], strict=True):
        low_entry, high_entry = next(
            (a - minus_b, b - minus_a)
            for minus_a in (-1, 0)
            for minus_b in (-1, 0)
            if (minus_a < 0) == (a - minus_b < 0) and (minus_b < 0) == (b - minus_a < 0)
        )
        low.append(low_entry)
        high.append(high_entry)
    return low + high


def _sixteen(source: str, tag: str, outs: list[str]) -> list[str]:
    """Levels of the eight nibbles of a word, of 16 levels each. outs: two names a half, since they are split."""
    lines = [f"xor.b32 n{tag}, {source}, 0x88888888;"]
    for half in range(2):
        low = source
        if half:
            lines += [f"shr.u32 s{tag}, {source}, 16;", f"shr.u32 n{tag}, n{tag}, 16;"]
            low = f"s{tag}"
        a, b = outs[2 * half : 2 * half + 2]
        lines += [f"prmt.b32 {a}, t0, t1, {low};", f"prmt.b32 {b}, t2, t3, n{tag};"]
    return lines


def _sixty_four(now: str, before: str, outs: list[str], shifts: tuple[int, int, int], own: bool) -> list[str]:
    """Levels of the eight nibbles of a word, each of 64 by its low three bits and three bits more.

    shifts: by how many bits to the left (negative: right) the latter lie under the third bit of a nibble: of `now` for
    the first where `own`, of `before` for the others.
    """
    lines = [f"and.b32 s, {now}, 0x77777777;"]
    for number, shift in enumerate(shifts):
        source = now if own and number == 0 else before
        move = f"shl.b32 m{number}, {source}, {shift};" if shift >= 0 else f"shr.u32 m{number}, {source}, {-shift};"
        lines += [move, f"lop3.b32 m{number}, m{number}, 0x44444444, 0x32103210, 0xEA;"]
    for half in range(2):
        if half:
            lines += [f"shr.u32 {name}, {name}, 16;" for name in ("s", "m0", "m1", "m2")]
        lines += [f"prmt.b32 q{i}, t{2 * i}, t{2 * i + 1}, s;" for i in range(8)]
        lines += [f"prmt.b32 q{i}, q{2 * i}, q{2 * i + 1}, m0;" for i in range(4)]
        lines += [f"prmt.b32 q{i}, q{2 * i}, q{2 * i + 1}, m1;" for i in range(2)]
        lines.append(f"prmt.b32 {outs[half]}, q0, q1, m2;")
    return lines


def _spread(source: str, into: str) -> list[str]:
    """Eight codes of three bits, the low 24 of `source`, a nibble each; what lies above does not matter."""
    lines, value = [], source
    for low, high, shift in _SPREAD:
        lines += [f"and.b32 a, {value}, {high:#x};", f"shl.b32 a, a, {shift};"]
        lines.append(f"lop3.b32 {into}, {value}, {low:#x}, a, 0xEA;")
        value = into
    return lines


def tables_of(route: str) -> int:
    """Words of a route's table."""
    return _TABLES[route]


def ptx_of(bits: int, classes: int, route: str) -> tuple[str, str, int]:
    """Assembly that decodes a unit, its constraints, and how many words come out.

    Inputs: the unit (one operand of 32 or 64 bits, or three words), then the words of the table.
    """
    words, tables = 3 if bits == 3 else 1, tables_of(route)
    outs = unit_of(bits, classes) // 4 * (2 if route == "split16" else 1)
    names = [f"${i}" for i in range(outs + words + tables)]
    text = _decoder(bits, classes, route, names[outs : outs + words], names[outs + words :], names[:outs])
    unit = ["l"] if bits == 4 and classes > 1 else ["r"] * words
    return text, ",".join(["=r"] * outs + unit + ["r"] * tables), outs


def tile_ptx_of(bits: int, classes: int, route: str) -> tuple[str, str]:
    """Assembly of one step of a warp on the tensor cores, two elements of each tensor a thread, and its constraints.

    Thread 4·g + t has units 2t and 2t + 1 of rows g and g + 8, the words of x for the same units of column g, and sums
    of columns 2t and 2t + 1 of both rows: what `mma.m16n8k32` takes, columns of the matrix in another order. Operands:
    outputs sums of row g, of g + 8; inputs units of g, of g + 8, words of x, words of the table, sums so far of both.
    """
    words, tables, copies = unit_of(bits, classes) // 4, tables_of(route), 2 if route == "split16" else 1
    assert bits != 3, "units of three words are not taken by twos"
    x, table = 8, 8 + 2 * words
    so_far = table + 2 * tables
    lines = ["{ .reg .b32 z0, z1, z2, z3;"]
    lines.append(
        ".reg .b32 " + ", ".join(f"l{r}{u}{i}" for r in "ab" for u in range(2) for i in range(words * copies)) + ";"
    )
    lines += [f"mov.b32 z{i}, ${so_far + i};" for i in range(4)]
    for number, row in enumerate("ab"):
        for unit in range(2):
            outs = [f"l{row}{unit}{i}" for i in range(words * copies)]
            entries = [f"${table + 2 * i}" for i in range(tables)]
            lines.append(_decoder(bits, classes, route, [f"${4 + 2 * number + unit}"], entries, outs))
    pairs = [(unit, word) for unit in range(2) for word in range(words)]
    for (unit, word), (other, following) in zip(pairs[::2], pairs[1::2], strict=True):
        for copy in range(copies):
            a = [f"l{row}{u}{w * copies + copy}" for u, w in ((unit, word), (other, following)) for row in "ab"]
            b = f"${x + 2 * word + unit}, ${x + 2 * following + other}"
            sums = "{z0, z1, z2, z3}"
            lines.append(
                f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {sums}, {{{', '.join(a)}}}, {{{b}}}, {sums};"
            )
    lines += [f"mov.b32 ${i}, z{i};" for i in range(4)]
    wide = "l" if bits == 4 and classes > 1 else "r"
    constraints = ["=r"] * 4 + [wide] * 4 + ["r"] * (2 * words + 2 * tables + 4)
    return "\n".join([*lines, "}"]), ",".join(constraints)


def _decoder(bits: int, classes: int, route: str, unit: list[str], table: list[str], into: list[str]) -> str:
    """A block that decodes a unit into words of levels, all by their names."""
    outs = [f"o{i}" for i in range(len(into))]
    half = len(outs) // 2
    lines = [f"mov.b32 t{i}, {name};" for i, name in enumerate(table)]
    if bits == 8:
        lines = [f"xor.b32 o0, {unit[0]}, 0x80808080;"]
    elif bits == 2:  # even columns: what lies before the first is the circle's last
        lines += [f"mov.b32 w1, {unit[0]};", "shf.l.wrap.b32 w0, w1, w1, 2;"]
        lines += _sixteen("w0", "0", outs[:half])
        lines += _sixteen("w1", "1", outs[half:])
    elif bits == 4 and classes == 1:
        lines += [f"mov.b32 w0, {unit[0]};", *_sixteen("w0", "0", outs)]
    elif route == "shuffle":
        lines += [f"mov.b64 {{w0, w1}}, {unit[0]};", *_shuffled("w0", "w1", outs)]
    elif bits == 4:
        lines += [f"mov.b64 {{w0, w1}}, {unit[0]};", *_circle("w0", "w1", outs, (-1, 2, 1), own=True)]
    else:
        lines += _three(classes, unit, outs)
    names = "w0, w1, w2, c1, c2, c3, d0, d1, d2, d3, p0, p1, s, s0, s1, n0, n1, m0, m1, m2, a, b"
    declared = ", ".join([names, *(f"q{i}" for i in range(8)), *(f"t{i}" for i in range(16)), *outs])
    ends = [f"mov.b32 {name}, o{i};" for i, name in enumerate(into)]
    return "\n".join([f"{{ .reg .b32 {declared};", *lines, *ends, "}"])


def _shuffled(first: str, second: str, outs: list[str]) -> list[str]:
    """Levels of a circle of 16 nibbles: the four of a code from the thread of its number, then that of its class."""
    lines = [f"shf.l.wrap.b32 p0, {second}, {first}, 4;", f"shf.l.wrap.b32 p1, {first}, {second}, 4;"]
    for number, word in enumerate((first, second)):
        lines.append(f"lop3.b32 s, p{number}, 0x33333333, 0x40404040, 0xEA;")
        for i in range(8):
            lines += [f"shr.u32 a, {word}, {4 * i};"] if i else []
            lines.append(f"shfl.sync.idx.b32 q{i}, t0, {'a' if i else word}, 31, 0xffffffff;")
        for pair in range(4):
            lines += ["shr.u32 s, s, 8;"] if pair else []
            lines.append(f"prmt.b32 q{pair}, q{2 * pair}, q{2 * pair + 1}, s;")
        lines += [f"prmt.b32 {outs[2 * number + half]}, q{2 * half}, q{2 * half + 1}, 0x5410;" for half in range(2)]
    return lines


def _three(classes: int, unit: list[str], outs: list[str]) -> list[str]:
    """Two circles of 3-bit codes, three words: first a nibble each."""
    lines = [f"mov.b32 w{i}, {name};" for i, name in enumerate(unit)]
    lines += ["shf.r.wrap.b32 c1, w0, w1, 24;", "shf.r.wrap.b32 c2, w1, w2, 16;", "shr.u32 c3, w2, 8;"]
    for i, source in enumerate(("w0", "c1", "c2", "c3")):
        lines += _spread(source, f"d{i}")
    if classes > 1:
        shifts = (2, 1, 0)
        return (
            lines + _circle("d0", "d1", outs[:4], shifts, own=False) + _circle("d2", "d3", outs[4:], shifts, own=False)
        )
    for i in range(4):
        lines += [f"prmt.b32 {outs[2 * i]}, t0, t1, d{i};", f"shr.u32 d{i}, d{i}, 16;"]
        lines.append(f"prmt.b32 {outs[2 * i + 1]}, t0, t1, d{i};")
    return lines


def _circle(first: str, second: str, outs: list[str], shifts: tuple[int, int, int], own: bool) -> list[str]:
    """Both words of a circle of 16 nibbles, each nibble with the one before it, in a circle."""
    lines = [f"shf.l.wrap.b32 p0, {second}, {first}, 4;", f"shf.l.wrap.b32 p1, {first}, {second}, 4;"]
    return lines + _sixty_four(first, "p0", outs[:2], shifts, own) + _sixty_four(second, "p1", outs[2:], shifts, own)


DOT = tl.constexpr("dp4a.s32.s32 $0, $1, $2, $3;")


#: Which of the 32 threads of its warp a thread is.
_LANE = tl.constexpr("mov.u32 $0, %laneid;")


@triton.jit  # type: ignore[untyped-decorator]
def table_words(table_ptr: tl.tensor, COUNT: tl.constexpr) -> tl.tuple:
    """COUNT words of a table [COUNT, COPIES], of which each thread reads its own copy."""
    words = ()
    if COUNT > 0:
        lane = tl.inline_asm_elementwise(_LANE, "=r", [], dtype=tl.int32, is_pure=True, pack=1)
        for number in tl.static_range(COUNT):
            words = words + (tl.load(table_ptr + number * 32 + lane),)
    return words


@triton.jit  # type: ignore[untyped-decorator]
def dot_bytes(a: tl.tensor, b: tl.tensor, total: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """Total + the products of four signed bytes of a word with those of another."""
    if PTX:
        return tl.inline_asm_elementwise(DOT, "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1)
    for byte in tl.static_range(4):
        total += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def level_of(
    circle: tl.tensor, at: tl.tensor, levels_ptr: tl.tensor, BITS: tl.constexpr, CLASSES: tl.constexpr
) -> tl.tensor:
    """The level of one of the codes of a circle or a unit, by definition. circle: int64. at: which code."""
    code = (circle >> (BITS * at)) & ((1 << BITS) - 1)
    if CLASSES > 1:
        before = (circle >> (BITS * ((at + 15) % 16))) & (CLASSES - 1)
        code += before << BITS
    return tl.load(levels_ptr + code).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def column_of(word: tl.constexpr, byte: tl.constexpr, BITS: tl.constexpr) -> tl.constexpr:
    """Which column of a unit a byte of a word stands for: at 2 bits even ones come first."""
    if BITS == 2:
        return (word % 2) * 8 + 2 * byte + word // 2
    return 4 * word + byte
