"""The Triton programs on packed weights without a GPU: in Triton's interpreter, and compiled for one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rotaryquant.errors import UnsupportedKernelError
from rotaryquant.formats.weight import WeightFormat
from rotaryquant.ops import dispatch
from rotaryquant.ops import triton_weights as programs
from rotaryquant.ops.dequant_matmul import dequant_matmul
from rotaryquant.ops.weights import PackedWeight, WeightCodec

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

FOLDER = Path(__file__).resolve().parent

#: What each process of the interpreter runs: the op, and what the names of its cases contain.
INTERPRETED = {
    "trellises": (
        "dequant_matmul",
        ("trellis-2 bits by 128, 128x33", "trellis-4 bits by 128, 128x33", "trellis-3 bits by 128, 16x1"),
    ),
    "other grids": (
        "dequant_matmul",
        (
            "trellis-3 bits by 128, 128x33, 2",
            "normal-2 bits by 128, 128x33, 1",
            "normal-3 bits by 128, 128x33, 5",
            "normal-4 bits by 128, 128x33, 2",
            "uniform-4 bits by 128, 48x5, 5",
            "uniform-8 bits by 128, 128x33, 2",
        ),
    ),
    "several groups": ("dequant_matmul", ("trellis-2 bits by 128, 512x8, 2", "normal-4 bits by 32, 512x8, 3")),
    "experts": (
        "expert_matmul",
        ("trellis 2-2", "trellis 2-4", "uniform 8-3"),
    ),
}

# Triton's functions are interpreted only where the variable was set before it was imported.
INTERPRET = """
import importlib, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
from rotaryquant.ops import triton_weights as programs
cases = importlib.import_module("cases." + sys.argv[2]).CASES
chosen = [case for case in cases if any(part in case.name for part in sys.argv[3:])]
for case in chosen:
    try:
        case.compare(case.run("triton"), case.run("reference"))
    except Exception as error:
        raise RuntimeError(case.name) from error
print(len(chosen), "as the reference")
"""

# Every launch is compiled as it would be on the device, and not run.
COMPILE = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from rotaryquant.formats.weight import WeightFormat
from rotaryquant.ops import triton_weights as programs
from rotaryquant.ops.dequant_matmul import triton as products
from rotaryquant.ops.expert_matmul import Gate, triton as layers
from rotaryquant.ops.weights import PackedWeight, WeightCodec

TYPES = {torch.uint8: "u8", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
names = []

def compile_only(self, *args, grid, warmup, num_warps, num_stages=3):
    types, values, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(self.params, args)):
        if parameter.is_constexpr:
            types[parameter.name], values[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[parameter.name], attributes[i,] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            types[parameter.name] = "i32"
    made = triton.compile(
        ASTSource(self, types, values, attributes), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    assert made.asm["cubin"]
    if self.fn.__name__ == "multiply_tiles":  # what lookup.tile_ptx_of takes for granted
        assert "sizePerThread = [1, 1, 2], threadsPerWarp = [1, 8, 4]" in made.asm["ttgir"], made.asm["ttgir"]
    names.append(self.fn.__name__)

def weight(rows, width, bits, grid, *stack):
    form = WeightFormat(width, bits, grid, 32 if bits == 8 else 128, 1)
    codes = torch.zeros(*stack, rows, form.code_bytes, dtype=torch.uint8)
    scales = torch.zeros(*stack, rows, form.groups, dtype=torch.bfloat16)
    return PackedWeight(WeightCodec.from_format(form), codes, scales)

JITFunction.run = compile_only
bits, grid = int(sys.argv[1]), sys.argv[2]
for tokens, rows in ((1, 64), (1, 70000), (9, 8)):
    products.run(torch.zeros(tokens, 256, dtype=torch.bfloat16), weight(rows, 256, bits, grid))
stacks = weight(256, 256, bits, grid, 2), weight(256, 128, bits, grid, 2)
gate = Gate(lambda up: up[:, :128] * up[:, 128:], "silu")
if bits == 2:
    products.run(torch.zeros(2, 256), weight(64, 256, bits, grid))  # three digits
for tokens in (1, 2) if bits == 2 else ():
    index = torch.zeros(tokens, 2, dtype=torch.int64)
    layers.run(torch.zeros(tokens, 256, dtype=torch.bfloat16), index, torch.zeros(tokens, 2), *stacks, gate)
print(*sorted(set(names)))
"""


