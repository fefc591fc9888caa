"""What a packed cache costs on real text: perplexity ratio, KL divergence and agreement against 16 bits.

Every window of text is read twice: once exactly (one forward, no cache), once through a really packed prefix with
forced tokens behind it. Only positions that attend to packed rows are scored, and the counters must prove it.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rotaryquant.config import KVCacheConfig
from rotaryquant.counters import Counters
from rotaryquant.errors import ConfigError
from rotaryquant.evals.facts import calibrated
from rotaryquant.evals.inputs import add_model_arguments, load_model
from rotaryquant.evals.peers import parse_specs
from rotaryquant.evals.plots import divergence_picture
from rotaryquant.evals.simulated import Variant, new_cache
from rotaryquant.evals.statistics import mean_interval, ratio_interval
from rotaryquant.evals.teacher_forcing import Chunk, packed_chunks, reference_logits, stock_chunks
from rotaryquant.evals.windows import check_plausible, windows_of
from rotaryquant.formats.kv import BLOCK
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.enable import enabled
from rotaryquant.integrations.transformers.report import layer_bits
from rotaryquant.integrations.transformers.tokens import encode_text
from rotaryquant.kv import accounting, heap
from rotaryquant.measuring import Outcome, Picture, Progress, model_name, provenance, read_text, text_fingerprint
from rotaryquant.ops import dispatch


@dataclass
class Scores:
    """Sums over the scored positions of one configuration; one entry of `nll` per window, nats.

    divergence, agree: fp32 [positions] per window, on the CPU whatever the model's device.
    """

    nll: list[float] = field(default_factory=list)
    divergence: list[Tensor] = field(default_factory=list)
    agree: list[Tensor] = field(default_factory=list)
    reads: Counters = field(default_factory=Counters)
    bits: dict[str, float] = field(default_factory=dict)
    summary: str = "kv=fp16: nothing packed"

    def add(self, chunks: Iterable[Chunk], reference: Tensor, ids: Tensor, first: int) -> None:
        """Score one window, on the device of its logits.

        reference: exact log-probabilities [positions, vocab] from position `first` on.
        """
        # Taken first: small tensors between the logits of chunks would keep the heap from using their room again.
        nll = torch.zeros((), dtype=torch.float64, device=reference.device)
        divergence, agree = (torch.empty(len(reference), device=reference.device) for _ in range(2))
        for chunk in chunks:
            part = slice(chunk.begin - first, chunk.end - first)
            exact = reference[part]
            packed = chunk.logits.log_softmax(-1)
            targets = ids[chunk.begin + 1 : chunk.end + 1, None]
            nll -= packed.gather(1, targets).double().sum()
            divergence[part] = (exact.exp() * (exact - packed)).sum(-1)
            agree[part] = (exact.argmax(-1) == packed.argmax(-1)).float()
            self.reads.add(chunk.reads)
        self.nll.append(float(nll))
        self.divergence.append(divergence.cpu())
        self.agree.append(agree.cpu())
        heap.give_back()


def measure(
    loaded: Loaded,
    specs: Mapping[str, KVCacheConfig | Variant | None],
    windows: list[Tensor],
    reference: Loaded | None = None,
    progress: Progress | None = None,
    prefix: int | None = None,
) -> tuple[list[float], dict[str, Scores]]:
    """Reference negative log-likelihood of each window, and the scores of each configuration.

    windows: int64 [context] each; positions from `prefix` on are scored, None for context // 2. reference: another
    checkpoint to compare with, or None for the same one. Holds the reference's log-probabilities of one window in
    memory (scored positions × vocabulary × 4 bytes).
    """
    scores = {name: Scores() for name in specs}
    exact_nll = []
    model = loaded.model
    for number, ids in enumerate(windows):
        first = len(ids) // 2 if prefix is None else prefix
        exact = reference_logits((reference or loaded).model, ids, first).log_softmax(-1)
        exact_nll.append(-float(exact.gather(1, ids[first + 1 :, None]).double().sum()))
        for place, (name, kv) in enumerate(specs.items()):
            if progress is not None:
                share = (number + place / len(specs)) / len(windows)
                progress(f"window {number + 1} of {len(windows)}: {name}", share)
            if kv is None:
                scores[name].add(stock_chunks(model, ids, first), exact, ids, first)
                scores[name].bits = dict.fromkeys(("bits_per_value", "bits_worst", "bits_all_layers"), 16.0)
                continue
            with enabled(model, kv.config if isinstance(kv, Variant) else kv) as state:
                assert state is not None
                cache = new_cache(state, kv)
                scores[name].add(packed_chunks(model, cache, ids, first), exact, ids, first)
                layers = layer_bits(cache)
                stock = sum(2 * g.num_kv_heads * g.head_dim for g in state.geometry if not g.packable)
                scores[name].bits = count_bits(layers, len(ids), stock)
                scores[name].summary = kv.summary(len(layers)) if isinstance(kv, Variant) else state.report().summary()
    return exact_nll, scores


def count_bits(layers: list[accounting.LayerBits], context: int, stock_width: int) -> dict[str, float]:
    """The three bit counts at `context` tokens; stock_width: K and V values per token of layers left at 16 bits."""
    return {
        "bits_per_value": accounting.bits_per_value(layers, context),
        "bits_worst": accounting.bits_worst(layers, context),
        "bits_all_layers": accounting.bits_all_layers(layers, context, stock_width * context),
    }


def result_of(scores: Scores, exact_nll: list[float], counts: list[int]) -> dict[str, Any]:
    """The numbers of one configuration."""
    total = sum(counts)
    ratio, low, high = ratio_interval(np.array(scores.nll), np.array(exact_nll), np.array(counts, dtype=float))
    divergence = torch.cat(scores.divergence).double()
    return {
        "ppl": math.exp(sum(scores.nll) / total),
        "ppl_ratio": ratio,
        "ppl_ratio_low": low,
        "ppl_ratio_high": high,
        "kld_mean": float(divergence.mean()),
        "kld_median": float(divergence.median()),
        "kld_p999": float(divergence.quantile(0.999)),
        "kld_max": float(divergence.max()),
        "top1": float(torch.cat(scores.agree).mean()),
        **scores.bits,
        "tokens": total,
        "packed_reads": scores.reads.packed_reads,
        "dense_reads": scores.reads.dense_reads,
        "in_force": scores.summary,
    }


def add_text_arguments(parser: argparse.ArgumentParser, tokens: int) -> None:
    """Options of every measurement that scores windows of text, `tokens` positions by default."""
    add_model_arguments(parser, "float32")
    parser.add_argument("--text", metavar="FILE", required=True, help="real text, UTF-8; read as one string")
    parser.add_argument("--context", type=int, default=2048, metavar="N", help="tokens in a window (default 2048)")
    parser.add_argument("--tokens", type=int, default=tokens, metavar="N", help=f"scored positions (default {tokens})")
    parser.add_argument("--any-baseline", action="store_true", help="go on with an implausible reference perplexity")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant eval fidelity`."""
    add_text_arguments(parser, tokens=20_000)
    parser.add_argument(
        "--kv", metavar="SPEC", action="append", help="ours or a simulated peer; repeat to compare; default iso3"
    )
    parser.add_argument(
        "--calibration", metavar="FILE", help="text for peers that are calibrated; not the one that is scored"
    )
    parser.add_argument("--reference", metavar="MODEL", help="compare with another checkpoint (same tokenizer)")
    parser.add_argument("--against", metavar="SPEC", help="one of --kv: also give each other's ratio to it, paired")
    parser.add_argument(
        "--prefix", type=int, metavar="N", help="tokens before the scored ones (default: half a window)"
    )


