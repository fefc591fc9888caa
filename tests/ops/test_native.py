"""What is particular to the native CPU kernels: bounds, refusals, strides, threads, forks."""

import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import GuardedStream
from cases import packed_attention as attention_cases
from torch import Tensor

from rotaryquant.errors import UnsupportedKernelError
from rotaryquant.formats.kv import BLOCK, StreamFormat
from rotaryquant.ops import native
from rotaryquant.ops.append_packed import append_packed
from rotaryquant.ops.pack import pack
from rotaryquant.ops.packed_attention import packed_attention
from rotaryquant.ops.quantize import quantize
from rotaryquant.ops.rotate import build_rotation, rotate
from rotaryquant.ops.streams import CacheView, Codec, PackedStream

needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

KEY = StreamFormat("key", 64, 3, "score")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ---- a machine without the module ------------------------------------------------------------------------------


def test_missing_module_is_explained_with_the_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"libfoo.so.3 wanted by {name}")

    native._load.cache_clear()
    monkeypatch.setattr(importlib, "import_module", fail)
    try:
        reason = native.missing()
        assert reason is not None
        assert "libfoo.so.3 wanted by rotaryquant._native" in reason
        assert "reinstall" in reason
        assert "compiler" in reason
        with pytest.raises(ImportError, match=r"libfoo\.so\.3"):
            native.module()
    finally:
        native._load.cache_clear()


# ---- calls it leaves to other kernels --------------------------------------------------------------------------


@needs_native
def test_unsupported_calls_name_their_reason() -> None:
    rotation = build_rotation(KEY, 0, 1)
    x = torch.randn(1, 1, 2, 64)
    lossless = Codec.from_format(StreamFormat("key", 64, 32, "score"))
    for match, call in (
        ("x is on meta", lambda: rotate(x.to("meta"), rotation, kernel="cpu")),
        ("float64", lambda: rotate(x.double(), rotation, kernel="cpu")),
        ("not contiguous", lambda: rotate(torch.randn(1, 1, 64, 2).mT, rotation, kernel="cpu")),
        ("bits=32", lambda: quantize(x, lossless, kernel="cpu")),
        ("bits=32", lambda: pack(torch.zeros(2, 64, dtype=torch.int32), 32, kernel="cpu")),
        ("width=1032", lambda: pack(torch.zeros(2, 1032, dtype=torch.uint8), 3, kernel="cpu")),
    ):
        with pytest.raises(UnsupportedKernelError, match=match):
            call()


@needs_native
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("q_dtype", torch.bfloat16), ("q_dtype", torch.float32), ("p_dtype", torch.bfloat16), ("p_dtype", torch.int8)],
)
def test_rounded_queries_and_probabilities_go_to_another_kernel(name: str, dtype: torch.dtype) -> None:
    item = attention_cases.inputs("length 63", attention_cases.SPECS["length 63"])
    options = {**item.options, name: dtype}
    with pytest.raises(UnsupportedKernelError, match=name):
        packed_attention(item.q, item.view, kernel="cpu", **options)
    packed_attention(item.q, item.view, **options)


@needs_native
def test_slabs_of_other_layouts_go_to_another_kernel() -> None:
    stream = GuardedStream(KEY, 2, 1).stream
    wide = torch.zeros(*stream.codes[0].shape[:-1], 2 * 24, dtype=torch.uint8)
    for match, codes in (
        ("not adjacent", [wide[..., ::2]]),
        ("not adjacent", [torch.zeros(2, 1, 1, 24, dtype=torch.uint8).expand(2, 1, BLOCK, 24)]),
        ("different shapes, strides", [stream.codes[0], wide[..., :24]]),
        ("is on meta", [stream.codes[0].to("meta")]),
    ):
        reason = native.stream_reason("stream", dataclasses.replace(stream, codes=codes))
        assert reason is not None
        assert match in reason


