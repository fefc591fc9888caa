"""Products of a few tokens with packed weights against torch's product with exact ones.

Ours is what a packed linear layer does: inputs rotated, products with the codes. Calls go round so many copies of the
weights that every call finds them in memory.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rotaryquant.bench import devices, options
from rotaryquant.bench.checks import kernel_of, require_close
from rotaryquant.bench.table import micro, peer_fields, plural, span
from rotaryquant.bench.timing import clock_for, estimate, fastest, ratio, torch_threads
from rotaryquant.errors import ConfigError
from rotaryquant.formats.weight import BITS, GRIDS, WeightFormat, fit
from rotaryquant.measuring import Outcome, Progress
from rotaryquant.ops.dequant_matmul import dequant_matmul
from rotaryquant.ops.weights import PackedWeight, WeightCodec

#: Rows of a matrix whose products are checked.
_CHECKED = 2048

_OURS = "ours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant bench matmul`."""
    shapes = "151936x2048,4096x2048,2048x4096"
    parser.add_argument("--shapes", metavar="LIST", default=shapes, help=f"rows x width (default {shapes})")
    parser.add_argument("--batch", metavar="LIST", default="1,4,8", help="tokens, comma-separated (default 1,4,8)")
    add_common(parser)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options that benchmarks of packed weights share."""
    parser.add_argument("--bits", metavar="LIST", default="2,4", help="bits of a code, comma-separated (default 2,4)")
    parser.add_argument("--grid", default="trellis", metavar="NAME", help=f"of {', '.join(GRIDS)} (default trellis)")
    parser.add_argument("--group", type=int, default=128, metavar="N", help="columns that share a scale (default 128)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu (default) or cuda")
    parser.add_argument("--threads", metavar="LIST", default="1", help="of the CPU, comma-separated (default 1)")
    parser.add_argument("--repeats", type=int, metavar="N", default=20, help="rounds in turns (default 20)")


def parse_common(
    args: argparse.Namespace, sizes: int, example: str
) -> tuple[list[tuple[int, ...]], list[int], list[int], list[int], int]:
    """Shapes of so many sizes, bits, tokens, threads (0 on a GPU) and rounds. Raises ConfigError for a wrong option."""
    devices.check(args.device)
    return (
        parse_sizes(args.shapes, sizes, example),
        options.parse_numbers("--bits", args.bits),
        options.parse_numbers("--batch", args.batch),
        [0] if args.device == "cuda" else options.parse_numbers("--threads", args.threads),
        options.at_least("--repeats", args.repeats, 1),
    )


def parse_sizes(text: str, count: int, example: str) -> list[tuple[int, ...]]:
    """Shapes of a comma-separated list, `count` numbers each. Raises ConfigError naming the one that is none."""
    found = []
    for part in text.split(","):
        numbers = part.strip().replace("/", "x").split("x")
        if len(numbers) != count or not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise ConfigError(f"--shapes: {part.strip()!r} is no shape such as {example}")
        found.append(tuple(map(int, numbers)))
    return found


def form_of(args: argparse.Namespace, width: int, bits: int) -> WeightFormat:
    """The format of rows of a width that options ask for. Raises ConfigError where there is none."""
    options.parse_names("--grid", args.grid, GRIDS)
    form = fit(width, bits, args.grid, args.group, 0) if bits in BITS else None
    if form is None:
        raise ConfigError(f"--bits {bits}, --grid {args.grid}, --group {args.group}: rows of {width} have no such form")
    return form


def random_weight(form: WeightFormat, shape: tuple[int, ...], device: str) -> PackedWeight:
    """Any codes at all, scales near each other: [*shape, width]."""
    codes = torch.randint(0, 256, (*shape, form.code_bytes), dtype=torch.uint8, device=device)
    scales = ((torch.rand(*shape, form.groups, device=device) + 0.5) * form.unit / 50).to(torch.bfloat16)
    return PackedWeight(WeightCodec.from_format(form, device), codes, scales)


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure as the options say; progress is told what is under way.

    Raises ConfigError for a wrong option, and CheckError, before a row is timed, where its kernel is wrong.
    """
    shapes, bits, batches, threads, rounds = parse_common(args, 2, "4096x2048")
    forms = {(width, number): form_of(args, width, number) for _, width in shapes for number in bits}
    rows, top = [], {}
    for number in threads:
        with torch_threads(number or torch.get_num_threads()):
            progress("roof of this machine")
            top[number] = devices.measure_roof(args.device, number)
            for (height, width), wide in product(shapes, bits):
                progress(f"{height}x{width} at {plural(wide, 'bit')}, {plural(number, 'thread')}")
                form = forms[width, wide]
                rows += [_measure(form, height, batch, args.device, number, rounds, top[number]) for batch in batches]
    return outcome_of(devices.data_of(args.device, top, rows, rounds), args.device, "products of packed weights")


