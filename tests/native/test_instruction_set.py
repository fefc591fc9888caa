"""RQ_CPU_ISA forces the instruction set of the native kernels, or says which there are."""

import json
from collections.abc import Callable, Iterator

import pytest
import torch

from rotaryquant.cli import doctor
from rotaryquant.cli.main import main
from rotaryquant.errors import ConfigError
from rotaryquant.ops import dispatch, native
from rotaryquant.ops.pack import pack

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

ISAS = native.instruction_sets()


@pytest.fixture
def choose() -> Iterator[Callable[[str | None], None]]:
    """Start over as a process with this RQ_CPU_ISA does."""
    with pytest.MonkeyPatch.context() as patch:

        def start(isa: str | None) -> None:
            patch.setenv("RQ_CPU_ISA", isa or "")
            native._load.cache_clear()
            dispatch._missing.clear()

        yield start
    native._load.cache_clear()
    native.missing()


@pytest.mark.parametrize("isa", [None, *ISAS])
def test_the_set_named_is_the_set_in_use(
    choose: Callable[[str | None], None], capsys: pytest.CaptureFixture[str], isa: str | None
) -> None:
    choose(isa)
    assert main(["kernels", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["instruction_set"]
    assert data == {"in_use": isa or ISAS[0], "available": ISAS, "forced": isa}
    assert main(["kernels"]) == 0
    reason = "the best here" if isa is None else f"RQ_CPU_ISA={isa}"
    line = f"cpu kernels use {isa or ISAS[0]} ({reason}); available: {', '.join(ISAS)}"
    assert line in capsys.readouterr().out.splitlines()


def test_a_set_that_is_not_here_is_one_clear_error(
    choose: Callable[[str | None], None], capsys: pytest.CaptureFixture[str]
) -> None:
    choose("v9")
    assert main(["kernels"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: RQ_CPU_ISA='v9' ")
    assert f": {', '.join(ISAS)};" in err
    assert err.count("\n") == 1


def test_every_use_of_an_op_says_so_until_it_is_mended(choose: Callable[[str | None], None]) -> None:
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    choose("v9")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"RQ_CPU_ISA='v9'"):
            pack(codes, 3)
    choose(ISAS[-1])
    pack(codes, 3)
    assert native.instruction_set() == ISAS[-1]


def test_doctor_shows_the_set_or_the_error(choose: Callable[[str | None], None]) -> None:
    choose(ISAS[-1])
    assert doctor._native() == doctor.Finding("native kernels", "ok", f"ready, instruction set {ISAS[-1]}")
    choose("v9")
    finding = doctor._native()
    assert finding.state == "fail"
    assert "RQ_CPU_ISA='v9'" in finding.found
