"""One-token attention over a packed context against torch's attention over the exact one.

Ours is the whole op: queries rotated, attention on the codes, the output rotated back. The peer of a row is the
fastest of the forms that torch offers, in bf16 and in fp32.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rotaryquant.bench import options, roofs
from rotaryquant.bench.checks import CHECK_TOKENS, check_attention, kernel_of
from rotaryquant.bench.context import Context, random_context
from rotaryquant.bench.options import Shape
from rotaryquant.bench.peers import check_forms, sdpa_forms
from rotaryquant.bench.roofs import Work
from rotaryquant.bench.table import benchmark_data, common_lines, micro, peer_fields, plural, span
from rotaryquant.bench.timing import clock_for, estimate, fastest, interleaved, ratio, torch_threads
from rotaryquant.config import KVCacheConfig
from rotaryquant.measuring import Outcome, Progress
from rotaryquant.ops.packed_attention import Options, prepare
from rotaryquant.ops.rotate import rotate

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_OURS, _ROTATIONS, _STREAM, _DOT = "ours", "rotations", "stream", "dot"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant bench attention`."""
    lengths = "512,2048,4096,8192,32768,65536"
    parser.add_argument(
        "--lengths", metavar="LIST", default=lengths, help=f"tokens in the context, comma-separated (default {lengths})"
    )
    options.add_common(parser, repeats=20)


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure as the options say; progress is told what is under way.

    Raises ConfigError for a wrong option, and CheckError, before anything is timed, where a kernel is wrong.
    """
    options.check_device(args.device)
    kv = options.parse_packed(args.kv)
    shapes = options.parse_shapes(args.shapes)
    lengths = options.parse_numbers("--lengths", args.lengths)
    threads = options.parse_numbers("--threads", args.threads)
    rounds = options.at_least("--repeats", args.repeats, 1)
    errors = {(shape, number): _check(shape, kv, number) for number in threads for shape in shapes}
    progress("roofs of this machine")
    top = roofs.measure_roofs(threads)
    rows = []
    for number in threads:  # ascending: threads of torch that have nothing to do would still cost the first row time
        for shape in shapes:
            for tokens in lengths:
                progress(f"{shape}, {tokens:,} tokens, {plural(number, 'thread')}")
                with torch_threads(number):
                    row = _measure(shape, tokens, kv, number, rounds)
                rows.append(row | {"check_error": errors[shape, number]})
    return _outcome(benchmark_data(args.device, top, rows, rounds, kv=kv.name))


def _check(shape: Shape, kv: KVCacheConfig, threads: int) -> float:
    """Relative error of ours on a short context; the peers must agree with each other there."""
    what = f"packed_attention, {shape}, kv={kv.name}, {plural(threads, 'thread')}"
    with torch_threads(threads):
        context = random_context(shape, CHECK_TOKENS, kv)
        check_forms(f"peers, {shape}", _peers(context)[0])
        return check_attention(what, context.query, context.view, scale=context.scale, key_noise=context.key_noise)


def _peers(context: Context) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Calls of all peers, and reasons for those left out."""
    calls: dict[str, Callable[[], Tensor]] = {}
    left_out: dict[str, str] = {}
    for name, dtype in _DTYPES.items():
        query, keys, values = (tensor.to(dtype) for tensor in (context.query, context.keys, context.values))
        forms, missing = sdpa_forms(query, keys, values, context.scale)
        calls |= {f"sdpa {name} {form}": call for form, call in forms.items()}
        left_out |= {f"sdpa {name} {form}": reason for form, reason in missing.items()}
    return calls, left_out


def _rotations(context: Context) -> Callable[[], object]:
    """The two rotations alone: of the queries, and of as many outputs back."""
    view, query = context.view, context.query
    rows = query.view(1, view.key_rotation.num_kv_heads, -1, query.shape[-1])

    def call() -> None:
        rotate(rotate(rows, view.key_rotation), view.value_rotation, inverse=True)

    return call