# ---- what it answers -------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_input_is_located(dtype: torch.dtype, bad: float) -> None:
    x = torch.randn(3, 2, 140, 64).to(dtype)
    arguments = (build_rotation(KEY, 0, 2), GuardedStream(KEY, 6, 2).stream, torch.arange(6).int().view(3, 2))
    window = (int32(1, 1, 1), int32(139, 139, 139), int32(0, 0, 0))
    x[1, 1, 0, 5] = bad  # outside the rows that are written
    for kernel in ("cpu", "reference"):
        assert append_packed(x, *arguments, *window, kernel=kernel) == -1
    x[2, 0, 3, 63] = bad
    x[1, 1, 139, 0] = bad
    for kernel in ("cpu", "reference"):
        assert append_packed(x, *arguments, *window, kernel=kernel) == 3


@needs_native
def test_scales_that_their_type_cannot_hold_are_located_after_inputs() -> None:
    stream = StreamFormat("key", 64, 3, "score", scale_dtype="fp16")
    x = torch.randn(1, 3, 4, 64)
    x[0, 1] *= 1e9
    arguments = (build_rotation(stream, 0, 3), GuardedStream(stream, 1, 3).stream, int32(0)[None])
    rows = (int32(0), int32(4), int32(0))
    for kernel in ("cpu", "reference"):
        assert append_packed(x, *arguments, *rows, kernel=kernel) == 1
    x[0, 2, 3, 0] = torch.nan
    for kernel in ("cpu", "reference"):
        assert append_packed(x, *arguments, *rows, kernel=kernel) == 2


@needs_native
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("rule", ["score", "value", "norm"])
def test_non_finite_rows_quantize_to_non_finite_scales(bits: int, rule: str) -> None:
    codec = Codec.from_format(StreamFormat("key", 64, bits, rule))
    y = torch.randn(4, 64)
    y[0, 3], y[1, 3], y[2] = torch.nan, torch.inf, torch.nan
    finite = torch.isfinite(quantize(y, codec, kernel="cpu")[1].float())
    assert finite[:, 0].tolist() == [False, False, False, True]


@needs_native
def test_a_row_that_holds_nothing_gives_zeros() -> None:
    spec = attention_cases.Spec((0, 130), rows=2, group=2, sinks=4)
    item = attention_cases.inputs("nothing", spec)
    out = packed_attention(item.q, item.view, kernel="cpu", **item.options)
    assert not out[0].any()
    assert bool(out[1].any())


# ---- memory ----------------------------------------------------------------------------------------------------


