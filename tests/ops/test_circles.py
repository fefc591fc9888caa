"""The Triton search for circles against the reference: on a CUDA device, or else in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rotaryquant.errors import UnsupportedKernelError
from rotaryquant.formats.codebook import CYCLE, FINE, TRELLISES
from rotaryquant.ops import dispatch
from rotaryquant.ops.circles import best_circles

SPREADS = (0, 3, 160, 400, 100_000)  # many ties, ordinary rows, far outside the levels
CASES = [(bits, spread) for bits in sorted(TRELLISES) for spread in SPREADS]

# Triton's functions are interpreted only where the variable was set before it was imported.
INTERPRETED = """
import sys
from safetensors.torch import load_file, save_file
from rotaryquant.ops.circles import best_circles
cases = load_file(sys.argv[1])
names = [name.removesuffix(".x") for name in cases if name.endswith(".x")]
found = {name: best_circles(cases[f"{name}.x"], cases[f"{name}.levels"], kernel="triton") for name in names}
save_file(found, sys.argv[2])
"""

COMPILED = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rotaryquant.formats.codebook import CYCLE
from rotaryquant.native.triton.circles import search
classes, codes = map(int, sys.argv[1:])
pointers = dict.fromkeys(("x_ptr", "levels_ptr", "codes_ptr"), "*i64")
sizes = {"CLASSES": classes, "CODES": codes, "CLASS_BITS": classes.bit_length() - 1, "COLUMNS": CYCLE, "BLOCK": 4}
source = ASTSource(search, {**pointers, "circles": "i32", **dict.fromkeys(sizes, "constexpr")}, sizes)
made = compile(source, target=GPUTarget("cuda", 90, 32))
print("compiled" if made.asm["cubin"] else "nothing")
"""


def levels_of(bits: int) -> Tensor:
    trellis = TRELLISES[bits]
    return FINE * torch.tensor(trellis.levels).view(trellis.classes, -1)


def squared_error(x: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
    return (x - levels[codes.roll(1, -1) % len(levels), codes]).square().sum(-1)


def name_of(bits: int, spread: int) -> str:
    return f"{bits} bits, spread {spread}"


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name_of(bits, spread): (torch.randn(37, CYCLE, generator=generator) * spread).round().long()
        for bits, spread in CASES
    } | {"none": torch.empty(0, CYCLE, dtype=torch.int64)}


@pytest.fixture(scope="module")
def found(inputs: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What the Triton kernel answers to each of the inputs."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    levels = {name: levels_of(3 if name == "none" else int(name[0])) for name in inputs}
    if torch.cuda.is_available():
        return {name: best_circles(x.cuda(), levels[name].cuda(), kernel="triton").cpu() for name, x in inputs.items()}
    folder: Path = tmp_path_factory.mktemp("circles")
    tensors = {f"{name}.x": x for name, x in inputs.items()} | {f"{name}.levels": x for name, x in levels.items()}
    save_file(tensors, folder / "in.safetensors")
    subprocess.run(
        [sys.executable, "-c", INTERPRETED, folder / "in.safetensors", folder / "out.safetensors"],
        check=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    return load_file(folder / "out.safetensors")


@pytest.mark.parametrize(("bits", "spread"), CASES)
def test_triton_finds_the_circles_of_the_reference(
    inputs: dict[str, Tensor], found: dict[str, Tensor], bits: int, spread: int
) -> None:
    name = name_of(bits, spread)
    assert torch.equal(found[name], best_circles(inputs[name], levels_of(bits), kernel="reference"))


def test_no_circle_is_an_empty_answer(found: dict[str, Tensor]) -> None:
    assert found["none"].shape == (0, CYCLE)
    none = best_circles(torch.empty(0, CYCLE, dtype=torch.int64), levels_of(3), kernel="reference")
    assert none.shape == (0, CYCLE)


def test_no_path_through_two_columns_is_better() -> None:
    """Any two neighbouring codes changed, and the circle errs at least as much."""
    levels = levels_of(3)
    x = (torch.randn(5, CYCLE) * 160).round().long()
    codes = best_circles(x, levels, kernel="reference")
    least = squared_error(x, codes, levels)
    for column, (a, b) in product(range(CYCLE), product(range(8), range(8))):
        other = codes.clone()
        other[:, column], other[:, (column + 1) % CYCLE] = a, b
        assert bool((squared_error(x, other, levels) >= least).all())


@pytest.mark.parametrize("bits", sorted(TRELLISES))
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(bits: int, tmp_path: Path) -> None:
    """What the interpreter lets pass the compiler may not."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    ran = subprocess.run(
        [sys.executable, "-c", COMPILED, str(TRELLISES[bits].classes), str(1 << bits)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "compiled"


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 8\); circles are \[circles, 16\]"):
        best_circles(torch.zeros(3, 8, dtype=torch.int64), levels_of(3))


@pytest.mark.parametrize(
    ("interpreted", "classes", "reason"), [(False, 8, "x is on the CPU"), (True, 16, "16 classes of 16 codes")]
)
def test_what_the_kernel_cannot_take_it_says(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool, classes: int, reason: str
) -> None:
    monkeypatch.setattr(pytest.importorskip("triton").knobs.runtime, "interpret", interpreted)
    monkeypatch.setattr(dispatch, "_missing", {("circles", "triton"): None})
    with pytest.raises(UnsupportedKernelError, match=reason):
        best_circles(torch.zeros(1, CYCLE, dtype=torch.int64), torch.zeros(classes, classes).long(), kernel="triton")
