"""The kernels of every instruction set of this machine under AddressSanitizer and UndefinedBehaviorSanitizer.

Each array of a call lies in memory of exactly its size, so that reading one byte beside it ends the test.
"""

import platform
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grid
import pytest
import torch
from cases import Case, packed_attention
from remote import Remote, build, find, in_use, missing

ISAS = ["dotprod", "base"] if platform.machine() in ("aarch64", "arm64") else ["v4", "v3vnni", "v3", "v2", "base"]

#: A null pointer ends the program anyway; to check for it takes a third of the compiler's time.
FLAGS = "-O0 -g1 -fsanitize=address,undefined -fno-sanitize=null -fno-sanitize-recover=all"

#: To look for leaks takes ptrace, which containers seldom allow.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


@cache
def unavailable(folder: Path) -> str | None:
    """Why programs with sanitizers cannot be built or run here, or None."""
    if reason := missing("cmake", "c++"):
        return reason
    source, program = folder / "probe.cpp", folder / "probe"
    source.write_text("int main() { return 0; }\n")
    for words in ([str(find("c++")), *FLAGS.split(), str(source), "-o", str(program)], [str(program)]):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"no sanitizers here: {done.stderr.strip().splitlines()[-1:]}"
    return None


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    if reason := unavailable(tmp_path_factory.mktemp("sanitizers")):
        pytest.skip(reason)
    remote = Remote(build("sanitizers", "-DCMAKE_CXX_COMPILER=c++", f"-DCMAKE_CXX_FLAGS={FLAGS}"), **OPTIONS)
    with pytest.MonkeyPatch.context() as patch, in_use(remote):
        patch.delenv("RQ_CPU_ISA", raising=False)
        yield remote


@pytest.mark.parametrize(("op", "case"), grid.parameters())
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_stay_within_memory_and_the_language(remote: Remote, isa: str, op: str, case: Case) -> None:
    if isa not in remote.instruction_sets():
        pytest.skip(f"this processor has no {isa}")
    remote.use_instruction_set(isa)
    case.compare(case.run("cpu"), grid.expected(case))


@pytest.mark.parametrize("isa", ISAS)
def test_shares_of_several_threads_stay_within_memory(remote: Remote, isa: str) -> None:
    """One row's keys are long enough to be cut among threads."""
    if isa not in remote.instruction_sets():
        pytest.skip(f"this processor has no {isa}")
    remote.use_instruction_set(isa)
    spec = packed_attention.Spec((2100,), kv_heads=2, group=2, tail=9, sinks=4, q_scale=3.0)
    case = grid.attention("threads", spec)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        case.compare(case.run("cpu"), grid.expected(case))
    finally:
        torch.set_num_threads(threads)
