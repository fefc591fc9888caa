"""Hours of conversations in one process: does memory grow, does anything fail, does the model stay the same?

Rounds of different shape follow each other: a new prompt of another length, a follow-up on the kept cache, a return to
an earlier point. Between them a fixed probe text is scored, whose likelihood has no reason to move.
"""

import argparse
import os
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rotaryquant.config import KVCacheConfig, parse_kv, spec_name
from rotaryquant.errors import ConfigError
from rotaryquant.evals.inputs import add_model_arguments, load_model
from rotaryquant.evals.perplexity import nll
from rotaryquant.evals.plots import soak_picture
from rotaryquant.evals.teacher_forcing import packed_chunks, stock_chunks
from rotaryquant.evals.windows import windows_of
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.enable import EnabledModel, enabled
from rotaryquant.integrations.transformers.geometry import text_config
from rotaryquant.integrations.transformers.session import Session
from rotaryquant.integrations.transformers.tokens import encode_text
from rotaryquant.measuring import Outcome, Progress, model_name, provenance, read_text

#: Share of the time that counts as warm-up, before memory is watched.
_WARM_UP = 0.2
_PROBE_TOKENS, _PROBE_EVERY = 512, 10
_ANSWER = 48
#: Samples of memory that a report keeps.
_DRAWN = 500
#: Below this many seconds a slope is noise: it is told, not judged.
_JUDGED_FROM = 1800.0


def resident_mb() -> float | None:
    """Resident memory of this process in 10⁶ bytes; None where the system does not say (not Linux)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def device_mb(device: torch.device) -> float | None:
    """What torch's tensors take on an accelerator in 10⁶ bytes; None for the CPU, whose are in `resident_mb`."""
    return None if device.type == "cpu" else torch.accelerator.memory_allocated(device) / 1e6


def slope_per_hour(seconds: list[float], megabytes: list[float]) -> float:
    """MB per hour of the straight line through samples after the warm-up; 0 for fewer than three of them."""
    if not seconds:
        return 0.0
    start = seconds[0] + _WARM_UP * (seconds[-1] - seconds[0])
    kept = [(at, size) for at, size in zip(seconds, megabytes, strict=True) if at >= start]
    if len(kept) < 3:
        return 0.0
    x, y = np.array(kept).T
    return float(np.polyfit(x / 3600, y, 1)[0])