def _measure(shape: Shape, tokens: int, kv: KVCacheConfig, threads: int, rounds: int) -> dict[str, Any]:
    context = random_context(shape, tokens, kv)
    asked = Options(scale=context.scale, key_noise=context.key_noise)
    prepared = prepare(context.query, context.view, asked)  # as a layer does once for all of its steps
    ours = partial(prepared, context.query, context.view, asked, None)
    peers, left_out = _peers(context)
    works: dict[str, Work] = {}
    if roofs.missing() is None:
        works = {_STREAM: roofs.stream_work(context.packed_bytes, threads), _DOT: roofs.dot_work(threads)}
    clock = clock_for(threads)
    kernel = kernel_of("packed_attention", ours)
    samples = interleaved(
        {_OURS: ours, _ROTATIONS: _rotations(context), **peers, **{name: work.call for name, work in works.items()}},
        rounds,
        clock,
    )
    times = {name: samples[name] for name in peers}
    best = fastest(times)
    found = estimate(samples[_OURS])
    return {
        "op": "packed_attention",
        "kernel": kernel,
        "shape": str(shape),
        "batch": 1,
        "tokens": tokens,
        "threads": threads,
        "kv": kv.name,
        "clock": clock.name,
        **found.scaled(1e6).fields("ours_us"),
        "rotation_us": estimate(samples[_ROTATIONS]).median * 1e6,
        "peer": best,
        "peer_us": estimate(times[best]).median * 1e6,
        **ratio(times[best], samples[_OURS]).fields("ratio"),
        "bytes": context.packed_bytes,
        "gbps": context.packed_bytes / found.median / 1e9,
        "madds": (madds := 2 * tokens * shape.num_heads * shape.width),
        **_roof(samples, works, context.packed_bytes, madds),
        "peers": [peer_fields(name, times[name], samples[_OURS]) for name in peers],
        "not_tried": [{"peer": name, "reason": reason} for name, reason in left_out.items()],
    }


def _roof(samples: dict[str, list[float]], works: dict[str, Work], nbytes: int, madds: int) -> dict[str, Any]:
    """What bounds a row: reading its bytes, at the rate of as many bytes, or its multiply-adds in int8."""
    if not works:
        return dict.fromkeys(("roof", "roof_us", "roof_fraction", "stream_gbps", "dot_gmadds"))
    needed = {_STREAM: nbytes / works[_STREAM].amount, _DOT: madds / works[_DOT].amount}
    times = {name: [share * sample for sample in samples[name]] for name, share in needed.items()}
    binding = max(times, key=lambda name: estimate(times[name]).median)
    rates = {name: works[name].amount / estimate(samples[name]).median / 1e9 for name in works}
    return {
        "roof": binding,
        "roof_us": estimate(times[binding]).median * 1e6,
        "roof_fraction": ratio(times[binding], samples[_OURS]).median,
        "stream_gbps": rates[_STREAM],
        "dot_gmadds": rates[_DOT],
    }


def _outcome(data: dict[str, Any]) -> Outcome:
    headers = ["ratio", data["interval"], "shape", "tokens", "threads", "ours µs", "rotations µs", "peer", "peer µs",
               "GB/s", "roof", "of roof", "kernel"]  # fmt: skip
    rows = [
        [
            f"{row['ratio']:.2f}",
            span(row, "ratio"),
            row["shape"],
            f"{row['tokens']:,}",
            str(row["threads"]),
            micro(row["ours_us"]),
            micro(row["rotation_us"]),
            row["peer"],
            micro(row["peer_us"]),
            f"{row['gbps']:.2f}",
            row["roof"] or "-",
            "-" if row["roof_fraction"] is None else f"{row['roof_fraction']:.2f}",
            row["kernel"],
        ]
        for row in data["rows"]
    ]
    what = f"kv={data['kv']}, one query token over random rows, all of them packed"
    return Outcome(data, headers, rows, [what, *common_lines(data)])
