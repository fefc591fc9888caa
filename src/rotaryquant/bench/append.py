"""Packing keys and values into the cache: what a token costs under each rotation, a strip at a time and in bulk.

Times are those of one appended token, its keys and its values, all KV heads. The peer of a row is the same write with
a dense rotation; a copy of the exact rows, which is what a cache without codes does, is timed beside it.
"""

import argparse
import dataclasses
from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from rotaryquant.bench import options, roofs
from rotaryquant.bench.checks import CHECK_TOKENS, kernel_of, require_close
from rotaryquant.bench.context import all_packed, random_rows
from rotaryquant.bench.options import Shape
from rotaryquant.bench.table import benchmark_data, common_lines, micro, peer_fields, plural, span
from rotaryquant.bench.timing import Estimate, clock_for, estimate, interleaved, ratio, torch_threads
from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.formats.kv import BLOCK, StreamFormat
from rotaryquant.formats.rotation import KINDS, hadamard_factors
from rotaryquant.kv.store import StreamStore
from rotaryquant.kv.tail import TAIL_STEP
from rotaryquant.measuring import Outcome, Progress
from rotaryquant.ops.append_packed import append_packed

#: Rows of one write: what a tail packs at a time while tokens are decoded, and a prompt in bulk.
ROWS = {"decode": TAIL_STEP, "bulk": 2048}

#: Positions that writes go round.
_POSITIONS = 2048

_PEER, _COPY = "dense", "copy of bf16 rows"


