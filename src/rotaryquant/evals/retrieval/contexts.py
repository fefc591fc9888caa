"""Contexts of an exact length: real text with facts at stated depths, checked before a model sees them."""

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from rotaryquant.errors import ConfigError, RotaryQuantError
from rotaryquant.evals.inputs import ids_tensor
from rotaryquant.evals.retrieval.forms import Form
from rotaryquant.evals.retrieval.questions import Draft, Fact, Question
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.geometry import text_config
from rotaryquant.integrations.transformers.tokens import encode_text, raw_prompt

#: Tokens of filler between the last fact and the question: more than a cache keeps exact, so that facts are packed.
MARGIN = 128
#: Tokens that an answer gets beyond the longest right one: enough to show that it goes on, which makes it wrong.
SPARE = 4

_SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z\"'])")


class RetrievalError(RotaryQuantError):
    """A context that would not test what it claims to."""


@dataclass(frozen=True)
class Context:
    """A context and its questions.

    ids: int64 [tokens], on the model's device. first, last: positions between which all wanted values stand. limit:
    tokens of an answer.
    """

    ids: Tensor
    questions: list[Question]
    first: int
    last: int
    limit: int


class Filler:
    """Sentences of a real text and how many tokens each takes, its line end included.

    Raises ConfigError where the text has none.
    """

    def __init__(self, loaded: Loaded, text: str) -> None:
        parts = [part.strip() for line in text.splitlines() for part in _SENTENCE.split(line)]
        self.sentences = [part for part in parts if len(part) > 20]
        if not self.sentences:
            raise ConfigError("--text: no line of more than 20 characters to fill contexts with")
        self._loaded = loaded
        self._tokens: dict[str, int] = {}

    def tokens(self, line: str) -> int:
        """Tokens that a line adds to a text."""
        if line not in self._tokens:
            self._tokens[line] = len(encode_text(self._loaded.tokenizer, f"{line}\n"))
        return self._tokens[line]

    def take(self, tokens: int, start: int, unique: frozenset[str]) -> Iterator[str]:
        """Sentences from number `start` on, round and round once, that fill `tokens` tokens.

        Those that hold a phrase of `unique` are left out, and those that no longer fit.
        """
        held = re.compile("|".join(rf"\b{re.escape(phrase)}\b" for phrase in sorted(unique)), re.IGNORECASE)
        start %= len(self.sentences)
        for sentence in self.sentences[start:] + self.sentences[:start]:
            if tokens < 8:
                return
            if self.tokens(sentence) <= tokens and not held.search(sentence):
                tokens -= self.tokens(sentence)
                yield sentence


def build_context(loaded: Loaded, form: Form, filler: Filler, draft: Draft, length: int, start: int) -> Context:
    """A context that takes `length` tokens (at most 3% fewer) with its longest question and answer.

    start: number of the first sentence of filler. Raises RetrievalError where the length is off, or where a key or
    value is elsewhere than in its facts.
    """
    tokenizer = loaded.tokenizer
    limit = SPARE + max(
        len(encode_text(tokenizer, f" {value}.")) for question in draft.questions for value in question.wanted
    )
    room = length - max(_tail_tokens(loaded, form, question, limit) for question in draft.questions)
    fixed = count_tokens(loaded, form.head("x")) + sum(filler.tokens(fact.text) for fact in draft.facts)
    sentences = list(filler.take(room - fixed, start, draft.unique))
    body = "\n".join(_placed(sentences, draft.facts, filler))
    head = form.head(body)
    ids = raw_prompt(tokenizer, loaded.model.config, head).ids
    if not 0.97 * room <= len(ids) <= room:
        raise RetrievalError(
            f"context={length}: the text came out at {len(ids)} tokens where {room} were wanted; the facts take "
            f"{fixed}, and the filler must have enough for the rest"
        )
    check_unique(str(tokenizer.decode(ids)), draft)
    wanted = {value for question in draft.questions for value in question.wanted}
    begins, ends = min(map(head.index, wanted)), max(head.rindex(value) + len(value) for value in wanted)
    first, last = (count_tokens(loaded, head[:at]) for at in (begins, ends))
    return Context(ids_tensor(loaded, ids), draft.questions, first, last, limit)


def count_tokens(loaded: Loaded, text: str) -> int:
    """Tokens of a text as a model reads it, BOS included."""
    return len(raw_prompt(loaded.tokenizer, loaded.model.config, text).ids)


def _tail_tokens(loaded: Loaded, form: Form, question: Question, limit: int) -> int:
    """Tokens that a question takes with all of its answers, each as long as it may be."""
    turns = [turn.after(question.wanted) for turn in question.turns]
    tail = form.tail(turns, question.wanted[:-1])
    return len(encode_text(loaded.tokenizer, tail)) + limit * len(question.turns)


def _placed(sentences: Sequence[str], facts: Sequence[Fact], filler: Filler) -> list[str]:
    """Filler with each fact where its share of the tokens lies before it, the last `MARGIN` tokens not counted."""
    ends = [0, *accumulate(filler.tokens(sentence) for sentence in sentences)]
    span = ends[-1] - MARGIN
    places = []
    for fact in facts:
        target = fact.depth * span
        after = bisect.bisect_right(ends, target)
        nearest = min((at for at in (after - 1, after) if at < len(ends)), key=lambda at: abs(ends[at] - target))
        places.append(nearest if ends[nearest] <= span else nearest - 1)
    lines = list(sentences)
    for place, fact in reversed(list(zip(places, facts, strict=True))):
        lines.insert(max(place, 0), fact.text)
    return lines


def check_unique(text: str, draft: Draft) -> None:
    """Raise RetrievalError unless every key and value is in the text as often as facts state it, and no more.

    text: the context as its tokens spell it. Whole words count: a number in a longer one is another number.
    """
    for phrase in sorted(draft.unique):
        pattern = re.compile(rf"\b{re.escape(phrase)}\b", re.IGNORECASE)
        stated = sum(len(pattern.findall(fact.text)) for fact in draft.facts)
        if (found := len(pattern.findall(text))) != stated or not stated:
            raise RetrievalError(
                f"{phrase!r} is {found} times in the context and {stated} times in its facts; the answer to a "
                f"question would mean nothing"
            )


def check_length(loaded: Loaded, contexts: Sequence[int]) -> None:
    """Raise ConfigError for a context that is longer than the model's positions."""
    most = getattr(text_config(loaded.model), "max_position_embeddings", None)
    for context in contexts:
        if most is not None and context > most:
            raise ConfigError(f"--context {context}: this model has {most} positions")
