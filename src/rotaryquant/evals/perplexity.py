"""Perplexity of text read through a packed cache, at several context lengths, beside the 16-bit cache.

Without a second model's logits in memory: for contexts and vocabularies that `fidelity` has no room for. As there, the
first half of each window is packed before the second is scored, and every scored position must read packed rows.
"""

import argparse
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.evals.inputs import add_model_arguments, load_model
from rotaryquant.evals.peers import parse_specs
from rotaryquant.evals.plots import perplexity_picture
from rotaryquant.evals.simulated import Simulation, new_cache
from rotaryquant.evals.teacher_forcing import Chunk, packed_chunks, stock_chunks
from rotaryquant.evals.windows import windows_of
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.enable import enabled
from rotaryquant.measuring import Outcome, Progress, model_name, provenance, read_text


def nll(chunks: Iterable[Chunk], ids: Tensor) -> float:
    """Negative log-likelihood in nats of what follows each scored position. ids: int64 [tokens], the window."""
    total = 0.0
    for chunk in chunks:
        targets = ids[chunk.begin + 1 : chunk.end + 1]
        total += float(torch.nn.functional.cross_entropy(chunk.logits, targets, reduction="sum").double())
    return total


def window_nll(loaded: Loaded, kv: KVCacheConfig | Simulation | None, ids: Tensor) -> float:
    """Of one window, read through the cache that `kv` names; its second half is scored."""
    first = len(ids) // 2
    if kv is None:
        return nll(stock_chunks(loaded.model, ids, first), ids)
    with enabled(loaded.model, kv.config if isinstance(kv, Simulation) else kv) as state:
        assert state is not None
        return nll(packed_chunks(loaded.model, new_cache(state, kv), ids, first), ids)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant eval perplexity`."""
    add_model_arguments(parser, "float32")
    parser.add_argument("--text", metavar="FILE", required=True, help="real text, UTF-8; read as one string")
    parser.add_argument(
        "--kv", metavar="SPEC", action="append", help="ours or a simulated peer; repeat; default iso3, fp16 beside it"
    )
    parser.add_argument(
        "--context", metavar="LIST", default="512,2048,8192", help="tokens in a window (default 512,2048,8192)"
    )
    parser.add_argument("--tokens", type=int, default=8_000, metavar="N", help="scored at each (default 8000)")


def contexts_of(text: str) -> list[int]:
    """The lengths that --context lists. Raises ConfigError for one that is no number or below 512."""
    found = []
    for part in text.split(","):
        if not part.strip().isdigit() or int(part) < 512:
            raise ConfigError(f"--context {part.strip()!r}: wanted numbers of at least 512, comma-separated")
        found.append(int(part))
    return found


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure as the options say; progress is told what is under way.

    Raises RotaryQuantError with one clear line for a wrong input.
    """
    contexts = contexts_of(args.context)
    if args.tokens < 1:
        raise ConfigError(f"tokens={args.tokens}: need at least 1")
    specs = {"fp16": None, **parse_specs(args.kv or ["iso3"])}
    text = read_text(Path(args.text))
    loaded = load_model(args.model, args.dtype, args.threads, args.device)
    windows = {context: windows_of(loaded, text, context, args.tokens) for context in contexts}
    results: list[dict[str, Any]] = []
    done, steps = 0, len(specs) * sum(len(parts) for parts, _ in windows.values())
    for context, (parts, _) in windows.items():
        scored = sum(len(ids) - 1 - len(ids) // 2 for ids in parts)
        exact = math.nan
        for name, kv in specs.items():
            total = 0.0
            for number, ids in enumerate(parts):
                progress(f"context {context:,}, window {number + 1} of {len(parts)}: {name}", done / steps)
                done += 1
                total += window_nll(loaded, kv, ids)
            ppl = math.exp(total / scored)
            exact = ppl if kv is None else exact
            results.append(
                {"kv": name, "context": context, "windows": len(parts), "tokens": scored, "ppl": ppl,
                 "ppl_ratio": ppl / exact}
            )  # fmt: skip
    start = windows[contexts[0]][1]
    data = {
        **provenance(args.device),
        "model": model_name(args.model),
        "text": Path(args.text).name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        **start,
        "results": results,
    }
    rows = []
    for name in specs:
        cells = [row for row in results if row["kv"] == name]
        rows.append([name, *(f"{row['ppl']:.3f} ({row['ppl_ratio']:.4f})" for row in cells)])
    counts = ", ".join(f"{row['tokens']:,} at {row['context']:,}" for row in results if row["kv"] == "fp16")
    lines = [f"{data['model']}, {data['text']}: perplexity (over the 16-bit cache's); scored positions: {counts}"]
    headers = ["kv", *(f"context {context:,}" for context in contexts)]
    return Outcome(data, headers, rows, lines, picture=perplexity_picture(data))