@dataclass(frozen=True)
class Measured:
    """Windows of a text as several configurations read them. counts: scored positions of each window.

    about: what a report says of the run before its results; its `attention` has the kernels that read packed rows.
    """

    exact_nll: list[float]
    counts: list[int]
    scores: dict[str, Scores]
    about: dict[str, Any]

    def result(self, name: str) -> dict[str, Any]:
        """The numbers of one configuration."""
        return {"kv": name, **result_of(self.scores[name], self.exact_nll, self.counts)}

    def against(self, name: str, other: str) -> dict[str, Any]:
        """Perplexity of one configuration over another's, paired by window, with its 95% interval."""
        ours, theirs = (np.array(self.scores[one].nll) for one in (name, other))
        ratio = ratio_interval(ours, theirs, np.array(self.counts, dtype=float))
        return {"kv": other, **dict(zip(("ratio", "low", "high"), ratio, strict=True))}

    def divergence_of(self, name: str, other: str) -> tuple[float, float, float]:
        """KL divergence of one configuration over another's, paired by window, with its 95% interval."""
        ours, theirs = (
            np.array([float(part.double().sum()) for part in self.scores[one].divergence]) for one in (name, other)
        )
        return mean_interval(ours, theirs)


def measure_text(
    args: argparse.Namespace,
    specs: Mapping[str, KVCacheConfig | Variant | None],
    progress: Progress,
    reference: str | None = None,
    calibration: str | None = None,
    prepare: Callable[[Loaded], Mapping[str, Variant]] | None = None,
    prefix: int | None = None,
) -> Measured:
    """Load what `add_text_arguments` names and measure. reference: another checkpoint to compare with. calibration: a
    text for peers that want one. prepare: what else to measure, made from the model. prefix: tokens of each window that
    are read before the first scored position, None for half.

    Raises RotaryQuantError with one clear line for a wrong input.
    """
    if args.context < 512 or args.tokens < 1:
        raise ConfigError(f"context={args.context}, tokens={args.tokens}: need at least 512 and 1")
    if prefix is not None and not BLOCK <= prefix < args.context - 1:
        raise ConfigError(f"prefix={prefix}: need at least {BLOCK} and fewer than context={args.context} less 1")
    text = read_text(Path(args.text))
    _check_held_out(specs, text)
    loaded = load_model(args.model, args.dtype, args.threads, args.device)
    windows, start = windows_of(loaded, text, args.context, args.tokens, prefix)
    other = load_model(reference, args.dtype, args.threads, args.device) if reference else None
    if other is not None and encode_text(other.tokenizer, text[:2000]) != encode_text(loaded.tokenizer, text[:2000]):
        raise ConfigError(f"--reference {reference}: its tokenizer splits the text differently; use a sibling model")
    specs = calibrated(loaded, specs, calibration, text, progress)
    if prepare is not None:
        specs = {**specs, **prepare(loaded)}
    called = dispatch.calls.copy()
    exact_nll, scores = measure(loaded, specs, windows, other, progress, prefix)
    first = args.context // 2 if prefix is None else prefix
    counts = [len(ids) - 1 - first for ids in windows]
    ppl_ref = math.exp(sum(exact_nll) / sum(counts))
    if not args.any_baseline:
        check_plausible(ppl_ref, start)
    about = {
        **provenance(args.device),
        "model": model_name(args.model),
        "reference": model_name(reference) if reference else "the same model, 16-bit cache",
        "text": Path(args.text).name,
        "context": args.context,
        "prefix": first,
        "windows": len(windows),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "attention": sorted(name for op, name in dispatch.calls - called if op == "packed_attention"),
        **start,
        "ppl_ref": ppl_ref,
    }
    return Measured(exact_nll, counts, scores, about)


