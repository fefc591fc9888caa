"""A language model with a packed KV cache, ready to talk: joins checkpoint, tokenizer, cache and sampling."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from rotaryquant.config import KVCacheConfig, parse_kv
from rotaryquant.errors import ConfigError
from rotaryquant.integrations.sources import name_of
from rotaryquant.integrations.transformers.checkpoints import (
    Loaded,
    load_folder,
    model_folder,
    parse_device,
    parse_dtype,
)
from rotaryquant.integrations.transformers.detokenize import StopText, StreamDecoder
from rotaryquant.integrations.transformers.enable import EnabledModel, enable
from rotaryquant.integrations.transformers.geometry import text_config
from rotaryquant.integrations.transformers.session import Session
from rotaryquant.integrations.transformers.tokens import Prompt, chat_prompt, raw_prompt
from rotaryquant.sampling import Sampler, SamplingOptions

Messages = Sequence[Mapping[str, Any]]


@dataclass
class Usage:
    """What an answer took.

    prompt_tokens: of the whole prompt; reused_tokens of them were in the cache already. completion_tokens: chosen
    so far, an end-of-sequence token included. prompt_seconds: reading and packing the prompt. decode_seconds: the
    steps after it, of which there are decode_steps.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0
    decode_steps: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0

    def as_dict(self) -> dict[str, int | float]:
        """Plain data for reports."""
        return asdict(self)


@dataclass(frozen=True)
class Completion:
    """A whole answer. finish_reason: as of `TextStream`."""

    text: str
    finish_reason: str
    usage: Usage


class TextStream(Iterator[str]):
    """Pieces of an answer as they come; no piece cuts a character.

    finish_reason: None while it runs, then "stop" (an end token or stop text), "length" (max_tokens, or the
    model's context is full) or "cancelled". prompt: as the model reads it. ids: the tokens chosen. seed: in use.
    """

    def __init__(
        self, llm: "LLM", prompt: Prompt, max_tokens: int, sampler: Sampler, stops: Sequence[str], reuse: bool
    ) -> None:
        self.prompt = prompt
        self.seed = sampler.seed
        self.usage = Usage(prompt_tokens=len(prompt.ids))
        self.finish_reason: str | None = None
        self.ids: list[int] = []
        self._llm = llm
        self._reuse = reuse
        self._sampler = sampler
        self._room = min(max_tokens, llm.max_context - len(prompt.ids))
        self._decoder = StreamDecoder(llm.tokenizer)
        self._stops = StopText(stops)
        self._cancelled = False
        self._pieces = self._run()

    def __next__(self) -> str:
        if self.finish_reason is None and self._llm.current is not self:
            raise ConfigError("this stream was overtaken by a later one of the same LLM; finish one before the next")
        return next(self._pieces)

    def cancel(self) -> None:
        """Stop at the next token or prompt chunk; what was said until then stays in the cache."""
        self._cancelled = True

    def _run(self) -> Iterator[str]:
        yield from filter(None, map(self._stops.push, self._decoded()))
        if rest := self._stops.push(self._decoder.flush()) + self._stops.flush():
            yield rest

    def _decoded(self) -> Iterator[str]:
        """Text of each token, until there is a reason to finish."""
        session, usage, begin = self._llm.session, self.usage, perf_counter()
        if self._reuse:
            usage.reused_tokens = session.reuse(self.prompt.ids)
        else:
            session.forget()
        logits = session.read(self.prompt.ids[usage.reused_tokens :], lambda: self._cancelled)
        usage.prompt_seconds = perf_counter() - begin
        while logits is not None and not self._cancelled:
            token = self._sampler.choose(logits)
            usage.completion_tokens += 1
            if token in self._llm.end_ids:
                self.finish_reason = "stop"
                return
            self.ids.append(token)
            # decided before the text is handed over, so that a reader of the last piece already knows
            full = usage.completion_tokens >= self._room
            yield self._decoder.push(token)
            if self._stops.found:
                self.finish_reason = "stop"
                return
            if full:
                self.finish_reason = "length"
                return
            begin = perf_counter()
            logits = session.step(token)
            usage.decode_seconds += perf_counter() - begin
            usage.decode_steps += 1
        self.finish_reason = "cancelled"


