"""Every kernel of every op against the op's reference, on every instruction set of this machine."""

import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from cases import Case

from rotaryquant.ops import dispatch, native


def _instruction_sets() -> list[str]:
    return list(native.module().instruction_sets()) if native.missing() is None else ["none"]


def _variants(op: str) -> list[tuple[str, str]]:
    """Kernels under test with their instruction sets: the native CPU kernels come once per set."""
    kernels = [name for name in dispatch.kernels_of(op) if name != "reference"]
    return [(name, variant) for name in kernels for variant in (_instruction_sets() if name == "cpu" else ["-"])]


def _parameters() -> list[Any]:
    return [
        pytest.param(op, kernel, variant, case, id=f"{op}-{kernel}-{variant}-{case.name}")
        for op in dispatch.OPS
        for kernel, variant in _variants(op)
        for case in importlib.import_module(f"cases.{op}").CASES
    ]


@cache
def _expected(op: str, case: Case) -> Any:
    return case.run("reference")


@pytest.fixture
def _restore_instruction_set() -> Iterator[None]:
    yield
    if native.missing() is None:
        native.module().use_instruction_set(_instruction_sets()[0])


@pytest.mark.usefixtures("_restore_instruction_set")
@pytest.mark.parametrize(("op", "kernel", "variant", "case"), _parameters())
def test_kernel_matches_reference(op: str, kernel: str, variant: str, case: Case) -> None:
    if reason := dispatch.missing(op, kernel):
        pytest.skip(f"kernel {kernel} not tried: {reason}")
    if kernel == "cpu":
        native.module().use_instruction_set(variant)
    case.compare(case.run(kernel), _expected(op, case))