def madds_per_row(rotation: str, width: int) -> int:
    """Multiply-adds that rotate one row of `width` values.

    A butterfly of the Hadamard matrix is one addition per value and counts as much; a Paley base of order n takes n
    per value. SO(4) blocks take 4 per value, a dense matrix `width`. Changes of sign are not counted.
    """
    if rotation == "dense":
        return width * width
    uses_hadamard, blocks = KINDS[rotation]
    total = 4 * width if blocks is not None else 0
    if uses_hadamard:
        power, base = hadamard_factors(width)
        total += width * (power.bit_length() - 1) + (width * base if base > 1 else 0)
    return total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant bench append`."""
    parser.add_argument(
        "--rotations",
        metavar="LIST",
        default="isoquant,hadamard,dense",
        help=f"of {', '.join(KINDS)} (default isoquant,hadamard,dense)",
    )
    options.add_common(parser, repeats=20)


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure as the options say; progress is told what is under way.

    Raises ConfigError for a wrong option, and CheckError, before anything is timed, where a kernel is wrong.
    """
    options.check_device(args.device)
    kv = all_packed(options.parse_packed(args.kv))
    rotations = options.parse_names("--rotations", args.rotations, list(KINDS))
    shapes = options.parse_shapes(args.shapes)
    threads = options.parse_numbers("--threads", args.threads)
    rounds = options.at_least("--repeats", args.repeats, 1)
    errors = {}
    for number in threads:
        with torch_threads(number):
            for shape, rotation in product(shapes, dict.fromkeys([*rotations, _PEER])):
                errors[shape, rotation, number] = check_append(shape, kv, rotation)
    progress("roofs of this machine")
    top = roofs.measure_roofs(threads)
    rows = []
    for number in threads:
        for shape in shapes:
            for size in ROWS:
                progress(f"{shape}, {size} writes of {ROWS[size]} rows, {plural(number, 'thread')}")
                with torch_threads(number):
                    measured = _measure(shape, kv, rotations, size, number, rounds, top.get(number))
                rows += [row | {"check_error": errors[shape, row["rotation"], number]} for row in measured]
    return _outcome(benchmark_data(args.device, top, rows, rounds, kv=kv.name))


def _formats(shape: Shape, kv: KVCacheConfig, rotation: str) -> tuple[StreamFormat, StreamFormat]:
    return dataclasses.replace(kv, rotation=rotation).stream_formats(shape.width, shape.width)


def _stores(shape: Shape, kv: KVCacheConfig, rotation: str, positions: int) -> list[StreamStore]:
    """Empty stores of keys and values with room. Raises ConfigError for a width that the rotation does not take."""
    blocks = -(-positions // BLOCK)
    stores = []
    for stream in _formats(shape, kv, rotation):
        try:
            store = StreamStore(stream, 0, shape.num_kv_heads, torch.device("cpu"), blocks)
        except ValueError as error:
            raise ConfigError(f"--shapes {shape}, rotation={rotation}: {error}") from error
        store.reserve(blocks)
        stores.append(store)
    return stores


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check_append(shape: Shape, kv: KVCacheConfig, rotation: str) -> float:
    """Relative error between what the kernel in use and the reference store, worse of keys and values.

    Raises CheckError where it is too large, ConfigError for a width that the rotation does not take.
    """
    x = random_rows(shape, CHECK_TOKENS, 1)
    table = torch.arange(-(-CHECK_TOKENS // BLOCK), dtype=torch.int32)[None]
    worst = 0.0
    ours, wanted = (_stores(shape, kv, rotation, CHECK_TOKENS) for _ in range(2))
    for store, reference in zip(ours, wanted, strict=True):
        for target, kernel in ((store, "auto"), (reference, "reference")):
            append_packed(
                x, target.rotation, target.packed, table, _int32(0), _int32(CHECK_TOKENS), _int32(0), kernel=kernel
            )
        blocks = table[0].tolist()
        what = f"append_packed, {shape}, kv={kv.name}, rotation={rotation}, {store.format.name}s"
        error = require_close(what, store.decode(blocks, CHECK_TOKENS), reference.decode(blocks, CHECK_TOKENS))
        worst = max(worst, error)
    return worst


def _write(
    shape: Shape, kv: KVCacheConfig, rotation: str, rows: int, data: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    """A call that packs the next `rows` rows of keys and values, round and round."""
    stores = _stores(shape, kv, rotation, _POSITIONS)
    table = torch.arange(_POSITIONS // BLOCK, dtype=torch.int32)[None]
    count = _int32(rows)
    places = cycle([_int32(begin) for begin in range(0, _POSITIONS, rows)])

    def call() -> None:
        place = next(places)
        for store, x in zip(stores, data, strict=True):
            append_packed(x, store.rotation, store.packed, table, place, count, place)

    return call


def _copy(rows: int, data: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """A call that copies the next `rows` rows of keys and values into a cache that keeps them as they are."""
    caches = [torch.zeros_like(x) for x in data]
    places = cycle(range(0, _POSITIONS, rows))

    def call() -> None:
        begin = next(places)
        for cache, x in zip(caches, data, strict=True):
            cache[:, :, begin : begin + rows] = x[:, :, begin : begin + rows]

    return call


def _measure(
    shape: Shape,
    kv: KVCacheConfig,
    rotations: list[str],
    size: str,
    threads: int,
    rounds: int,
    top: roofs.Roofs | None,
) -> list[dict[str, Any]]:
    rows = ROWS[size]
    data = random_rows(shape, _POSITIONS, 1), random_rows(shape, _POSITIONS, 2)
    calls = {name: _write(shape, kv, name, rows, data) for name in dict.fromkeys([*rotations, _PEER])}
    kernels = {name: kernel_of("append_packed", call) for name, call in calls.items()}
    clock = clock_for(threads)
    samples = interleaved({**calls, _COPY: _copy(rows, data)}, rounds, clock)
    times = {name: [sample / rows for sample in found] for name, found in samples.items()}
    measured = []
    for rotation in rotations:
        ours = times[rotation]
        found = estimate(ours)
        nbytes = _bytes_per_token(shape, kv, rotation)
        measured.append(
            {
                "op": "append_packed",
                "kernel": kernels[rotation],
                "shape": str(shape),
                "batch": 1,
                "tokens": rows,
                "size": size,
                "threads": threads,
                "kv": kv.name,
                "rotation": rotation,
                "madds": madds_per_row(rotation, shape.width),
                "clock": clock.name,
                **found.scaled(1e6).fields("ours_us"),
                **_peer(rotation, times),
                "bytes": nbytes,
                "gbps": nbytes / found.median / 1e9,
                "roof": None if top is None else "stream",
                "roof_fraction": None if top is None else nbytes / top.gbps / 1e9 / found.median,
                "peers": [peer_fields(name, times[name], ours) for name in (_PEER, _COPY) if name != rotation],
                "not_tried": [],
            }
        )
    return measured


def _peer(rotation: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """The dense rotation as the peer of another one; it has none itself."""
    if rotation == _PEER:
        return dict.fromkeys(("peer", "peer_us", "ratio", "ratio_low", "ratio_high"))
    found: Estimate = ratio(times[_PEER], times[rotation])
    return {"peer": f"rotation={_PEER}", "peer_us": estimate(times[_PEER]).median * 1e6, **found.fields("ratio")}


def _bytes_per_token(shape: Shape, kv: KVCacheConfig, rotation: str) -> int:
    """Bytes read and written for one token: bf16 keys and values, their codes and scales."""
    packed = sum(stream.row_bytes for stream in _formats(shape, kv, rotation))
    return shape.num_kv_heads * (2 * 2 * shape.width + packed)


def _outcome(data: dict[str, Any]) -> Outcome:
    headers = ["ratio", data["interval"], "shape", "rotation", "rows", "threads", "µs per token", "peer", "peer µs",
               "madds per row", "GB/s", "of roof", "kernel"]  # fmt: skip
    rows = [
        [
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            "-" if row["ratio"] is None else span(row, "ratio"),
            row["shape"],
            row["rotation"],
            f"{row['tokens']:,}",
            str(row["threads"]),
            micro(row["ours_us"]),
            row["peer"] or "-",
            "-" if row["peer_us"] is None else micro(row["peer_us"]),
            f"{row['madds']:,}",
            f"{row['gbps']:.2f}",
            "-" if row["roof_fraction"] is None else f"{row['roof_fraction']:.2f}",
            row["kernel"],
        ]
        for row in data["rows"]
    ]
    what = f"kv={data['kv']}, keys and values of one token, all KV heads, from bf16 rows"
    return Outcome(data, headers, rows, [what, *common_lines(data)])