def _measure(
    form: WeightFormat, height: int, batch: int, device: str, threads: int, rounds: int, roof: float | None
) -> dict[str, Any]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(batch, form.width, device=device).to(dtype)
    nbytes = height * (form.code_bytes + 2 * form.groups)
    weights = [random_weight(form, (height,), device) for _ in range(devices.copies(nbytes))]
    error = _check(x, weights[0])
    calls: dict[str, list[Callable[[], object]]] = {_OURS: [partial(dequant_matmul, x, weight) for weight in weights]}
    for name in ("bf16",) if device == "cuda" else ("bf16", "fp32"):
        kind = torch.bfloat16 if name == "bf16" else torch.float32
        exact = [
            torch.randn(height, form.width, device=device).to(kind)
            for _ in range(devices.copies(height * form.width * kind.itemsize))
        ]
        given = x.to(kind)
        calls[f"torch {name}"] = [partial(torch.nn.functional.linear, given, matrix) for matrix in exact]
    kernel = kernel_of("dequant_matmul", calls[_OURS][0])
    return row_of(
        calls, rounds, device, threads, nbytes, roof, op="dequant_matmul", kernel=kernel,
        shape=f"{height}x{form.width}", batch=batch, tokens=batch, bits=form.bits, grid=form.grid, group=form.group,
        check_error=error,
    )  # fmt: skip


def _check(x: Tensor, weight: PackedWeight) -> float:
    """Relative error of ours on the first rows. Raises CheckError."""
    part = PackedWeight(weight.codec, weight.codes[:_CHECKED].clone(), weight.scales[:_CHECKED].clone())
    wanted = dequant_matmul(x.float(), part, kernel="reference")
    found = dequant_matmul(x, part)
    return require_close(f"dequant_matmul, {weight.codec.format.bits} bits, {plural(len(x), 'token')}", found, wanted)


def row_of(
    calls: dict[str, list[Callable[[], object]]],
    rounds: int,
    device: str,
    threads: int,
    nbytes: int,
    roof: float | None,
    **fields: Any,
) -> dict[str, Any]:
    """Time calls in turns; the first of them is ours, the fastest of the others the peer."""
    times = devices.samples(calls, rounds, device, threads)
    ours = times.pop(_OURS)
    best, found = fastest(times), estimate(ours)
    gbps = nbytes / found.median / 1e9
    return {
        **fields,
        "threads": threads,
        "clock": "events" if device == "cuda" else clock_for(threads).name,
        **found.scaled(1e6).fields("ours_us"),
        "peer": best,
        "peer_us": estimate(times[best]).median * 1e6,
        **ratio(times[best], ours).fields("ratio"),
        "bytes": nbytes,
        "gbps": gbps,
        "roof_fraction": None if roof is None else gbps / roof,
        "peers": [peer_fields(name, each, ours) for name, each in times.items()],
        "not_tried": [],
    }


def outcome_of(data: dict[str, Any], device: str, what: str) -> Outcome:
    """The table of a benchmark of packed weights."""
    headers = ["ratio", data["interval"], "shape", "bits", "tokens", "threads", "ours µs", "peer", "peer µs", "GB/s",
               "of roof", "kernel"]  # fmt: skip
    rows = [
        [
            f"{row['ratio']:.2f}",
            span(row, "ratio"),
            row["shape"],
            f"{row['bits']} {row['grid']}",
            str(row["batch"]),
            str(row["threads"] or "-"),
            micro(row["ours_us"]),
            row["peer"],
            micro(row["peer_us"]),
            f"{row['gbps']:.1f}",
            "-" if row["roof_fraction"] is None else f"{row['roof_fraction']:.2f}",
            row["kernel"],
        ]
        for row in data["rows"]
    ]
    return Outcome(data, headers, rows, [f"{what}, inputs rotated on the way", *devices.lines_of(data, device)])
