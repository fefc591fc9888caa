"""Rows as JSON objects and as cells: what every benchmark prints alike."""

from collections.abc import Sequence
from typing import Any

from rotaryquant.bench import roofs
from rotaryquant.bench.roofs import Roofs
from rotaryquant.bench.timing import estimate, interval_ranks, ratio
from rotaryquant.measuring import provenance


def benchmark_data(
    device: str, top: dict[int, Roofs], rows: list[dict[str, Any]], rounds: int, **fields: Any
) -> dict[str, Any]:
    """The JSON object of a benchmark. top: roofs by number of threads. fields: what else belongs at its top.

    `interval` says what `_low` and `_high` of the rows are; `roof_gbps` and `roof_gmadds` are null where no compiled
    kernels can measure them.
    """
    return {
        **provenance(device),
        **fields,
        "rounds": rounds,
        "interval": interval_name(rounds),
        "roof_gbps": {str(number): found.gbps for number, found in top.items()} or None,
        "roof_gmadds": {str(number): found.gmadds for number, found in top.items()} or None,
        "roof_missing": roofs.missing(),
        "rows": rows,
    }


def interval_name(rounds: int) -> str:
    """What an interval over `rounds` samples is worth, for a table's header."""
    _, _, coverage = interval_ranks(rounds)
    return "95% interval" if coverage >= 0.95 else f"{max(0.0, coverage):.0%} interval"


def peer_fields(name: str, times: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """One peer of a row. times, ours: seconds of the same rounds."""
    return {"peer": name, **estimate(times).scaled(1e6).fields("us"), **ratio(times, ours).fields("ratio")}


def common_lines(data: dict[str, Any]) -> list[str]:
    """What a table does not show, in words: clocks, roofs, and the peers that were not tried with the reason."""
    clocks = {row["threads"]: row["clock"] for row in data["rows"]}
    named = ", ".join(f"{plural(threads, 'thread')}: {clock}" for threads, clock in clocks.items())
    lines = [f"medians of {plural(data['rounds'], 'interleaved round')}, {named}; ratio is peer over ours"]
    if data["roof_gbps"] is None:
        lines.append(f"roofs were not measured: {data['roof_missing']}")
    else:
        lines += [
            f"roofs, {plural(int(number), 'thread')}: {rate:.1f} GB/s streamed, "
            f"{data['roof_gmadds'][number]:.0f} G multiply-adds/s in int8"
            for number, rate in data["roof_gbps"].items()
        ]
    reasons: dict[str, list[str]] = {}
    for row in data["rows"]:
        for peer in row["not_tried"]:
            names = reasons.setdefault(peer["reason"], [])
            names += [peer["peer"]] if peer["peer"] not in names else []
    return lines + [f"not tried: {', '.join(names)} ({reason})" for reason, names in reasons.items()]


def span(row: dict[str, Any], name: str) -> str:
    """The interval of a field as a cell."""
    return f"{row[f'{name}_low']:.2f}..{row[f'{name}_high']:.2f}"


def micro(microseconds: float) -> str:
    """Microseconds as a cell, three digits or more."""
    digits = 0 if microseconds >= 100 else 1 if microseconds >= 10 else 2
    return f"{microseconds:,.{digits}f}"


def plural(count: int, noun: str) -> str:
    """A number with its noun: 1 thread, 2 threads."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
