"""Who runs an op: the kernel named, or the first that can, and what is said about it."""

import logging
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import rotaryquant.ops
from rotaryquant import env
from rotaryquant.env import kernel_override
from rotaryquant.errors import UnsupportedKernelError
from rotaryquant.formats.kv import StreamFormat
from rotaryquant.ops import dispatch
from rotaryquant.ops.rotate import Rotation, build_rotation, rotate
from support.kernels import force_kernel

OPS_FOLDER = Path(rotaryquant.ops.__file__).parent


@pytest.fixture
def fresh_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "calls", Counter())
    monkeypatch.setattr(dispatch, "fallbacks", Counter())
    force_kernel(monkeypatch, None)


def install_first_kernel(
    monkeypatch: pytest.MonkeyPatch, *, missing: str | None = None, unsupported: str | None = None
) -> None:
    """Put a kernel that answers with 7s in the place of the first kernel of `rotate`."""
    first = dispatch.kernels_of("rotate")[0]
    module = ModuleType(first)
    module.missing = lambda: missing  # type: ignore[attr-defined]
    module.unsupported = lambda *args: unsupported  # type: ignore[attr-defined]
    module.run = lambda x, rotation, inverse: torch.full_like(x, 7.0)  # type: ignore[attr-defined]
    monkeypatch.setitem(dispatch._loaded, ("rotate", first), module)
    monkeypatch.setattr(dispatch, "_missing", {})


def call() -> tuple[Tensor, Rotation]:
    return torch.randn(1, 2, 3, 64), build_rotation(StreamFormat("key", 64, 3, "score"), 0, 2)


@pytest.mark.usefixtures("fresh_counts")
def test_first_kernel_that_can_runs_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    install_first_kernel(monkeypatch)
    x, rotation = call()
    assert bool((rotate(x, rotation) == 7.0).all())
    assert dispatch.calls == {("rotate", dispatch.kernels_of("rotate")[0]): 1}
    assert not dispatch.fallbacks


@pytest.mark.usefixtures("fresh_counts")
def test_named_kernel_that_cannot_take_the_call_raises_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install_first_kernel(monkeypatch, unsupported="x is purple")
    first = dispatch.kernels_of("rotate")[0]
    with pytest.raises(UnsupportedKernelError, match=rf"{first}.*rotate.*x is purple"):
        rotate(*call(), kernel=first)
    assert not dispatch.calls
    assert not dispatch.fallbacks


@pytest.mark.usefixtures("fresh_counts")
def test_named_kernel_that_this_machine_lacks_raises_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install_first_kernel(monkeypatch, missing="no such chip")
    with pytest.raises(UnsupportedKernelError, match="no such chip"):
        rotate(*call(), kernel=dispatch.kernels_of("rotate")[0])


@pytest.mark.usefixtures("fresh_counts")
def test_automatic_choice_falls_back_counts_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_first_kernel(monkeypatch, unsupported="x is purple")
    first, second = dispatch.kernels_of("rotate")[:2]
    monkeypatch.setitem(dispatch._missing, ("rotate", second), None)
    x, rotation = call()
    with caplog.at_level(logging.WARNING, logger="rotaryquant.ops.dispatch"):
        for _ in range(3):
            assert not bool((rotate(x, rotation) == 7.0).any())
    assert dispatch.fallbacks == {("rotate", first): 3}
    assert dispatch.calls["rotate", first] == 0
    assert sum(dispatch.calls.values()) == 3
    assert [record.message.count("x is purple") for record in caplog.records] == [1]


@pytest.mark.usefixtures("fresh_counts")
def test_a_kernel_that_this_machine_lacks_is_passed_over_silently(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_first_kernel(monkeypatch, missing="no such chip")
    rotate(*call())
    assert not dispatch.fallbacks
    assert not caplog.records


@pytest.mark.usefixtures("fresh_counts")
def test_no_kernel_at_all_raises_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    names = dispatch.kernels_of("rotate")
    monkeypatch.setattr(dispatch, "_missing", {("rotate", name): f"{name} is away" for name in names})
    with pytest.raises(UnsupportedKernelError, match=".*".join(f"{name} is away" for name in names)):
        rotate(*call())


@pytest.mark.usefixtures("fresh_counts")
def test_environment_names_the_kernel_for_automatic_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    install_first_kernel(monkeypatch)
    monkeypatch.setattr(env, "kernel_override", kernel_override.__wrapped__)  # as a process that starts now reads it
    monkeypatch.setenv("RQ_KERNEL", "reference")
    x, rotation = call()
    assert not bool((rotate(x, rotation) == 7.0).any())
    assert bool((rotate(x, rotation, kernel=dispatch.kernels_of("rotate")[0]) == 7.0).all())


@pytest.mark.parametrize("op", dispatch.OPS)
def test_unknown_kernel_name_is_a_value_error_that_lists_the_known(op: str) -> None:
    with pytest.raises(ValueError, match=r"cudaa.*reference") as caught:
        dispatch.run(op, "cudaa")
    assert not isinstance(caught.value, UnsupportedKernelError)


@pytest.mark.parametrize("op", dispatch.OPS)
def test_kernels_are_exactly_the_files_beside_the_op(op: str) -> None:
    files = {path.stem for path in (OPS_FOLDER / op).glob("*.py")} - {"__init__"}
    names = dispatch.kernels_of(op)
    assert set(names) == files
    assert len(names) == len(files)
    assert names[-1] == "reference", "the reference is the last resort"


def test_every_op_folder_is_listed() -> None:
    folders = {path.parent.name for path in OPS_FOLDER.glob("*/__init__.py")}
    assert folders == set(dispatch.OPS)


def test_explain_has_one_row_per_kernel_of_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    install_first_kernel(monkeypatch, missing="no such chip")
    rows = dispatch.explain()
    assert [row[:2] for row in rows] == [(op, name) for op in dispatch.OPS for name in dispatch.kernels_of(op)]
    assert ("rotate", dispatch.kernels_of("rotate")[0], "no such chip") in rows
    assert ("rotate", "reference", "ready") in rows
