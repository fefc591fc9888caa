"""The search for the circles of a trellis, as `ops/circles` says."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def search(
    x_ptr: tl.tensor,
    levels_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    circles: tl.tensor,
    CLASSES: tl.constexpr,
    CODES: tl.constexpr,
    CLASS_BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Codes of BLOCK circles of COLUMNS values; all pointers to int64, rows one behind the other."""
    circle = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = circle < circles
    classes = tl.arange(0, CLASSES)
    row, column_of = classes[None, :, None], classes[None, None, :]  # of [circle, row, column]
    # cost[circle, last class, class]: of the best path from a last class (where the circle closes) to a class
    cost = tl.where(row == column_of, 0, 1 << 40).to(tl.int64) + tl.zeros([BLOCK, CLASSES, CLASSES], tl.int64)
    came = tl.zeros([BLOCK, CLASSES, CLASSES], tl.int64)  # the class before, CLASS_BITS a column
    taken = tl.zeros([BLOCK, CLASSES, CLASSES], tl.int64)  # which of the codes between two classes, 2 bits a column
    for column in tl.static_range(COLUMNS):
        x = tl.load(x_ptr + circle * COLUMNS + column, mask=inside, other=0)[:, None, None]
        first = tl.load(levels_ptr + row * CODES + column_of)
        step = (x - first) * (x - first)  # [circle, class before, class]
        branch = tl.zeros([BLOCK, CLASSES, CLASSES], tl.int64)
        for k in tl.static_range(1, CODES // CLASSES):
            level = tl.load(levels_ptr + row * CODES + k * CLASSES + column_of)
            error = (x - level) * (x - level)
            branch = tl.where(error < step, k, branch)
            step = tl.minimum(error, step)
        taken |= branch << (2 * column)
        # the class before in the low bits, so that of equal sums the lowest is taken
        total = (cost[:, :, :, None] + step[:, None, :, :]) * CLASSES + classes[None, None, :, None]
        least = tl.min(total, axis=2)
        came |= (least & (CLASSES - 1)) << (CLASS_BITS * column)
        cost = least >> CLASS_BITS
    closed = tl.sum(tl.where(row == column_of, cost, 0), axis=2) * CLASSES + classes[None, :]
    end = tl.min(closed, axis=1) & (CLASSES - 1)
    state = end
    for reverse in tl.static_range(COLUMNS):
        column = COLUMNS - 1 - reverse
        at = column_of == state[:, None, None]
        path = tl.sum(tl.sum(tl.where(at & (row == end[:, None, None]), came, 0), axis=2), axis=1)
        before = (path >> (CLASS_BITS * column)) & (CLASSES - 1)
        branches = tl.sum(tl.sum(tl.where(at & (row == before[:, None, None]), taken, 0), axis=2), axis=1)
        code = ((branches >> (2 * column)) & 3) * CLASSES + state
        tl.store(codes_ptr + circle * COLUMNS + column, code, mask=inside)
        state = before