class LLM:
    """A loaded model with its tokenizer and its cache.

    enabled: the packed cache's state, None with kv=fp16. max_context: tokens that prompt and answer may have
    together. end_ids: tokens that end an answer. session: the sequence in the cache. One stream at a time.
    """

    def __init__(self, loaded: Loaded, kv: str | KVCacheConfig = "iso3") -> None:
        self.name, self.folder = loaded.name, loaded.folder
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.enabled: EnabledModel | None = enable(loaded.model, kv)
        self.config = text_config(loaded.model)
        self.max_context = int(getattr(self.config, "max_position_embeddings", 0) or 0) or (1 << 62)
        self.end_ids = loaded.end_ids
        self.session = Session(loaded.model, self.enabled)
        self.current: TextStream | None = None

    @classmethod
    def load(
        cls,
        model: str | None = None,
        *,
        kv: str | KVCacheConfig = "iso3",
        dtype: str = "auto",
        device: str = "cpu",
        threads: int | None = None,
        notify: Callable[[str], None] = lambda message: None,
        check: Callable[[Path], None] = lambda folder: None,
    ) -> "LLM":
        """Find, check and load a model.

        model: None for the embedded default, a folder, a .gguf file, or a hub id. kv: a `--kv` SPEC. dtype: "auto"
        (the checkpoint's), "bfloat16", "float16" or "float32". threads: of torch, for the whole process. notify:
        told in words what takes long. check: given the folder before anything of it is loaded, may refuse it.
        Raises ConfigError, ModelFileError or UnsupportedModel.
        """
        parse_kv(kv)  # what is misspelt is refused before minutes of loading
        parse_dtype(dtype)
        parse_device(device)
        if threads is not None:
            if threads < 1:
                raise ConfigError(f"threads={threads} must be at least 1")
            torch.set_num_threads(threads)
        folder = model_folder(model, notify)
        check(folder)
        return cls(load_folder(folder, name_of(model), dtype=dtype, device=device), kv)

    def prompt(self, prompt: str | Messages) -> Prompt:
        """Tokens of a plain text (as it is) or of messages (through the chat template).

        Raises ConfigError where they are empty, refused by the template, or do not leave room for an answer.
        """
        if isinstance(prompt, str):
            made = raw_prompt(self.tokenizer, self.config, prompt)
        else:
            made = chat_prompt(self.tokenizer, self.config, prompt)
        if len(made.ids) >= self.max_context:
            raise ConfigError(
                f"the prompt has {len(made.ids)} tokens, the model's context {self.max_context}: no room for an "
                f"answer; shorten it"
            )
        return made

    def stream(
        self,
        prompt: str | Messages,
        max_tokens: int = 256,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        reuse: bool = False,
    ) -> TextStream:
        """Begin an answer; the prompt is read when the first piece is asked for.

        prompt: plain text or messages, see `prompt`. stop: texts that end the answer and are not part of it.
        reuse: keep what the cache shares with the start of the prompt, as a chat does. A packed start is then read
        as codes, where a prompt that is read afresh sees itself exactly, so the answer may differ by the codes'
        error. The others: `sampling.SamplingOptions`. Raises ConfigError for a value out of range.
        """
        if max_tokens < 1:
            raise ConfigError(f"max_tokens={max_tokens} must be at least 1")
        if isinstance(stop, str) or not all(stop):
            raise ConfigError(f"stop={stop!r} must be a list of texts, none of them empty")
        sampler = Sampler(SamplingOptions(temperature, top_p, top_k, seed), self.model.device)
        self.current = TextStream(self, self.prompt(prompt), max_tokens, sampler, stop, reuse)
        return self.current

    def generate(self, prompt: str | Messages, max_tokens: int = 256, **options: Any) -> Completion:
        """`stream`, joined."""
        stream = self.stream(prompt, max_tokens, **options)
        text = "".join(stream)
        assert stream.finish_reason is not None
        return Completion(text, stream.finish_reason, stream.usage)

    def reset(self) -> None:
        """Forget the sequence in the cache."""
        self.session.forget()

    def summary(self) -> str:
        """One line: how the cache is kept."""
        return "kv=fp16: 16-bit cache, nothing packed" if self.enabled is None else self.enabled.report().summary()
