"""Questions answered from a context that is read and packed once: each on a copy of its cache, several in a batch.

Every forward behind a packed context is proved: each packed layer must have read exactly the packed rows that a query
at its position sees. Nothing is reported of a run that read others.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from rotaryquant.config import KVCacheConfig
from rotaryquant.evals.retrieval.contexts import Context
from rotaryquant.evals.retrieval.forms import Form
from rotaryquant.evals.simulated import Simulation, new_cache
from rotaryquant.evals.teacher_forcing import PathError, check_reads, packed_reads
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.chunks import still_chunks
from rotaryquant.integrations.transformers.enable import enabled
from rotaryquant.integrations.transformers.report import layer_bits
from rotaryquant.integrations.transformers.session import Session
from rotaryquant.integrations.transformers.tokens import encode_text
from rotaryquant.kv.accounting import LayerBits


@dataclass
class Said:
    """What was answered to one question. answers: one a turn. packed_reads: rows read as codes, over all turns."""

    answers: list[str] = field(default_factory=list)
    packed_reads: int = 0


@dataclass(frozen=True)
class Answered:
    """All questions of a context, and what the cache was. layers: its packed layers, none in a 16-bit run."""

    said: list[Said]
    layers: list[LayerBits]
    summary: str


@dataclass
class _Running:
    """One answer in the making. banned: tokens that it may not begin with; begun: that it did begin with."""

    banned: set[int]
    ids: list[int] = field(default_factory=list)
    begun: int | None = None
    done: bool = False
    packed_reads: int = 0


def ask(
    loaded: Loaded, form: Form, context: Context, kv: KVCacheConfig | Simulation | None, batch: int = 8
) -> Answered:
    """Read the context once, then ask each question on a copy of its cache. kv: None for the 16-bit control.

    batch: questions of equal length that are answered at once. Raises PathError where a wanted value is not among
    packed rows, or where an answer reads other packed rows than it must.
    """
    with reading(loaded, context.ids, kv) as (cache, summary):
        if isinstance(cache, PackedCache):
            check_packed(cache, context)
        said = [Said() for _ in context.questions]
        begun: list[set[int]] = [set() for _ in context.questions]
        for turn in range(max(len(question.turns) for question in context.questions)):
            asked = [at for at, question in enumerate(context.questions) if turn < len(question.turns)]
            prompts = []
            for at in asked:
                answers = said[at].answers
                turns = [one.after(answers[:number]) for number, one in enumerate(context.questions[at].turns)]
                prompts.append(encode_text(loaded.tokenizer, form.tail(turns[: turn + 1], answers)))
            banned = [begun[at] if context.questions[at].distinct else set() for at in asked]
            for at, one in zip(asked, complete(loaded, cache, context, prompts, banned, batch), strict=True):
                said[at].answers.append(_text(loaded, one))
                said[at].packed_reads += one.packed_reads
                begun[at] |= {one.begun} if one.begun is not None else set()
        layers = layer_bits(cache) if isinstance(cache, PackedCache) else []
    return Answered(said, layers, summary)


@contextmanager
def reading(loaded: Loaded, ids: Tensor, kv: KVCacheConfig | Simulation | None) -> Iterator[tuple[Cache, str]]:
    """The cache of a context that was read as a prompt is, and in a line what is in force.

    The model is in inference mode, and enabled where `kv` is packed, until the block ends.
    """
    config = kv.config if isinstance(kv, Simulation) else kv
    with torch.inference_mode(), enabled(loaded.model, config) if config is not None else nullcontext() as state:
        session = Session(loaded.model, state)
        if state is not None:
            assert kv is not None
            session.cache = new_cache(state, kv)
        session.read(ids.tolist())
        assert session.cache is not None
        summary = "kv=fp16: nothing packed"
        if state is not None:
            count = len([layer for layer in state.geometry if layer.packable])
            summary = kv.summary(count) if isinstance(kv, Simulation) else state.report().summary()
        yield session.cache, summary


def check_packed(cache: PackedCache, context: Context) -> None:
    """Raise PathError unless all wanted values are among the packed rows of every packed layer."""
    for layer in cache.packed_layers():
        packed = layer.rows[0].packed_len if layer.rows else 0
        if context.first < cache.kv.sinks or context.last > packed:
            raise PathError(
                f"kv={cache.kv.name}: layer {layer.layer} has packed positions {cache.kv.sinks}..{packed - 1} of "
                f"{len(context.ids)}, and what is asked stands at {context.first}..{context.last - 1}; the result "
                f"would not measure the packed cache"
            )


def complete(
    loaded: Loaded,
    cache: Cache,
    context: Context,
    prompts: Sequence[list[int]],
    banned: Sequence[set[int]],
    batch: int,
) -> list[_Running]:
    """Greedy answers to prompts behind the context, each up to the end of its line. `cache` stays as it is.

    banned: for each prompt, tokens with which its answer may not begin.
    """
    done: list[_Running] = [_Running(tokens) for tokens in banned]
    lengths: dict[int, list[int]] = {}
    for at, prompt in enumerate(prompts):
        lengths.setdefault(len(prompt), []).append(at)
    for together in lengths.values():
        for begin in range(0, len(together), batch):
            part = together[begin : begin + batch]
            own = copy.deepcopy(cache)
            if len(part) > 1:
                own.batch_repeat_interleave(len(part))
            _decode(loaded, own, context, [prompts[at] for at in part], [done[at] for at in part])
    return done


def _decode(loaded: Loaded, cache: Cache, context: Context, prompts: list[list[int]], running: list[_Running]) -> None:
    """Answer prompts of one length together; the cache has a row for each."""
    device, position = loaded.model.device, len(context.ids)
    ids = torch.tensor(prompts, device=device)
    while True:
        logits = _forward(loaded.model, cache, ids, position, running)
        position += ids.shape[1]
        for row, one in zip(logits, running, strict=True):
            if one.begun is None and one.banned:
                row[list(one.banned)] = -torch.inf
        chosen = logits.argmax(-1)
        for token, one in zip(chosen.tolist(), running, strict=True):
            if not one.done:
                _take(loaded, one, token, context.limit)
        if all(one.done for one in running):
            return
        ids = chosen[:, None]


def _forward(model: Any, cache: Cache, ids: Tensor, position: int, running: list[_Running]) -> Tensor:
    """Logits fp32 [rows, vocab] behind `ids`, int64 [rows, tokens], of which the first stands at `position`.

    Read in chunks within which nothing is packed, so that a prompt sees what it would see token by token.
    """
    packed = cache if isinstance(cache, PackedCache) else None
    logits = ids
    for begin, end in still_chunks(position, position + ids.shape[1], packed.kv if packed is not None else None):
        before = packed_reads(packed) if packed is not None else []
        part = ids[:, begin - position : end - position]
        logits = model(part, cache=cache, logits_to_keep=1).logits[:, -1]
        if packed is None:
            continue
        check_reads(packed, before, begin, end, len(ids))
        reads = (sum(packed_reads(packed)) - sum(before)) // len(ids)
        if reads == 0:
            raise PathError("an answer read no packed row; the result would not measure the packed cache")
        for one in running:
            one.packed_reads += 0 if one.done else reads
    return logits.float()


def _take(loaded: Loaded, one: _Running, token: int, limit: int) -> None:
    """Add a token to an answer, or end it: at an end token, behind its line, or where no right one is as long."""
    if token in loaded.end_ids:
        one.done = True
        return
    one.ids.append(token)
    text = str(loaded.tokenizer.decode(one.ids))
    if one.begun is None and text.strip():
        one.begun = token
    one.done = "\n" in text.lstrip() or len(one.ids) >= limit


def _text(loaded: Loaded, one: _Running) -> str:
    return str(loaded.tokenizer.decode(one.ids)).strip().split("\n")[0].strip()
