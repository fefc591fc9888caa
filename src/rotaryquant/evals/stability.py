"""Whether a model loaded anew says the same at the same speed: three full reloads, perplexity and decoding compared.

The spread is the coefficient of variation: standard deviation over mean. Perplexity of one text on one machine has no
reason to vary at all; speed has the machine's.
"""

import argparse
import gc
import math
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotaryquant.config import KVCacheConfig, parse_kv, spec_name
from rotaryquant.errors import ConfigError
from rotaryquant.evals import inputs
from rotaryquant.evals.perplexity import window_nll
from rotaryquant.evals.plots import stability_picture
from rotaryquant.evals.windows import windows_of
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.enable import enabled
from rotaryquant.integrations.transformers.session import Session
from rotaryquant.measuring import Outcome, Progress, model_name, provenance, read_text


def variation(values: list[float]) -> float:
    """Standard deviation over mean of two values or more."""
    return statistics.stdev(values) / statistics.mean(values)


def decode(loaded: Loaded, kv: KVCacheConfig | None, ids: Tensor, steps: int) -> tuple[float, list[int]]:
    """Tokens per second of `steps` greedy tokens after a prompt, int64 [tokens], and those tokens."""
    with enabled(loaded.model, kv) if kv is not None else nullcontext() as state:
        session = Session(loaded.model, state)
        logits = session.read(ids.tolist())
        assert logits is not None
        said = [int(logits.argmax())]
        start = time.perf_counter()
        for _ in range(steps):
            said.append(int(session.step(said[-1]).argmax()))
        return steps / (time.perf_counter() - start), said


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant eval stability`."""
    inputs.add_model_arguments(parser, "auto")
    parser.add_argument("--text", metavar="FILE", required=True, help="real text, UTF-8; read as one string")
    parser.add_argument("--kv", metavar="SPEC", default="iso3", help="the packed cache (default iso3); fp16 beside it")
    parser.add_argument("--reloads", type=int, default=3, metavar="N", help="times the model is loaded (default 3)")
    parser.add_argument("--context", type=int, default=2048, metavar="N", help="tokens in a window (default 2048)")
    parser.add_argument("--tokens", type=int, default=1_000, metavar="N", help="scored positions (default 1000)")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="tokens decoded for speed (default 64)")


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure as the options say; progress is told what is under way. It passes where no answer changes.

    Raises RotaryQuantError with one clear line for a wrong input.
    """
    if args.reloads < 2 or args.steps < 1 or args.context < 512 or args.tokens < 1:
        raise ConfigError(
            f"reloads={args.reloads}, steps={args.steps}, context={args.context}, tokens={args.tokens}: need at least "
            f"2, 1, 512 and 1"
        )
    specs = {"fp16": None, spec_name(args.kv): parse_kv(args.kv)}
    text = read_text(Path(args.text))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in specs}
    for number in range(args.reloads):
        progress(f"load {number + 1} of {args.reloads}", number / args.reloads)
        loaded = inputs.load_model(args.model, args.dtype, args.threads, args.device)
        windows, _ = windows_of(loaded, text, args.context, args.tokens)
        scored = sum(len(ids) - 1 - len(ids) // 2 for ids in windows)
        for place, (name, kv) in enumerate(specs.items()):
            share = (number + place / len(specs)) / args.reloads
            progress(f"load {number + 1} of {args.reloads}: kv={name}", share)
            ppl = math.exp(sum(window_nll(loaded, kv, ids) for ids in windows) / scored)
            speed, said = decode(loaded, kv, windows[0][: args.context // 2], args.steps)
            found[name].append({"ppl": ppl, "tokens_per_s": speed, "said": said})
        del loaded
        gc.collect()
    return _outcome(args, found)


def _outcome(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> Outcome:
    results = []
    for name, runs in found.items():
        row: dict[str, Any] = {"kv": name, "same_tokens": all(one["said"] == runs[0]["said"] for one in runs)}
        for field in ("ppl", "tokens_per_s"):
            values = [one[field] for one in runs]
            row |= {field: values, f"{field}_mean": statistics.mean(values), f"{field}_variation": variation(values)}
        results.append(row)
    data = {
        **provenance(args.device),
        "model": model_name(args.model),
        "text": Path(args.text).name,
        "reloads": args.reloads,
        "threads": torch.get_num_threads(),
        "results": results,
    }
    rows = [
        [
            row["kv"],
            f"{row['ppl_mean']:.4f}",
            f"{row['ppl_variation']:.2e}",
            f"{row['tokens_per_s_mean']:.1f}",
            f"{row['tokens_per_s_variation']:.1%}",
            "yes" if row["same_tokens"] else "no",
        ]
        for row in results
    ]
    headers = ["kv", "ppl", "variation", "tokens/s", "variation", "same answers"]
    lines = [f"{data['model']}: {args.reloads} full reloads, {args.steps} tokens decoded after {args.context // 2:,}"]
    same = all(row["same_tokens"] for row in results)
    return Outcome(data, headers, rows, lines, same, stability_picture(data))
