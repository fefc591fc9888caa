"""The quality gate: may a model with this cache go out? Twelve requests, answered greedily with both caches.

Three things are asked of each answer. It must not go round in circles (repetition), it must be JSON where JSON was
asked for, and, since a damaged model can sound fluent, the packed cache must agree with the exact one on what comes
next: the 16-bit answer is read back through the packed cache, and its mean KL divergence has a limit.
"""

import argparse
import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from rotaryquant.config import KVCacheConfig, spec_name
from rotaryquant.errors import ConfigError
from rotaryquant.evals.inputs import add_model_arguments, ids_tensor, load_model
from rotaryquant.evals.peers import parse_spec
from rotaryquant.evals.plots import gate_picture
from rotaryquant.evals.prompts import PROMPTS, GatePrompt
from rotaryquant.evals.simulated import Simulation, new_cache
from rotaryquant.evals.teacher_forcing import PathError, packed_chunks, reference_logits
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.enable import enabled
from rotaryquant.integrations.transformers.session import Session
from rotaryquant.integrations.transformers.tokens import chat_prompt, raw_prompt
from rotaryquant.measuring import Outcome, Progress, model_name, provenance

_GRAM = 4
_FENCE = re.compile(r"^```(?:json)?\s*\n(.*?)\n?```\s*$", re.DOTALL)