def sparse(path: Path, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor over a sparse file: only the pages it touches exist."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    flat = torch.from_file(str(path), shared=True, size=size, dtype=dtype)
    return flat.as_strided(shape, strides)


@needs_native
def test_offsets_past_two_to_the_31_are_not_cut(tmp_path: Path) -> None:
    far = 2**31 + 64
    x = sparse(tmp_path / "x", (2, 1, 130, 64), (far, 130 * 64, 64, 1), torch.bfloat16)
    x.copy_(torch.randn(x.shape))
    rotation = build_rotation(KEY, 0, 1)
    assert torch.equal(rotate(x, rotation, kernel="cpu"), rotate(x.contiguous(), rotation, kernel="cpu"))

    codec = Codec.from_format(KEY)
    codes = sparse(tmp_path / "codes", (4, 1, BLOCK, 24), (far, BLOCK * 24, 24, 1), torch.uint8)
    scales = sparse(tmp_path / "scales", (4, 1, BLOCK, 1), (far, BLOCK, 1, 1), torch.bfloat16)
    wide = PackedStream(codec, 4, [codes], [scales])
    narrow = PackedStream(codec, 4, [torch.zeros(4, 1, BLOCK, 24).byte()], [torch.zeros(4, 1, BLOCK, 1).bfloat16()])
    table = int32(3, 1, 0, 2).view(2, 2)
    lens = int32(130, 129)
    for stream in (wide, narrow):
        assert append_packed(x, rotation, stream, table, int32(0, 0), lens, int32(0, 0), kernel="cpu") == -1
    assert torch.equal(codes.contiguous(), narrow.codes[0])
    assert torch.equal(scales.contiguous(), narrow.scales[0])

    q = torch.randn(2, 2, 1, 64)
    positions = torch.arange(130, 260).int().repeat(2, 1)
    far_out, out = (
        packed_attention(
            q,
            CacheView(stream, stream, table, lens, int32(260, 260), rotation, rotation, None, 0, rows, rows, positions),
            scale=0.1,
            causal=False,
            kernel="cpu",
        )
        for stream, rows in ((wide, x), (narrow, x.contiguous()))
    )
    assert torch.equal(far_out, out)


# ---- threads ---------------------------------------------------------------------------------------------------


@needs_native
def test_threads_change_no_code_and_hardly_a_sum(threads: Any) -> None:
    """Each share of a row's keys judges by its own sum how finely probabilities are rounded."""
    x = torch.randn(1, 2, 2500, 64)
    rotation = build_rotation(KEY, 0, 2)
    table = torch.arange(20, dtype=torch.int32)[None]
    lens = int32(2500)
    q = torch.randn(1, 2, 1, 64)
    results = []
    for count in (1, 2, 5):
        threads(count)
        stream = GuardedStream(KEY, 20, 2).stream
        assert append_packed(x, rotation, stream, table, int32(0), lens, int32(0), kernel="cpu") == -1
        view = CacheView(stream, stream, table, lens, lens, rotation, rotation)
        sinks = torch.zeros(2)
        out = packed_attention(q, view, scale=0.3, sink_logits=sinks, kernel="cpu")
        results.append((torch.stack(stream.codes), rotate(x, rotation, kernel="cpu"), out))
    for codes, rotated, out in results[1:]:
        assert torch.equal(codes, results[0][0])
        assert torch.equal(rotated, results[0][1])
        assert float((out - results[0][2]).abs().max()) < 5e-3 * float(results[0][2].abs().max())


@needs_native
def test_the_threads_of_torch_compute_what_ours_do(threads: Any) -> None:
    address = native._parallel_of_torch()
    if address is None:
        pytest.skip("torch runs on no libgomp here")
    x, rotation = torch.randn(1, 2, 4096, 64), build_rotation(KEY, 0, 2)
    threads(2)
    try:
        native.module().borrow_threads(0)
        ours = rotate(x, rotation, kernel="cpu")
        native.module().borrow_threads(address)
        assert torch.equal(rotate(x, rotation, kernel="cpu"), ours)
    finally:
        native.module().borrow_threads(address)


_FORK = """
import os, sys
from pathlib import Path
import torch
from rotaryquant.formats.kv import StreamFormat
from rotaryquant.ops.rotate import build_rotation, rotate

torch.set_num_threads(3)
rotation = build_rotation(StreamFormat("key", 64, 3, "score"), 0, 2)
x = torch.randn(1, 2, 5000, 64)
before = rotate(x, rotation, kernel="cpu").numpy().copy()
child = os.fork()
if child == 0:
    same = all((rotate(x, rotation, kernel="cpu").numpy() == before).all() for _ in range(3))
    tasks = Path("/proc/self/task")  # where there is one: the child must have started threads of its own
    alone = tasks.exists() and len(list(tasks.iterdir())) == 1
    os._exit(0 if same and not alone else 1)
status = os.waitpid(child, 0)[1]
after = rotate(x, rotation, kernel="cpu").numpy()
sys.exit(0 if status == 0 and (after == before).all() else 1)
"""


@needs_native
def test_a_forked_child_computes_and_both_processes_end() -> None:
    """Threads do not survive a fork; neither process may wait for them, at work or at exit."""
    done = subprocess.run([sys.executable, "-c", _FORK], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
