"""Where a decode step's time goes, and so whether a packed cache can pay: attention over the cache, weights, experts.

The advice is the paper's: packing pays where attention takes more than a fifth of a step with a 16-bit cache.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from rotaryquant.config import KVCacheConfig, parse_kv, spec_name
from rotaryquant.errors import ConfigError
from rotaryquant.evals.inputs import add_model_arguments, load_model
from rotaryquant.evals.plots import profile_picture
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.enable import enabled
from rotaryquant.integrations.transformers.geometry import text_config
from rotaryquant.integrations.transformers.session import Session
from rotaryquant.measuring import Outcome, Progress, model_name, provenance
from rotaryquant.planning.speed import PAYS_ABOVE

_PARTS = ("attention", "weights", "experts", "rest")


def part_of(name: str, module: nn.Module) -> str | None:
    """What a module's own time is counted as; None where it belongs to what is around it.

    Time in an attention module outside its projections is that of the cache: rotary embedding, writing, softmax.
    """
    if name.split(".")[-1] == "experts":
        return "experts"
    if isinstance(module, nn.Linear):
        return "weights"
    return "attention" if "Attention" in type(module).__name__ else None


def _now(device: torch.device) -> float:
    """Seconds, once all that an accelerator was given to do is done.

    On a CPU with one thread they are those of this process: what others do on the machine is then no part of a step.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


class _Watch:
    """Time of nested modules, each without what its watched children take. device: where they run."""

    def __init__(self, device: torch.device) -> None:
        self.spent: dict[str, float] = {}
        self._device = device
        self._open: list[list[float]] = []  # start, and what children took

    def enter(self) -> None:
        self._open.append([_now(self._device), 0.0])

    def leave(self, part: str) -> None:
        start, inside = self._open.pop()
        taken = _now(self._device) - start
        self.spent[part] = self.spent.get(part, 0.0) + taken - inside
        if self._open:
            self._open[-1][1] += taken


@contextmanager
def watched(model: nn.Module) -> Iterator[_Watch]:
    """Time the model's parts for the length of a `with` block. An accelerator is waited for at each of their ends."""
    watch, handles = _Watch(next(model.parameters()).device), []
    for name, module in model.named_modules():
        part = part_of(name, module)
        if part is None or (part == "weights" and ".experts." in f".{name}."):
            continue
        handles.append(module.register_forward_pre_hook(lambda *_: watch.enter()))
        handles.append(module.register_forward_hook(lambda *_, part=part: watch.leave(part)))
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def measure(
    loaded: Loaded, ids: list[int], specs: Mapping[str, KVCacheConfig | None], steps: int, progress: Progress
) -> dict[str, dict[str, float]]:
    """Milliseconds of a step after a prompt and of its parts, for each cache: of `steps` greedy ones, which the caches
    take in turns, the one in the middle by time. One step before them is not timed. The parts add up to the step.
    """
    sessions: dict[str, Session] = {}
    tokens: dict[str, int] = {}
    for name, kv in specs.items():
        with enabled(loaded.model, kv) if kv is not None else nullcontext() as state:
            sessions[name] = Session(loaded.model, state)
            logits = sessions[name].read(ids)
            assert logits is not None
            tokens[name] = int(sessions[name].step(int(logits.argmax())).argmax())
    found: dict[str, list[tuple[float, dict[str, float]]]] = {name: [] for name in specs}
    with watched(loaded.model) as watch:
        for number in range(steps):
            progress(f"step {number + 1} of {steps} after {len(ids):,} tokens", number / steps)
            for name, kv in specs.items():
                with enabled(loaded.model, kv) if kv is not None else nullcontext():
                    watch.spent.clear()
                    start = _now(loaded.model.device)
                    tokens[name] = int(sessions[name].step(tokens[name]).argmax())  # which waits for the device
                    step, spent = _now(loaded.model.device) - start, dict(watch.spent)
                found[name].append((step, {**spent, "rest": step - sum(spent.values())}))
    result = {}
    for name, samples in found.items():
        step, parts = sorted(samples, key=lambda one: one[0])[len(samples) // 2]
        result[name] = {"step": step * 1e3, **{part: parts.get(part, 0.0) * 1e3 for part in _PARTS}}
    return result


def advice(exact: dict[str, float], packed: dict[str, float], kv: str, tokens: int) -> str:
    """One sentence: whether packing pays here."""
    share = exact["attention"] / exact["step"]
    side = "above" if share > PAYS_ABOVE else "not above"
    pays = "pays" if share > PAYS_ABOVE else "saves memory more than time"
    return (
        f"attention takes {share:.0%} of a step after {tokens:,} tokens with a 16-bit cache, {side} the "
        f"{PAYS_ABOVE:.0%} where packing pays in time: here it {pays}; measured, a step with kv={kv} is "
        f"{exact['step'] / packed['step']:.2f} times as fast"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant eval profile`."""
    add_model_arguments(parser, "auto")
    parser.add_argument("--kv", metavar="SPEC", default="iso3", help="the packed cache (default iso3)")
    parser.add_argument("--context", type=int, default=2048, metavar="N", help="tokens read first (default 2048)")
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="steps timed (default 32)")


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Profile as the options say; progress is told what is under way.

    Raises RotaryQuantError with one clear line for a wrong input.
    """
    kv, name = parse_kv(args.kv), spec_name(args.kv)
    if kv is None:
        raise ConfigError(f"--kv {args.kv} packs nothing: the 16-bit cache is measured beside it anyway")
    if args.context < 1 or args.steps < 1:
        raise ConfigError(f"context={args.context}, steps={args.steps}: need at least 1 of each")
    loaded = load_model(args.model, args.dtype, args.threads, args.device)
    room = getattr(text_config(loaded.model), "max_position_embeddings", None)
    if room is not None and args.context + args.steps + 1 > room:
        raise ConfigError(
            f"context={args.context} and {args.steps} steps need {args.context + args.steps + 1} positions, the model "
            f"has {room}"
        )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(text_config(loaded.model).vocab_size, (args.context,), generator=generator).tolist()
    progress(f"{args.context:,} tokens, then {args.steps} steps with each cache in turns")
    found = measure(loaded, ids, {"fp16": None, name: kv}, args.steps, progress)
    data = {
        **provenance(args.device),
        "model": model_name(args.model),
        "context": args.context,
        "steps": args.steps,
        "threads": torch.get_num_threads(),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "attention_share": found["fp16"]["attention"] / found["fp16"]["step"],
        "advice": advice(found["fp16"], found[name], name, args.context),
        "results": [{"kv": name, **{f"{part}_ms": ms for part, ms in times.items()}} for name, times in found.items()],
    }
    rows = [
        [name, f"{times['step']:.1f}", *(f"{times[part]:.1f} ({times[part] / times['step']:.0%})" for part in _PARTS)]
        for name, times in found.items()
    ]
    lines = [f"{data['model']}: {data['advice']}"]
    return Outcome(data, ["kv", "step ms", *_PARTS], rows, lines, picture=profile_picture(data, _PARTS))