def thinned(samples: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_DRAWN` of the samples, from the first on at equal distances, rounded for a report."""
    step = -(-len(samples) // _DRAWN) or 1
    return [(round(at, 1), round(size, 1)) for at, size in samples[::step]]


class Talk:
    """One conversation after another, of lengths drawn from a seed. longest: tokens that a session may hold."""

    def __init__(self, session: Session, ids: list[int], longest: int, seed: int) -> None:
        self._session, self._ids, self._longest = session, ids, longest
        self._random = random.Random(seed)  # noqa: S311 - a draw of test data
        self.tokens = 0

    def round(self) -> str:
        """One round; returns its kind. Raises ValueError where logits are not finite."""
        held = self._session.tokens
        kind = self._random.choice(("new", "follow-up", "return"))
        if kind == "new" or len(held) < 64 or len(held) + 3 * _ANSWER > self._longest:
            kind, prompt = "new", self._text(self._random.randint(16, self._longest // 2))
        elif kind == "follow-up":
            prompt = [*held, *self._text(self._random.randint(1, _ANSWER))]
        else:
            prompt = [*held[: self._random.randint(32, len(held) - 1)], *self._text(_ANSWER // 2)]
        shared = self._session.reuse(prompt)
        logits = self._session.read(prompt[shared:])
        for _ in range(self._random.randint(1, _ANSWER)):
            assert logits is not None
            if not bool(torch.isfinite(logits).all()):
                raise ValueError(f"logits are not finite after {len(self._session.tokens)} tokens")
            logits = self._session.step(int(logits.argmax()))
            self.tokens += 1
        self.tokens += len(prompt) - shared
        return kind

    def _text(self, count: int) -> list[int]:
        start = self._random.randint(0, len(self._ids) - count)
        return self._ids[start : start + count]


def measure(
    loaded: Loaded, kv: KVCacheConfig | None, text: str, seconds: float, longest: int, progress: Progress
) -> dict[str, Any]:
    """Talk for so long; what was seen."""
    probe = windows_of(loaded, text, _PROBE_TOKENS, 1)[0][0]
    ids = encode_text(loaded.tokenizer, text)
    sampled: list[tuple[float, float]] = []
    on_device: list[tuple[float, float]] = []
    failures: list[str] = []
    kinds: dict[str, int] = {}
    probes: list[float] = []
    begin = said = time.monotonic()
    with enabled(loaded.model, kv) if kv is not None else nullcontext() as state:
        talk = Talk(Session(loaded.model, state), ids, longest, 0)
        rounds = 0
        while time.monotonic() - begin < seconds or not probes:
            if rounds % _PROBE_EVERY == 0:
                probes.append(_score(loaded, state, probe))
            try:
                kind = talk.round()
                kinds[kind] = kinds.get(kind, 0) + 1
            except Exception as error:  # a soak goes on and counts
                failures.append(f"round {rounds}: {type(error).__name__}: {error}")
            rounds += 1
            now, size = time.monotonic(), resident_mb()
            if size is not None:
                sampled.append((now - begin, size))
            if (held := device_mb(loaded.model.device)) is not None:
                on_device.append((now - begin, held))
            if now - said > 30:
                said = now
                passed = f"{now - begin:,.0f} of {seconds:,.0f} s"
                progress(f"{passed}, {rounds} rounds, {len(failures)} failures", min(1.0, (now - begin) / seconds))
    times, sizes = [at for at, _ in sampled], [size for _, size in sampled]
    return {
        "seconds": time.monotonic() - begin,
        "rounds": rounds,
        "kinds": kinds,
        "tokens": talk.tokens,
        "failures": failures,
        "probes": len(probes),
        "drift": max(abs(one - probes[0]) for one in probes) / abs(probes[0]),
        "warm_up_s": _WARM_UP * times[-1] if times else None,
        "rss_mb": thinned(sampled),
        "device_mb": thinned(on_device),
        "rss_mb_after_warm_up": next((s for t, s in sampled if t >= _WARM_UP * times[-1]), None),
        "rss_mb_end": sizes[-1] if sizes else None,
        "rss_mb_most": max(sizes, default=None),
        "rss_slope_mb_per_hour": slope_per_hour(times, sizes) if sizes else None,
        "device_mb_end": on_device[-1][1] if on_device else None,
        "device_slope_mb_per_hour": slope_per_hour(*map(list, zip(*on_device, strict=True))) if on_device else None,
    }


def _score(loaded: Loaded, state: EnabledModel | None, ids: Tensor) -> float:
    """Likelihood of the probe's second half through a cache of its own."""
    first = len(ids) // 2
    if state is None:
        return nll(stock_chunks(loaded.model, ids, first), ids)
    return nll(packed_chunks(loaded.model, state.new_cache(), ids, first), ids)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant eval soak`."""
    add_model_arguments(parser, "auto")
    parser.add_argument("--text", metavar="FILE", required=True, help="what is talked about, UTF-8")
    parser.add_argument("--kv", metavar="SPEC", default="iso3", help="the cache (default iso3)")
    parser.add_argument("--seconds", type=float, default=7200.0, metavar="N", help="how long (default 7200)")
    parser.add_argument("--longest", type=int, default=2048, metavar="N", help="tokens in a session (default 2048)")
    parser.add_argument("--slope", type=float, default=1.0, metavar="MB", help="growth an hour at most (default 1)")


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Soak as the options say; progress is told what is under way. It passes without failures, drift and, over half an
    hour or more, growth of memory.

    Raises RotaryQuantError with one clear line for a wrong input.
    """
    if args.seconds <= 0 or args.longest < 512 or args.slope <= 0:
        raise ConfigError(
            f"seconds={args.seconds:g}, longest={args.longest}, slope={args.slope:g}: need a positive time, 512 tokens "
            f"and a positive number of MB"
        )
    kv, text = parse_kv(args.kv), read_text(Path(args.text))
    loaded = load_model(args.model, args.dtype, args.threads, args.device)
    if len(encode_text(loaded.tokenizer, text)) < args.longest:
        raise ConfigError(f"--text {args.text}: shorter than the {args.longest} tokens of --longest")
    room = getattr(text_config(loaded.model), "max_position_embeddings", None)
    if room is not None and args.longest > room:
        raise ConfigError(f"longest={args.longest}: the model has {room} positions")
    seen = measure(loaded, kv, text, args.seconds, args.longest, progress)
    data = {
        **provenance(args.device),
        "model": model_name(args.model),
        "text": Path(args.text).name,
        "kv": spec_name(args.kv),
        **seen,
    }
    data["reasons"] = judge(seen, args.slope)
    return _outcome(data)


def judge(seen: dict[str, Any], slope: float) -> list[str]:
    """Reasons why a soak does not pass."""
    reasons = [f"{len(seen['failures'])} rounds failed, the first: {seen['failures'][0]}"] if seen["failures"] else []
    if seen["drift"] > 0:
        reasons.append(f"the probe's likelihood moved by {seen['drift']:.1e} of itself")
    for what, of in (("memory", "rss"), ("the device's memory", "device")):
        grown = seen[f"{of}_slope_mb_per_hour"]
        if grown is not None and grown > slope and seen["seconds"] >= _JUDGED_FROM:
            reasons.append(f"{what} grew by {grown:.1f} MB an hour, more than {slope:g}")
    return reasons


def _outcome(data: dict[str, Any]) -> Outcome:
    def megabytes(value: float | None) -> str:
        return "unknown" if value is None else f"{value:,.1f}"

    rows = [
        ["seconds", f"{data['seconds']:,.0f}"],
        ["rounds", f"{data['rounds']:,} ({', '.join(f'{count} {kind}' for kind, count in data['kinds'].items())})"],
        ["tokens", f"{data['tokens']:,}"],
        ["failures", f"{len(data['failures'])}"],
        ["drift of the probe", f"{data['drift']:.1e} over {data['probes']} readings"],
        ["resident MB after warm-up", megabytes(data["rss_mb_after_warm_up"])],
        ["resident MB at the end", megabytes(data["rss_mb_end"])],
        ["MB an hour", megabytes(data["rss_slope_mb_per_hour"])],
    ]
    if data["device_mb_end"] is not None:
        rows.append(["MB on the device at the end", megabytes(data["device_mb_end"])])
        rows.append(["MB on the device an hour", megabytes(data["device_slope_mb_per_hour"])])
    verdict = "; ".join(data["reasons"]) or "passes"
    lines = [f"{data['model']}, kv={data['kv']}: {verdict}"]
    return Outcome(
        data, ["", "seen"], rows, lines, not data["reasons"], soak_picture(data, data["seconds"] >= _JUDGED_FROM)
    )