def started(code: str, *words: str, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **environment},
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout.strip()


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_programs_answer_as_the_reference(name: str) -> None:
    op, parts = INTERPRETED[name]
    found = started(INTERPRET, str(FOLDER), op, *parts, TRITON_INTERPRET="1")
    assert found.endswith("as the reference")
    assert int(found.split()[0]) >= len(parts)


@pytest.mark.parametrize(
    ("bits", "grid"), [(2, "trellis"), (3, "trellis"), (4, "trellis"), (4, "normal"), (8, "uniform")]
)
def test_programs_compile_for_a_gpu_that_is_not_here(bits: int, grid: str, tmp_path: Path) -> None:
    """What the interpreter lets pass the compiler may not; tensors lie in registers as the assembly wants them."""
    found = started(COMPILE, str(bits), grid, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    tiles = {"multiply_tiles"} if bits in (2, 4) else set()
    layers = {"combine", "plan"} if bits == 2 else set()
    assert set(found.split()) == {"multiply", "prepare", "unpack"} | tiles | layers


def weight(rows: int, width: int, bits: int, grid: str, *stack: int) -> PackedWeight:
    form = WeightFormat(width, bits, grid, 32 if bits == 8 else 128, 1)
    codes = torch.zeros(*stack, rows, form.code_bytes, dtype=torch.uint8)
    return PackedWeight(WeightCodec.from_format(form), codes, torch.zeros(*stack, rows, form.groups))


@pytest.mark.parametrize(
    ("shape", "bits", "grid", "digits", "tokens", "tiles", "rows"),
    [
        ((4096, 2048), 2, "trellis", 2, 1, 0, 4),  # small: few rows a block
        ((4096, 2048), 2, "trellis", 2, 4, 0, 2),
        ((2048, 4096), 4, "trellis", 2, 1, 0, 2),
        ((99_000, 128), 2, "trellis", 2, 1, 1, 4),  # tall: the tensor cores
        ((9000, 128), 2, "trellis", 2, 1, 0, 4),
        ((9000, 128), 2, "trellis", 2, 4, 1, 4),
        ((9000, 128), 2, "trellis", 2, 8, 0, 4),  # as tall as that for every four tokens
        ((99_000, 128), 4, "normal", 2, 1, 2, 4),
        ((99_000, 128), 4, "normal", 3, 1, 0, 4),  # fp32
        ((99_000, 128), 3, "trellis", 2, 1, 0, 4),
        ((99_000, 128), 8, "uniform", 2, 1, 0, 4),
    ],
)
def test_what_was_fastest_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int],
    bits: int,
    grid: str,
    digits: int,
    tokens: int,
    tiles: int,
    rows: int,
) -> None:
    monkeypatch.setattr(programs, "interpreted", lambda: False)
    tile = programs.tile_of(weight(*shape, bits, grid), digits, tokens)
    assert tile.tiles == tiles
    assert tiles or tile.rows == rows


@pytest.mark.parametrize(("bits", "tiles"), [(2, 1), (3, 0), (4, 1)])
def test_experts_meet_the_tensor_cores(monkeypatch: pytest.MonkeyPatch, bits: int, tiles: int) -> None:
    monkeypatch.setattr(programs, "interpreted", lambda: False)
    found = [programs.tile_of(weight(8, 256, bits, "trellis", 4), 2, tokens) for tokens in (1, 32)]
    assert [tile.tiles for tile in found] == [tiles, tiles]
    assert not tiles or [tile.unroll for tile in found] == [8, 1]


@pytest.mark.parametrize(
    ("interpreted", "dtype", "stride", "reason"),
    [
        (False, torch.float32, 1, "x is on the CPU"),
        (True, torch.float64, 1, "x is torch.float64"),
        (True, torch.float32, 2, "not contiguous"),
    ],
)
def test_what_the_kernel_cannot_take_it_says(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool, dtype: torch.dtype, stride: int, reason: str
) -> None:
    monkeypatch.setattr(programs, "interpreted", lambda: interpreted)
    monkeypatch.setattr(dispatch, "_missing", {("dequant_matmul", "triton"): None})
    whole = weight(8, 128, 2, "trellis")
    part = PackedWeight(whole.codec, whole.codes[::stride], whole.scales[::stride])
    with pytest.raises(UnsupportedKernelError, match=reason):
        dequant_matmul(torch.zeros(1, 128, dtype=dtype), part, kernel="triton")