def repetition(ids: Sequence[int]) -> float:
    """Share of an answer's runs of four tokens that it has said before; 0 for fewer than five tokens."""
    grams = [tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


def is_json(text: str) -> bool:
    """Whether an answer is one JSON object or list, alone or in one code fence."""
    text = text.strip()
    fenced = _FENCE.match(text)
    try:
        return isinstance(json.loads(fenced.group(1) if fenced else text), dict | list)
    except ValueError:
        return False


@dataclass(frozen=True)
class Answer:
    """What a model said. ids: of the answer; ended: whether it stopped by itself."""

    ids: list[int]
    text: str
    ended: bool


@dataclass(frozen=True)
class Limits:
    """What an answer may do. repetition: share of runs said before. divergence: mean KL divergence in nats.

    strict: also where the 16-bit answer does it.
    """

    repetition: float = 0.22
    divergence: float = 0.05
    strict: bool = False


def prompt_ids(loaded: Loaded, prompt: GatePrompt) -> list[int]:
    """The request as the model reads it: through its chat template, or as it is."""
    config = loaded.model.config
    if loaded.tokenizer.chat_template:
        return chat_prompt(loaded.tokenizer, config, [{"role": "user", "content": prompt.text}]).ids
    return raw_prompt(loaded.tokenizer, config, prompt.text).ids


def answer(loaded: Loaded, ids: list[int], kv: KVCacheConfig | Simulation | None, tokens: int) -> Answer:
    """The greedy answer of up to `tokens` tokens to a prompt, through this cache."""
    config = kv.config if isinstance(kv, Simulation) else kv
    said: list[int] = []
    with enabled(loaded.model, config) if config is not None else nullcontext() as state:
        session = Session(loaded.model, state)
        if state is not None:
            assert kv is not None
            session.cache = new_cache(state, kv)
        logits = session.read(ids)
        while logits is not None and len(said) < tokens:
            token = int(logits.argmax())
            if token in loaded.end_ids:
                return Answer(said, str(loaded.tokenizer.decode(said)), True)
            said.append(token)
            logits = session.step(token) if len(said) < tokens else None
    return Answer(said, str(loaded.tokenizer.decode(said)), False)


def disagreement(
    loaded: Loaded, ids: list[int], said: list[int], kv: KVCacheConfig | Simulation
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """KL divergence and agreement on the most likely token at each position of an answer, and packed rows read.

    said: the 16-bit answer, which is read back behind its prompt. Both fp32 [tokens said].
    """
    whole, first = ids_tensor(loaded, [*ids, *said]), len(ids) - 1
    exact = reference_logits(loaded.model, whole, first).log_softmax(-1)
    reads, divergence, agree = 0, [], []
    with enabled(loaded.model, kv.config if isinstance(kv, Simulation) else kv) as state:
        assert state is not None
        for chunk in packed_chunks(loaded.model, new_cache(state, kv), whole, first):
            wanted = exact[chunk.begin - first : chunk.end - first]
            packed = chunk.logits.log_softmax(-1)
            divergence.append((wanted.exp() * (wanted - packed)).sum(-1))
            agree.append((wanted.argmax(-1) == packed.argmax(-1)).float())
            reads += chunk.reads.packed_reads
    return torch.cat(divergence), torch.cat(agree), reads


def judge(prompt: GatePrompt, row: dict[str, Any], limits: Limits) -> list[str]:
    """Reasons why an answer does not pass, as a reader wants them."""
    reasons = []
    allowed = limits.repetition if limits.strict else max(limits.repetition, row["exact_repetition"])
    if row["repetition"] > allowed:
        reasons.append(f"repetition {row['repetition']:.2f} > {allowed:.2f}")
    if prompt.json and not row["json"] and (limits.strict or row["exact_json"]):
        reasons.append("not JSON")
    if row["kld_mean"] > limits.divergence:
        reasons.append(f"divergence {row['kld_mean']:.3f} > {limits.divergence:g}")
    return reasons


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant eval gate`."""
    limits = Limits()
    add_model_arguments(parser, "float32")
    parser.add_argument("--kv", metavar="SPEC", default="iso3", help="ours or a simulated peer (default iso3)")
    parser.add_argument("--tokens", type=int, default=500, metavar="N", help="of each answer at most (default 500)")
    parser.add_argument(
        "--repetition", type=float, default=limits.repetition, metavar="SHARE",
        help=f"runs of four tokens said before (default {limits.repetition})",
    )  # fmt: skip
    parser.add_argument(
        "--divergence", type=float, default=limits.divergence, metavar="NATS",
        help=f"mean KL divergence of an answer (default {limits.divergence})",
    )  # fmt: skip
    parser.add_argument(
        "--strict", action="store_true", help="fail also where the 16-bit answer repeats or breaks JSON"
    )


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Judge as the options say; progress is told what is under way. The outcome says whether all passed.

    Raises RotaryQuantError with one clear line for a wrong input.
    """
    kv = parse_spec(args.kv)
    if kv is None:
        raise ConfigError(f"--kv {args.kv} packs nothing: the gate compares a packed cache with the 16-bit one")
    if args.tokens < 1 or not 0 <= args.repetition <= 1 or args.divergence <= 0:
        raise ConfigError(
            f"tokens={args.tokens}, repetition={args.repetition}, divergence={args.divergence}: need at least 1 token, "
            f"a share and a positive number of nats"
        )
    limits = Limits(args.repetition, args.divergence, args.strict)
    loaded = load_model(args.model, args.dtype, args.threads, args.device)
    rows = []
    for number, prompt in enumerate(PROMPTS):
        progress(f"prompt {number + 1} of {len(PROMPTS)}: {prompt.name}", number / len(PROMPTS))
        rows.append(one_prompt(loaded, prompt, kv, args.tokens, limits))
    if not any(row["packed_reads"] for row in rows):
        raise PathError(f"no answer was long enough to read packed rows ({args.tokens} tokens); raise --tokens")
    scored = sum(row["exact_tokens"] for row in rows)
    data = {
        **provenance(args.device),
        "model": model_name(args.model),
        "kv": spec_name(args.kv),
        "tokens": args.tokens,
        "limits": {"repetition": limits.repetition, "divergence": limits.divergence, "strict": limits.strict},
        "passed": not any(row["reasons"] for row in rows),
        # over tokens, not over answers: a short one must not count as much as a long one
        "kld_mean": sum(row["kld_mean"] * row["exact_tokens"] for row in rows) / scored,
        "top1": sum(row["top1"] * row["exact_tokens"] for row in rows) / scored,
        "results": rows,
    }
    return _outcome(data)


def one_prompt(
    loaded: Loaded, prompt: GatePrompt, kv: KVCacheConfig | Simulation, tokens: int, limits: Limits
) -> dict[str, Any]:
    """Both answers to a prompt, compared and judged."""
    ids = prompt_ids(loaded, prompt)
    exact, ours = (answer(loaded, ids, one, tokens) for one in (None, kv))
    if not exact.ids:
        raise ConfigError(
            f"prompt {prompt.name!r}: the 16-bit model ends at once; is this a chat model of this template?"
        )
    divergence, agree, reads = disagreement(loaded, ids, exact.ids, kv)
    same = next((i for i, (a, b) in enumerate(zip(exact.ids, ours.ids, strict=False)) if a != b), len(exact.ids))
    row: dict[str, Any] = {
        "prompt": prompt.name,
        "prompt_tokens": len(ids),
        "tokens": len(ours.ids),
        "exact_tokens": len(exact.ids),
        "ended": ours.ended,
        "same_tokens": same,
        "repetition": repetition(ours.ids),
        "exact_repetition": repetition(exact.ids),
        "json": is_json(ours.text) if prompt.json else None,
        "exact_json": is_json(exact.text) if prompt.json else None,
        "kld_mean": max(0.0, float(divergence.double().mean())),  # rounding may leave less than nothing
        "kld_max": float(divergence.max()),
        "top1": float(agree.mean()),
        "packed_reads": reads,
    }
    return row | {"reasons": judge(prompt, row, limits)}


def _outcome(data: dict[str, Any]) -> Outcome:
    def said(value: bool | None) -> str:
        return "" if value is None else "yes" if value else "no"

    headers = [
        "prompt",
        "verdict",
        "kld_mean",
        "top1",
        "same tokens",
        "tokens",
        "repetition",
        "16-bit",
        "JSON",
        "16-bit",
    ]
    rows = [
        [
            row["prompt"],
            "; ".join(row["reasons"]) or "passes",
            f"{row['kld_mean']:.4f}",
            f"{row['top1']:.3f}",
            f"{row['same_tokens']}",
            f"{row['tokens']}",
            f"{row['repetition']:.2f}",
            f"{row['exact_repetition']:.2f}",
            said(row["json"]),
            said(row["exact_json"]),
        ]
        for row in data["results"]
    ]
    failed = sum(bool(row["reasons"]) for row in data["results"])
    verdict = "passes" if data["passed"] else f"does not pass: {failed} of {len(rows)} prompts fail"
    lines = [
        f"{data['model']}, kv={data['kv']}: {verdict}",
        f"over all answers: kld_mean {data['kld_mean']:.4f}, top1 {data['top1']:.4f} (16-bit answers read back)",
    ]
    return Outcome(data, headers, rows, lines, data["passed"], gate_picture(data))
