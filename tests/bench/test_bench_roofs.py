"""Roofs: what they count, that they are refused for nonsense, and that every instruction set has them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rotaryquant.bench import roofs
from rotaryquant.ops import native

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.fixture(params=[] if native.missing() is not None else native.module().instruction_sets())
def module(request: pytest.FixtureRequest) -> Iterator[Any]:
    found = native.module()
    best = found.instruction_set()
    found.use_instruction_set(request.param)
    assert found.instruction_set() == request.param
    yield found
    found.use_instruction_set(best)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_amounts_are_those_of_the_work(module: Any, threads: int) -> None:
    data = torch.arange(200_704).to(torch.uint8)
    assert module.roof("stream", data, 3, threads) == 3 * 200_704
    once = module.roof("dot", data[:4096], 1, 1)
    assert once in (4 * 4096, 8 * 4096)  # every byte by each of four or eight others
    assert module.roof("dot", data[:4096], 12, threads) == 12 * once


def test_nonsense_is_refused(module: Any) -> None:
    data = torch.zeros(1024, dtype=torch.uint8)
    for words, message in (
        (("lift", data, 1, 1), "kind=lift is unknown"),
        (("stream", torch.zeros(1024), 1, 1), "dtype"),
        (("stream", torch.zeros(2, 512, dtype=torch.uint8), 1, 1), "must be"),
        (("stream", torch.zeros(513, dtype=torch.uint8), 1, 1), "multiple of 512"),
        (("dot", data, 0, 1), "rounds"),
        (("dot", data, 1, 0), "threads"),
    ):
        with pytest.raises(ValueError, match=message):
            module.roof(*words)


def test_rates_are_positive_for_each_number_of_threads() -> None:
    found = roofs.measure_roofs([1, 2])
    assert list(found) == [1, 2]
    assert all(rate > 0 for one in found.values() for rate in (one.gbps, one.gmadds))


def test_rates_are_amounts_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofs, "interleaved", lambda calls, rounds, clock: {name: [0.5] * rounds for name in calls})
    found = roofs.measure_roofs([1])[1]
    assert found.gbps == pytest.approx(2 * roofs.STREAM_BYTES / 1e9)
    assert found.gmadds == pytest.approx(2 * roofs.dot_work(1).amount / 1e9)


def test_a_machine_without_compiled_kernels_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofs, "missing", lambda: "no compiler")
    assert roofs.measure_roofs([1]) == {}


@pytest.mark.parametrize(("nbytes", "read"), [(0, 512), (100, 512), (512, 512), (513, 1024)])
def test_a_read_counts_what_it_reads(nbytes: int, read: int) -> None:
    work = roofs.stream_work(nbytes, 1)
    assert work.amount == work.call() == read
