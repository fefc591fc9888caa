"""Facts retrieved from a packed context: the context is packed first, each question comes in a second forward.

Several facts (a name and a random number each) stand at several depths of real text. The same prompts go through
an uncompressed cache as a control, and an answer counts only if it is exactly the number.
"""

import argparse
import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from rotaryquant.config import KVCacheConfig, parse_kv, spec_name
from rotaryquant.errors import ConfigError, RotaryQuantError
from rotaryquant.evals.inputs import add_loading_arguments, ids_tensor, load_model
from rotaryquant.evals.teacher_forcing import PathError
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.enable import enabled
from rotaryquant.integrations.transformers.tokens import chat_prompt, encode_text
from rotaryquant.measuring import Outcome, model_name, provenance, read_text

_COLORS = ("amber", "azure", "coral", "crimson", "emerald", "golden", "indigo", "ivory", "jade", "lilac")
_ANIMALS = ("badger", "condor", "falcon", "gecko", "heron", "ibis", "jackal", "kestrel", "lynx", "marten")
_DIGITS = 7
_ANSWER_TOKENS = 48


class NeedleError(RotaryQuantError):
    """A prompt that would not test what it claims to."""


@dataclass(frozen=True)
class Needle:
    """One fact. name: "amber falcon". code: seven digits. depth: place in the context, 0 to 1."""

    name: str
    code: str
    depth: float

    @property
    def sentence(self) -> str:
        """The fact as the context states it."""
        return f"The secret code of the {self.name} is {self.code}."


@dataclass(frozen=True)
class Haystack:
    """A context and its questions. ids: int64 [tokens]; questions: int64 [tokens] each, asked on their own; on the
    model's device.
    """

    ids: Tensor
    needles: list[Needle]
    questions: list[Tensor]


@dataclass
class Answers:
    """What one configuration answered. found: for each question whether the answer was exact."""

    found: list[bool]
    texts: list[str]
    packed_reads: list[int]


def normalize(answer: str) -> str:
    """An answer without white space, case and closing punctuation around it."""
    return answer.strip().rstrip(".!,;:").strip().casefold()


def is_exact(answer: str, needle: Needle) -> bool:
    """Whether an answer is the code, or the whole sentence with it, and nothing else."""
    return normalize(answer) in (normalize(needle.code), normalize(needle.sentence))


def build_haystack(loaded: Loaded, lines: list[str], context: int, needles: int, rng: random.Random) -> Haystack:
    """Text of `context` tokens (at most 3% fewer) with facts on lines of their own at even depths.

    lines: filler. Raises NeedleError where a fact did not survive or the length is off, ConfigError where there is
    too little filler.
    """
    names = rng.sample([f"{color} {animal}" for color in _COLORS for animal in _ANIMALS], needles)
    facts = [
        Needle(name, "".join(rng.choices("0123456789", k=_DIGITS)), (index + 0.5) / needles)
        for index, name in enumerate(names)
    ]
    sentences = [fact.sentence for fact in facts]
    tokenizer, config = loaded.tokenizer, loaded.model.config
    overhead = sum(len(encode_text(tokenizer, f"{sentence}\n")) for sentence in sentences) + 16
    body, used = [], 0
    for line in lines:
        used += (size := len(encode_text(tokenizer, f"{line}\n")))
        if used > context - overhead:
            used -= size
            continue  # a shorter line may still fit
        body.append(line)
        if context - overhead - used < 8:
            break
    for fact, sentence in reversed(list(zip(facts, sentences, strict=True))):
        body.insert(round(fact.depth * len(body)), sentence)
    filler = {"role": "user", "content": "\n".join(body)}
    whole = chat_prompt(tokenizer, config, [filler, {"role": "user", "content": "?"}]).text
    head = whole[: whole.index(filler["content"]) + len(filler["content"])] + "\n"
    ids = encode_text(tokenizer, head)
    if not context * 0.97 <= len(ids) <= context:
        raise NeedleError(f"context={context}: the prompt came out at {len(ids)} tokens; the filler text is too short")
    decoded = tokenizer.decode(ids)
    for sentence in sentences:
        if sentence not in decoded:
            raise NeedleError(f"{sentence!r} is not in the tokenized context; a miss would mean nothing")
    tail = chat_prompt(tokenizer, config, [{"role": "user", "content": "?"}]).text
    questions = [
        ids_tensor(loaded, encode_text(tokenizer, tail.replace("?", f"What is the secret code of the {fact.name}?", 1)))
        for fact in facts
    ]
    return Haystack(ids_tensor(loaded, ids), facts, questions)


