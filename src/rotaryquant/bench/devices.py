"""Times on any device: of the CPU by its clocks, of a GPU by events around replayed graphs, always on cold weights."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch

from rotaryquant.bench import options, roofs
from rotaryquant.bench.table import benchmark_data, common_lines, plural
from rotaryquant.bench.timing import clock_for, interleaved
from rotaryquant.errors import ConfigError

DEVICES = ("cpu", "cuda")

#: Bytes of weights that calls go round: several times what any cache of the device holds.
COLD_BYTES = 320 << 20

#: Copies of one matrix at most.
_MOST_COPIES = 64

#: Calls that a graph holds at least, so that one replay lasts far longer than its launch.
_GRAPH_CALLS = 24

#: Words that each program of the roof reads at a time, blocks in flight, and programs a multiprocessor.
_READ, _IN_FLIGHT, _PROGRAMS = 1024, 8, 8
_ROOF_BYTES = 1 << 30

Calls = Sequence[Callable[[], object]]


def check(device: str) -> None:
    """Raise ConfigError for a device that is not known or not here."""
    options.check_device(device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' cannot be measured: there is no CUDA device here")


def copies(nbytes: int) -> int:
    """How many matrices of so many bytes calls go round."""
    return min(_MOST_COPIES, max(1, -(-COLD_BYTES // nbytes)))


def samples(calls: Mapping[str, Calls], rounds: int, device: str, threads: int) -> dict[str, list[float]]:
    """Seconds a call of each alternative, one sample a round, in turns. calls: the same on one copy after the other."""
    if device == "cuda":
        return _replayed(calls, rounds)

    def around(each: Calls) -> Callable[[], object]:
        turns = cycle(each)
        return lambda: next(turns)()

    return interleaved({name: around(each) for name, each in calls.items()}, rounds, clock_for(threads))


def _replayed(calls: Mapping[str, Calls], rounds: int) -> dict[str, list[float]]:
    graphs = {name: _captured(each) for name, each in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls) if number % 2 == 0 else reversed(list(calls)):
            graph, count = graphs[name]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) / 1e3 / count)
    return found


def _captured(each: Calls) -> tuple[Any, int]:
    """A graph of calls, at least `_GRAPH_CALLS`, replayed twice already; and their number."""
    wanted = list(each) * -(-_GRAPH_CALLS // len(each))
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in each[:2]:  # compiles what is to be compiled, outside of the graph
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in wanted:
            call()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return graph, len(wanted)


def measure_roof(device: str, threads: int) -> float | None:
    """10⁹ bytes/s read from memory; None where nothing can measure it."""
    if device == "cpu":
        return found.gbps if (found := roofs.measure_roofs([threads]).get(threads)) else None
    read = importlib.import_module("rotaryquant.native.triton.stream").read
    programs = _PROGRAMS * torch.cuda.get_device_properties(0).multi_processor_count
    steps = max(1, _ROOF_BYTES // (4 * programs * _READ * _IN_FLIGHT))
    words = steps * programs * _READ * _IN_FLIGHT
    data = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device=device)
    out = torch.empty(programs * _READ, dtype=torch.int32, device=device)
    times = _replayed({"read": [lambda: read[(programs,)](data, out, steps, _READ, _IN_FLIGHT, num_warps=8)]}, 5)[
        "read"
    ]
    return 4 * words / min(times) / 1e9


def data_of(
    device: str, top: Mapping[int, float | None], rows: list[dict[str, Any]], rounds: int, **fields: Any
) -> dict[str, Any]:
    """The JSON object. top: roofs by number of threads; a GPU has one, under 0."""
    data = benchmark_data(device, {}, rows, rounds, **fields)
    known = {str(threads): gbps for threads, gbps in top.items() if gbps is not None}
    return data | {"roof_gbps": known or None, "roof_missing": None if known else data["roof_missing"]}


def lines_of(data: dict[str, Any], device: str) -> list[str]:
    """What the table does not show: how it was timed, roofs, and peers that were not tried."""
    lines = common_lines(data | {"roof_gbps": None, "roof_missing": ""})
    lines = [line for line in lines if not line.startswith("roofs were not measured")]
    if device == "cuda":
        lines[0] = f"medians of {plural(data['rounds'], 'round')} of replayed graphs in turns; ratio is peer over ours"
    for threads, gbps in (data["roof_gbps"] or {}).items():
        lines.insert(
            1,
            f"roof{'' if threads == '0' else ', ' + plural(int(threads), 'thread')}: {gbps:,.0f} GB/s read from memory",
        )
    return lines
