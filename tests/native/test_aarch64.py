"""The kernels compiled for 64-bit ARM, base and with dot products, on a simulated processor against the references."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import grid
import pytest
from cases import Case
from remote import Remote, build, find, in_use, missing

COMPILER, SIMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

REASON = missing("cmake", COMPILER, SIMULATOR)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def driver() -> Path:
    return build(
        "aarch64",
        f"-DCMAKE_CXX_COMPILER={COMPILER}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
        "-DCMAKE_CXX_FLAGS=-O1",
    )


@pytest.fixture(scope="module")
def remote(driver: Path) -> Iterator[Remote]:
    with pytest.MonkeyPatch.context() as patch, in_use(Remote(str(find(SIMULATOR)), driver)) as remote:
        patch.delenv("RQ_CPU_ISA", raising=False)
        yield remote


@pytest.mark.parametrize(("processor", "names"), [("cortex-a53", ["base"]), ("cortex-a76", ["dotprod", "base"])])
def test_dot_products_are_used_where_the_processor_has_them(driver: Path, processor: str, names: list[str]) -> None:
    words = [str(find(SIMULATOR)), "-cpu", processor, str(driver), "isas"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.split() == names


@pytest.mark.parametrize(("op", "case"), grid.parameters())
@pytest.mark.parametrize("isa", ["dotprod", "base"])
def test_aarch64_matches_reference(remote: Remote, isa: str, op: str, case: Case) -> None:
    remote.use_instruction_set(isa)
    case.compare(case.run("cpu"), grid.expected(case))