def _check_held_out(specs: Mapping[str, KVCacheConfig | Variant | None], text: str) -> None:
    """Raise ConfigError where bits by layer were chosen on the very text that is scored."""
    for name, kv in specs.items():
        config = kv.config if isinstance(kv, Variant) else kv
        if config is not None and config.allocation is not None and config.allocation.text == text_fingerprint(text):
            raise ConfigError(f"kv={name}: calibrated on the text that is scored; use another")


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure as the options say; progress is told what is under way.

    Raises RotaryQuantError with one clear line for a wrong input.
    """
    specs = parse_specs(args.kv or ["iso3"])
    against = args.against if args.against is None else next(iter(parse_specs([args.against])))
    if against is not None and against not in specs:
        raise ConfigError(f"--against {args.against!r} must be one of --kv: {', '.join(specs)}")
    measured = measure_text(args, specs, progress, args.reference, args.calibration, prefix=args.prefix)
    results = []
    for name in specs:
        row = measured.result(name)
        if against is not None and name != against:
            row["against"] = measured.against(name, against)
        results.append(row)
    data: dict[str, Any] = {**measured.about, "results": results}
    if len(results) == 1:
        data |= results[0]
    return _outcome(data, divergence_picture({name: one.divergence for name, one in measured.scores.items()}, data))


def _outcome(data: dict[str, Any], picture: Picture) -> Outcome:
    headers = ["kv", "ppl_ratio", "95% interval", "kld_mean", "kld_p999", "top1", "bits", "worst", "packed reads"]
    rows = []
    for row in data["results"]:
        rows.append(
            [
                row["kv"],
                f"{row['ppl_ratio']:.4f}",
                f"{row['ppl_ratio_low']:.4f}..{row['ppl_ratio_high']:.4f}",
                f"{row['kld_mean']:.4f}",
                f"{row['kld_p999']:.3f}",
                f"{row['top1']:.4f}",
                f"{row['bits_per_value']:.3f}",
                f"{row['bits_worst']:.3f}",
                f"{row['packed_reads']:,}",
            ]
        )
    tokens = data["results"][0]["tokens"]
    lines = [
        f"{data['model']}: {tokens:,} scored positions in {data['windows']} windows of {data['context']} tokens of "
        f"{data['text']}, ppl_ref {data['ppl_ref']:.3f}",
        f"windows start with ids {data['first_ids']} (BOS {data['bos']}: {data['bos_source']})",
    ]
    for row in data["results"]:
        lines.append(row["in_force"])
        if other := row.get("against"):
            lines.append(
                f"{row['kv']} against {other['kv']}: ppl ratio {other['ratio']:.4f} "
                f"(95% {other['low']:.4f}..{other['high']:.4f})"
            )
    return Outcome(data, headers, rows, lines, picture=picture)