def ask(loaded: Loaded, haystack: Haystack, kv: KVCacheConfig | None) -> Answers:
    """Read the context once, then ask each question on a copy of its cache. kv: None for the 16-bit control.

    Raises PathError where a packed run answered without reading packed rows.
    """
    answers = Answers([], [], [])
    model = loaded.model
    with torch.inference_mode(), enabled(model, kv) if kv is not None else nullcontext() as state:
        context: Cache = state.new_cache() if state is not None else DynamicCache(config=model.config)
        with context.prefill() if isinstance(context, PackedCache) else nullcontext():
            model(haystack.ids[None], cache=context, logits_to_keep=1)
        for needle, question in zip(haystack.needles, haystack.questions, strict=True):
            cache = copy.deepcopy(context)
            before = context.counters if isinstance(context, PackedCache) else None
            text = _answer(loaded, cache, question)
            answers.texts.append(text)
            answers.found.append(is_exact(text, needle))
            if before is not None and isinstance(cache, PackedCache):
                reads = cache.counters.since(before).packed_reads
                if reads == 0:
                    raise PathError("an answer read no packed row; the result would not measure the packed cache")
                answers.packed_reads.append(reads)
    return answers


def _answer(loaded: Loaded, cache: Cache, question: Tensor) -> str:
    """Greedy answer up to the end of its line."""
    tokenizer, ends = loaded.tokenizer, loaded.end_ids
    logits = loaded.model(question[None], cache=cache, logits_to_keep=1).logits
    ids: list[int] = []
    while len(ids) < _ANSWER_TOKENS:
        token = int(logits[0, -1].argmax())
        if token in ends:
            break
        ids.append(token)
        if "\n" in str(tokenizer.decode(ids)).lstrip():
            break
        logits = loaded.model(ids_tensor(loaded, [token])[None], cache=cache, logits_to_keep=1).logits
    return str(tokenizer.decode(ids)).strip().split("\n")[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant eval needle`."""
    parser.add_argument("model", metavar="MODEL", help="a chat model: folder, .gguf file or hub id")
    parser.add_argument("--kv", metavar="SPEC", action="append", help="repeat to compare; default iso3")
    parser.add_argument("--text", metavar="FILE", required=True, help="filler, UTF-8, one paragraph a line")
    parser.add_argument("--context", type=int, default=2048, metavar="N", help="tokens packed first (default 2048)")
    parser.add_argument("--questions", type=int, default=100, metavar="N", help="at least (default 100)")
    parser.add_argument("--needles", type=int, default=8, metavar="N", help="facts in one context (default 8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of names, numbers and filler")
    add_loading_arguments(parser, "auto")


def run(args: argparse.Namespace, progress: Callable[[str], None]) -> Outcome:
    """Ask as the options say, through the control and each configuration; progress is told what is under way."""
    specs: dict[str, KVCacheConfig | None] = {"fp16": None}
    specs |= {spec_name(spec): parse_kv(spec) for spec in args.kv or ["iso3"]}
    if not 1 <= args.needles <= 64 or args.questions < 1 or args.context < 256:
        raise ConfigError(
            f"needles={args.needles}, questions={args.questions}, context={args.context}: need 1 to 64, at least 1, "
            f"at least 256"
        )
    lines = [line.strip() for line in read_text(Path(args.text)).splitlines() if len(line.strip()) > 40]
    loaded = load_model(args.model, args.dtype, args.threads, args.device)
    rng = random.Random(args.seed)  # noqa: S311 - a reproducible draw, not a secret
    contexts = -(-args.questions // args.needles)
    total = {name: Answers([], [], []) for name in specs}
    length = 0
    for number in range(contexts):
        shift = rng.randrange(len(lines))
        haystack = build_haystack(loaded, lines[shift:] + lines[:shift], args.context, args.needles, rng)
        length = max(length, len(haystack.ids))
        for name, kv in specs.items():
            progress(f"context {number + 1} of {contexts}: {name}")
            one = ask(loaded, haystack, kv)
            total[name].found += one.found
            total[name].texts += one.texts
            total[name].packed_reads += one.packed_reads
    return _outcome(args, total, length)


def _outcome(args: argparse.Namespace, total: dict[str, Answers], length: int) -> Outcome:
    results, rows = [], []
    for name, answers in total.items():
        reads = sum(answers.packed_reads) / len(answers.packed_reads) if answers.packed_reads else 0.0
        found, asked = sum(answers.found), len(answers.found)
        results.append({"kv": name, "found": found, "questions": asked, "packed_reads_per_answer": reads})
        rows.append([name, f"{found}/{asked}", f"{reads:,.0f}"])
    data: dict[str, Any] = {
        **provenance(args.device),
        "model": model_name(args.model),
        "text": Path(args.text).name,
        "context": args.context,
        "context_tokens": length,
        "needles": args.needles,
        "seed": args.seed,
        "results": results,
    }
    lines = [f"{data['model']}: {args.needles} facts in each context of {length:,} tokens of {data['text']}"]
    return Outcome(data, ["kv", "exact answers", "packed reads per answer"], rows, lines)
