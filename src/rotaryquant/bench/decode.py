"""Tokens per second of whole models: the packed cache against transformers' own, in turns on the same prompt.

Every run is the same loop over the same model: one forward a token, the likeliest token next. A row is one dtype of the
model; its headline ratio is against the fastest cache that transformers has, in whatever dtype.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rotaryquant.bench import options, roofs
from rotaryquant.bench.append import check_append
from rotaryquant.bench.checks import CHECK_TOKENS, CheckError, check_attention, kernel_of
from rotaryquant.bench.lineup import PEERS, Entry, Plan, host_ids, line_up, prompt_ids
from rotaryquant.bench.options import Shape
from rotaryquant.bench.runs import ModelRun
from rotaryquant.bench.table import benchmark_data, common_lines, peer_fields, span
from rotaryquant.bench.timing import clock_for, estimate, fastest, ratio, torch_threads
from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.formats.kv import BLOCK
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.checkpoints import Loaded, load_folder, model_folder
from rotaryquant.integrations.transformers.geometry import read_geometry, text_config
from rotaryquant.measuring import Outcome, Progress, installed, model_name, read_text
from rotaryquant.ops.packed_attention import packed_attention

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant bench decode`."""
    options.add_device(parser)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="folder, .gguf file or hub id")
    parser.add_argument(
        "--depths", metavar="LIST", default="0,2048,8192", help="tokens read first (default 0,2048,8192)"
    )
    parser.add_argument("--kv", metavar="SPEC", default="iso3", help="the packed cache (default iso3)")
    parser.add_argument(
        "--against", metavar="LIST", default="bf16,fp32", help="dtypes of the model, ours and peer (default bf16,fp32)"
    )
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="tokens in a window (default 32)")
    parser.add_argument("--pairs", type=int, default=6, metavar="N", help="interleaved windows (default 6)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch (default 1)")
    parser.add_argument("--text", metavar="FILE", help="prompt, UTF-8 (default: random tokens, repeated)")
    parser.add_argument(
        "--peers",
        metavar="LIST",
        default=",".join(PEERS),
        help=f"besides DynamicCache, where installed: of {', '.join(PEERS)}, or none (default: all)",
    )
    parser.add_argument("--llama-gguf", metavar="FILE", help="the model for llama.cpp, through llama-cpp-python")


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure as the options say; progress is told what is under way.

    Raises ConfigError or ModelFileError for a wrong input, and CheckError, before anything is timed, where a kernel is
    wrong or a packed run reads no packed row.
    """
    options.check_device(args.device)
    plan = Plan(
        kv=options.parse_packed(args.kv),
        dtypes=options.parse_names("--against", args.against, list(_DTYPES)),
        depths=options.parse_numbers("--depths", args.depths, least=0),
        steps=options.at_least("--steps", args.steps, 1),
        pairs=options.at_least("--pairs", args.pairs, 1),
        threads=options.at_least("--threads", args.threads, 1),
        text=read_text(Path(args.text)) if args.text else None,
        peers=[] if args.peers == "none" else options.parse_names("--peers", args.peers, PEERS),
        llama=Path(args.llama_gguf) if args.llama_gguf else None,
    )
    if plan.llama is not None and not plan.llama.is_file():
        raise ConfigError(f"--llama-gguf {plan.llama}: no such file")
    if plan.llama is not None and len(args.models) > 1:
        raise ConfigError(f"--llama-gguf goes with one model, {len(args.models)} are given; run them one by one")
    folders = [(model_name(model), model_folder(model, progress)) for model in args.models]
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    with torch_threads(plan.threads):
        progress("roofs of this machine")
        top = roofs.measure_roofs([plan.threads])
        for name, folder in folders:
            _measure_model(name, folder, plan, rows, skipped, progress)
    if not rows:
        raise ConfigError(
            "; ".join(f"{entry['model']}, depth {entry['depth']}: {entry['reason']}" for entry in skipped)
        )
    data = benchmark_data(
        args.device,
        top,
        rows,
        plan.pairs,
        kv=plan.kv.name,
        steps=plan.steps,
        text=Path(args.text).name if args.text else None,
        llama_gguf=plan.llama.name if plan.llama is not None else None,
        skipped=skipped,
    )
    if (version := installed("llama-cpp-python")) is not None:
        data["versions"]["llama-cpp-python"] = version
    return _outcome(data)


def _measure_model(
    name: str,
    folder: Path,
    plan: Plan,
    rows: list[dict[str, Any]],
    skipped: list[dict[str, Any]],
    progress: Progress,
) -> None:
    """Add the rows of one model, and the depths that it cannot have."""
    loaded = {}
    for dtype in plan.dtypes:
        progress(f"{name}: loading in {dtype}")
        loaded[dtype] = load_folder(folder, name, dtype=_DTYPES[dtype])
    kernels = {dtype: check_model(one, plan.kv) for dtype, one in loaded.items()}
    first = next(iter(loaded.values()))
    limit = int(getattr(text_config(first.model), "max_position_embeddings", 0) or 0)
    for depth in plan.depths:
        needed = max(1, depth) + plan.growth
        if limit and needed > limit:
            reason = f"it would need {needed:,} positions with {plan.growth} tokens decoded, the model has {limit:,}"
            progress(f"{name}: depth {depth:,} skipped: {reason}")
            skipped.append({"model": name, "depth": depth, "reason": reason})
            continue
        ids = prompt_ids(first, depth, plan.text)
        entries, not_tried = line_up(loaded, plan, len(ids))
        for label, entry in entries.items():
            progress(f"{name}: {label} reads {len(ids):,} tokens")
            entry.run.start(host_ids(entry.run, ids, plan.text))
        _take_turns(entries, plan, f"{name}, depth {depth:,}", progress)
        for dtype in plan.dtypes:
            row = _row(dtype, entries, plan, depth)
            rows.append({"op": "decode", "kernel": kernels[dtype], "model": name, **row, "not_tried": not_tried})


def check_model(loaded: Loaded, kv: KVCacheConfig) -> str:
    """Compare every packed layer's attention on a short prompt, and the writes, with the references.

    Returns the kernel of attention that is in use. Raises CheckError naming the layer.
    """
    model = loaded.model
    limit = int(getattr(text_config(model), "max_position_embeddings", 0) or CHECK_TOKENS)
    check = ModelRun(model, kv)
    check.start(prompt_ids(loaded, min(CHECK_TOKENS, limit), None))
    cache = check.cache
    assert isinstance(cache, PackedCache)
    generator = torch.Generator().manual_seed(0)
    kernel, shapes = "", set[Shape]()
    for layer in read_geometry(text_config(model)):
        packed = cache.packed_layer(layer.index)
        if packed is None or packed.all_staged():
            continue
        what = f"{loaded.name}, layer {layer.index}, kv={kv.name}"
        query = torch.randn(1, layer.num_heads, 1, layer.head_dim, generator=generator)
        view, about = packed.view(), {"scale": layer.head_dim**-0.5, "key_noise": packed.key_noise}
        check_attention(what, query, view, **about)
        kernel = kernel or kernel_of("packed_attention", partial(packed_attention, query, view, **about))
        shapes.add(Shape(layer.num_heads, layer.num_kv_heads, layer.head_dim))
    if not kernel:
        raise CheckError(f"{loaded.name}: {CHECK_TOKENS} tokens left nothing packed; there is nothing to measure")
    for shape in shapes:
        check_append(shape, kv, kv.rotation)
    return kernel


def _take_turns(entries: Mapping[str, Entry], plan: Plan, what: str, progress: Progress) -> None:
    """Windows of all runs in turn, and back in every other round; seconds a token are kept with each."""
    clock = clock_for(plan.threads)
    for number in range(plan.pairs):
        progress(f"{what}: window {number + 1} of {plan.pairs}")
        for entry in entries.values() if number % 2 == 0 else reversed(list(entries.values())):
            entry.times.append(entry.run.window(plan.steps, clock) / plan.steps)
            if (held := entry.run.nbytes) is not None:
                entry.peak_bytes = max(entry.peak_bytes or 0, held)


def _row(dtype: str, entries: Mapping[str, Entry], plan: Plan, depth: int) -> dict[str, Any]:
    """The row of one dtype. Raises CheckError where the packed run read no packed row although it must have."""
    ours = next(entry for entry in entries.values() if entry.packed and entry.dtype == dtype)
    assert isinstance(ours.run, ModelRun)
    if depth >= 2 * BLOCK and ours.run.packed_reads == 0:
        raise CheckError(f"depth {depth}: the packed run read no packed row; its time would not be that of the cache")
    peers = {label: entry for label, entry in entries.items() if not entry.packed}
    same_model = {label: entry.times for label, entry in peers.items() if entry.dtype is not None}
    best = fastest(same_model)
    found = estimate(ours.times)
    return {
        "kv": plan.kv.name,
        "dtype": dtype,
        "batch": 1,
        "depth": depth,
        "depth_end": max(1, depth) + plan.growth,
        "threads": plan.threads,
        "clock": clock_for(plan.threads).name,
        "tokens_per_s": 1 / found.median,
        "tokens_per_s_low": 1 / found.high,
        "tokens_per_s_high": 1 / found.low,
        "ours_us": found.median * 1e6,
        "peer": best,
        "peer_us": (median := estimate(peers[best].times).median) * 1e6,
        "peer_tokens_per_s": 1 / median,
        **ratio(same_model[best], ours.times).fields("ratio"),
        **ratio(same_model[f"DynamicCache {dtype}"], ours.times).fields("ratio_same_dtype"),
        "peak_bytes": ours.peak_bytes,
        "peer_bytes": peers[best].peak_bytes,
        "packed_reads": ours.run.packed_reads,
        "peers": [
            {
                **peer_fields(label, entry.times, ours.times),
                "tokens_per_s": 1 / estimate(entry.times).median,
                "peak_bytes": entry.peak_bytes,
                "same_model": entry.dtype is not None,
            }
            for label, entry in peers.items()
        ],
    }


def _outcome(data: dict[str, Any]) -> Outcome:
    headers = ["ratio", data["interval"], "same dtype", data["interval"], "model", "dtype", "depth", "tokens/s", "peer",
               "peer tokens/s", "cache MB", "peer MB"]  # fmt: skip
    rows = [
        [
            f"{row['ratio']:.2f}",
            span(row, "ratio"),
            f"{row['ratio_same_dtype']:.2f}",
            span(row, "ratio_same_dtype"),
            row["model"],
            row["dtype"],
            f"{row['depth']:,}",
            f"{row['tokens_per_s']:.2f}",
            row["peer"],
            f"{row['peer_tokens_per_s']:.2f}",
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['peer_bytes'] / 1e6:.1f}",
        ]
        for row in data["rows"]
    ]
    what = data["text"] or "random tokens"
    lines = [
        f"kv={data['kv']}, greedy decoding after {what}, windows of {data['steps']} tokens",
        *common_lines(data),
    ]
    lines += [f"{one['model']}: depth {one['depth']:,} skipped: {one['reason']}" for one in data["skipped"]]
    return Outcome(data, headers, rows, lines)
