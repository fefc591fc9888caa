"""The native module in a process of its own: compiled with sanitizers, or for a processor that is simulated.

`build` compiles driver.cpp and the kernels; `Remote` stands in for `rotaryquant._native` and hands each call, with the
contents of its arrays, to that program.
"""

import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from rotaryquant.ops import dispatch, native
from support.assets import REPOSITORY

_PATIENCE_S = 600
_DTYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.uint8: "u8",
    torch.bool: "u8",
    torch.int32: "i32",
}


def find(program: str) -> str | None:
    """Path of a program, those beside this interpreter first."""
    return shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)


def missing(*programs: str) -> str | None:
    """The first program that is not installed, as a reason to skip, or None."""
    absent = [program for program in programs if find(program) is None]
    return f"{absent[0]} is not installed" if absent else None


def build(name: str, *settings: str) -> Path:
    """The driver, compiled with these CMake settings in build/driver-NAME; what is up to date there is kept."""
    folder = REPOSITORY / "build" / f"driver-{name}"
    cmake, generator = find("cmake"), ["-G", "Ninja"] if find("ninja") else []
    assert cmake is not None
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # test processes may share the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build(cmake, folder, generator, settings)
    return folder / "driver"


def _build(cmake: str, folder: Path, generator: list[str], settings: tuple[str, ...]) -> None:
    for words in (
        ["-S", str(REPOSITORY), "-B", str(folder), *generator, "-DRQ_DRIVER=ON", "-DCMAKE_BUILD_TYPE=None", *settings],
        ["--build", str(folder), "--parallel", str(os.cpu_count() or 1)],
    ):
        done = subprocess.run([cmake, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# ---- what calls are made of ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Object:
    fields: dict[str, Any]


@dataclass(frozen=True)
class Copy:
    """An object whose arrays were read when it was made."""

    encoded: bytes


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def _array(tensor: Tensor) -> bytes:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (1 + last) * tensor.element_size() if tensor.numel() else 0  # from the first element to the last
    numbers = (*tensor.shape, *tensor.stride())
    head = struct.pack("<Q", tensor.data_ptr()) + _text(_DTYPES[tensor.dtype])
    head += struct.pack(f"<I{len(numbers)}qQ", tensor.dim(), *numbers, nbytes)
    return head + ctypes.string_at(tensor.data_ptr(), nbytes)


def encode(value: Any) -> bytes:
    """The bytes that driver.cpp reads as a `Field`."""
    match value:
        case None:
            return b"n"
        case bool() | int():
            return b"i" + struct.pack("<q", value)
        case float():
            return b"d" + struct.pack("<d", value)
        case str():
            return b"s" + _text(value)
        case Tensor():
            return b"a" + _array(value)
        case list():
            return b"l" + struct.pack("<I", len(value)) + b"".join(map(_array, value))
        case Copy():
            return value.encoded
        case Object():
            return b"o" + _fields(value.fields)
    raise TypeError(f"{value!r} has no encoding")


def _fields(fields: dict[str, Any]) -> bytes:
    return struct.pack("<I", len(fields)) + b"".join(_text(name) + encode(value) for name, value in fields.items())


# ---- the stand-in ----------------------------------------------------------------------------------------------


class Remote:
    """`rotaryquant._native`, computed by `command` (the driver, or a simulator and the driver)."""

    def __init__(self, *command: str | Path, **environment: str) -> None:
        self._command = [str(word) for word in command]
        self._environment = {**os.environ, **environment}
        done = subprocess.run([*self._command, "isas"], capture_output=True, text=True, check=True, timeout=_PATIENCE_S)
        self._isas = done.stdout.split()
        self._isa = self._isas[0]
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - what the program says, until we are gone

    def instruction_sets(self) -> list[str]:
        return self._isas

    def instruction_set(self) -> str:
        return self._isa

    def use_instruction_set(self, name: str) -> None:
        if name != self._isa:
            self.close()
        self._isa = name

    def Rotation(self, **fields: Any) -> Copy:
        return Copy(encode(Object(fields)))

    def codec(self, **fields: Any) -> Copy:
        return Copy(encode(Object(fields)))

    def Stream(self, **fields: Any) -> Object:
        return Object(fields)

    def View(self, **fields: Any) -> Object:
        return Object(fields)  # read at each call: lengths are written between them

    def Weight(self, **fields: Any) -> Object:
        return Object(fields)

    def weight(self, weight: Object, x: Tensor | None, out: Tensor, matrix: int, begin: int, threads: int) -> None:
        numbers = {"matrix": matrix, "begin": begin, "threads": threads}
        self._call("weight", {"weight": weight, "x": x, "out": out, **numbers})

    def Plan(self, **fields: Any) -> Object:
        return Object(fields)

    def stage(self, keys: Tensor, values: Tensor, held_keys: Tensor, held_values: Tensor, *rest: int) -> None:
        arrays = {"keys": keys, "values": values, "held_keys": held_keys, "held_values": held_values}
        self._call("stage", {**arrays, **dict(zip(("slot", "threads"), rest, strict=True))})

    def attention(self, q: Tensor, plan: Object, mask: Tensor | None, out: Tensor, threads: int) -> None:
        self._call("attention", {"q": q, "plan": plan, "mask": mask, "out": out, "threads": threads})

    def read_tensors(self, kind: type) -> None:
        """Tensors are all that is read here."""

    def borrow_threads(self, address: int) -> None:
        """The program has threads of its own."""

    def __getattr__(self, op: str) -> Any:
        if op.startswith("_"):
            raise AttributeError(op)
        return lambda **fields: self._call(op, fields)

    def close(self) -> None:
        """End the program; fails where it did not end well."""
        if self._process is None:
            return
        process, self._process = self._process, None
        _, _ = process.communicate(timeout=_PATIENCE_S)
        assert process.returncode == 0, self._said()

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _start(self) -> subprocess.Popen[bytes]:
        self._errors.seek(0)
        self._errors.truncate()
        return subprocess.Popen(
            [*self._command, "serve", self._isa],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=self._environment,
        )  # fmt: skip

    def _call(self, op: str, fields: dict[str, Any]) -> int:
        if self._process is None:
            self._process = self._start()
        try:
            return self._exchange(self._process, _text(op) + _fields(fields))
        except (BrokenPipeError, EOFError):
            self._process.kill()
            self._process.communicate()
            self._process = None
            raise AssertionError(f"{op} ended {self._command} {self._isa}:\n{self._said()}") from None

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], call: bytes) -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        stdout = process.stdout

        def read(size: int) -> bytes:
            data = stdout.read(size)
            if len(data) < size:
                raise EOFError
            return data

        process.stdin.write(call)
        process.stdin.flush()
        if not select.select([stdout], [], [], _PATIENCE_S)[0]:
            raise EOFError
        if read(1) != b"\0":
            raise ValueError(read(struct.unpack("<I", read(4))[0]).decode())
        result, count = struct.unpack("<qI", read(12))
        for _ in range(count):
            address, nbytes = struct.unpack("<QQ", read(16))
            ctypes.memmove(address, read(nbytes), nbytes)
        return int(result)


def _forget() -> None:
    """Drop everything that was kept from another native module."""
    for kept in vars(native).values():
        if hasattr(kept, "cache_clear"):
            kept.cache_clear()
    native._streams.clear()
    native._views.clear()
    dispatch._missing.clear()


@contextmanager
def in_use(remote: Remote) -> Iterator[Remote]:
    """Every op's cpu kernel computes with `remote` until the block ends."""
    before = sys.modules.get("rotaryquant._native")
    sys.modules["rotaryquant._native"] = remote  # type: ignore[assignment]
    _forget()
    try:
        yield remote
        remote.close()
    finally:
        del sys.modules["rotaryquant._native"]
        if before is not None:
            sys.modules["rotaryquant._native"] = before
        _forget()
