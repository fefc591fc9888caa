"""Reading memory and nothing else: the roof of programs that read each byte once."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def read(
    data_ptr: tl.tensor, out_ptr: tl.tensor, steps: tl.tensor, BLOCK: tl.constexpr, TOGETHER: tl.constexpr
) -> None:
    """`steps` · TOGETHER blocks of int32 of every program; out [programs, BLOCK], so that they are not left out."""
    inner = tl.arange(0, BLOCK)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    at = data_ptr + tl.program_id(0) * BLOCK + inner
    total = tl.zeros([BLOCK], tl.int32)
    for _ in range(steps):
        for number in tl.static_range(TOGETHER):
            total ^= tl.load(at + number * stride)
        at += TOGETHER * stride
    tl.store(out_ptr + tl.program_id(0) * BLOCK + inner, total)
