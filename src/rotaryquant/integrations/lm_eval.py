"""lm-evaluation-harness on a model with a packed cache: the model `rotaryquant`.

A request is read as it is in use: its context is packed first, and what is scored or generated comes behind it token by
token, as far as packing is concerned. Contexts that are shorter than the exact rows of the cache (iso3: 4 + 48 tokens,
and 128 before anything is packed) are read from 16-bit rows; what was really read packed, and what was cut to fit, is
counted and lies in the results.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from transformers import DynamicCache

from rotaryquant.config import parse_kv
from rotaryquant.counters import Counters
from rotaryquant.errors import ConfigError
from rotaryquant.integrations.sources import name_of
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.checkpoints import load_folder, model_folder, parse_device
from rotaryquant.integrations.transformers.chunks import still_chunks
from rotaryquant.integrations.transformers.detokenize import StopText, StreamDecoder
from rotaryquant.integrations.transformers.enable import enable
from rotaryquant.integrations.transformers.geometry import text_config
from rotaryquant.integrations.transformers.session import Session
from rotaryquant.integrations.transformers.tokens import bos_policy, encode_text
from rotaryquant.sampling import Sampler, SamplingOptions

_log = logging.getLogger(__name__)

#: What a task may ask of a generation.
_GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


@dataclass
class Tally:
    """What the requests of a run came to.

    packed_requests: those of which at least one packed row was read. truncated: those whose context was cut from the
    left. packed_reads, dense_reads: rows that attention read, summed over tokens and layers.
    """

    requests: int = 0
    packed_requests: int = 0
    truncated: int = 0
    packed_reads: int = 0
    dense_reads: int = 0

    def add(self, reads: Counters, *, truncated: bool) -> None:
        """Count a request."""
        self.requests += 1
        self.packed_requests += reads.packed_reads > 0
        self.truncated += truncated
        self.packed_reads += reads.packed_reads
        self.dense_reads += reads.dense_reads


@register_model("rotaryquant")
class RotaryQuantLM(TemplateLM):  # type: ignore[misc]
    """A checkpoint with its keys and values packed, one request at a time.

    pretrained: as MODEL of the command line. kv: a `--kv` SPEC; its options are arguments of their own, since the
    harness separates those by commas (`kv=iso3,sinks=0`). dtype: "auto", "bfloat16", "float16" or "float32". device: as
    torch names it. threads: of torch. max_length: tokens of a request at most, by default what the model was made for.
    max_gen_toks: tokens of an answer where a task does not say. Raises ConfigError for what is unknown.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        kv: str = "iso3",
        dtype: str = "auto",
        device: str | None = None,
        threads: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if str(batch_size or 1) != "1":
            raise ConfigError(f"batch_size={batch_size}: requests are read one at a time; leave it at 1")
        spec = parse_kv(",".join([kv, *(f"{key}={value}" for key, value in options.items())]))
        if threads is not None:
            torch.set_num_threads(int(threads))
        name = name_of(pretrained)
        loaded = load_folder(model_folder(pretrained), name, dtype=dtype, device=device or "cpu")
        self.model, self.tokenizer, self._end_ids = loaded.model, loaded.tokenizer, loaded.end_ids
        self.enabled = enable(loaded.model, "fp16" if spec is None else spec)
        self._device, self._name = parse_device(device or "cpu"), name
        self._bos, self._bos_source = bos_policy(self.tokenizer, self.model.config)
        limit = int(getattr(text_config(self.model), "max_position_embeddings", 0) or 0)
        if max_length is None and limit < 1:
            raise ConfigError("max_length: the model's configuration has no max_position_embeddings; give one")
        self.max_length = int(limit if max_length is None else max_length)
        self.max_gen_toks = int(max_gen_toks)
        if self.max_length < 2:
            raise ConfigError(f"max_length={self.max_length} must be at least 2")
        self.tally = Tally()

    # ---- tokens ----------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        return min(self._end_ids)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: BOS where the model has one, else what ends a text."""
        bos = self.tokenizer.bos_token_id
        return bos if isinstance(bos, int) else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """The model's name, under which the harness keeps what it has tokenised."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text, behind the model's BOS unless the text has it or `add_special_tokens` is False."""
        ids = encode_text(self.tokenizer, string)
        if self._bos is None or add_special_tokens is False or ids[:1] == [self._bos]:
            return ids
        return [self._bos, *ids]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        assert isinstance(text, str)
        return text

    # ---- what the harness asks -------------------------------------------------------------------------------------

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length` where they are longer."""
        found = []
        for request in requests:
            (text,) = request.args
            ids, total = self.tok_encode(text, add_special_tokens=False), 0.0
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            reads = Counters()
            for context, scored in map(make_disjoint_window, windows):
                logprobs, seen = self._logprobs(context, scored)
                total += float(logprobs.gather(1, _column(scored, logprobs)).double().sum())
                reads.add(seen)
            self.tally.add(reads, truncated=False)
            found.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that go on where contexts end, up to a stop text or their length."""
        found = []
        for request in requests:
            context, asked = request.args
            options: dict[str, Any] = dict(normalize_gen_kwargs(asked, self.max_gen_toks))
            if wrong := sorted(set(options) - _GENERATION):
                raise ConfigError(
                    f"generation option {wrong[0]!r} is not carried; valid: {', '.join(sorted(_GENERATION))}"
                )
            text = self._generated(context, options)
            found.append(text)
            self.cache_hook.add_partial("generate_until", (context, asked), text)
        return found

    def get_model_info(self) -> dict[str, Any]:
        """What lies in the results beside the scores."""
        report = "kv=fp16: nothing packed" if self.enabled is None else self.enabled.report().summary()
        if self.tally.truncated:
            _log.warning(
                "%d of %d requests were cut to %d tokens", self.tally.truncated, self.tally.requests, self.max_length
            )
        return {"kv": report, "bos": self._bos_source, "max_length": self.max_length, **asdict(self.tally)}

    # ---- reading ---------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether every token of it is the likeliest."""
        found = []
        for pair, context, scored in requests:
            if len(scored) >= self.max_length or not scored:
                raise ConfigError(
                    f"max_length={self.max_length}: a continuation of {len(scored)} tokens cannot be scored behind one"
                )
            kept = context[-(self.max_length + 1 - len(scored)) :]
            logprobs, reads = self._logprobs(kept, scored)
            self.tally.add(reads, truncated=len(kept) < len(context))
            targets = _column(scored, logprobs)
            answer = (
                float(logprobs.gather(1, targets).double().sum()),
                bool((logprobs.argmax(-1) == targets[:, 0]).all()),
            )
            found.append(answer)
            self.cache_hook.add_partial("loglikelihood", pair, answer)
        return found

    def _logprobs(self, context: list[int], scored: list[int]) -> tuple[Tensor, Counters]:
        """Log-probabilities of what follows each token from the last of the context on, fp32 [len(scored), vocab].

        The context but for its last token is packed first, so that the first prediction reads packed rows as well.
        """
        ids = torch.tensor([*context, *scored[:-1]], device=self.model.device)
        first = len(context) - 1
        cache = DynamicCache(config=self.model.config) if self.enabled is None else self.enabled.new_cache()
        parts = []
        with torch.inference_mode():
            if first:
                self._read_context(ids[:first], cache)
            kv = None if self.enabled is None else self.enabled.kv
            for begin, end in still_chunks(first, len(ids), kv):
                parts.append(self.model(ids[None, begin:end], cache=cache).logits[0].float().log_softmax(-1))
        return torch.cat(parts), cache.counters if isinstance(cache, PackedCache) else Counters()

    def _read_context(self, ids: Tensor, cache: Any) -> None:
        if isinstance(cache, PackedCache):
            with cache.prefill():
                self.model(ids[None], cache=cache, logits_to_keep=1)
        else:
            self.model(ids[None], cache=cache, logits_to_keep=1)

    def _generated(self, context: str, options: dict[str, Any]) -> str:
        ids, room = self.tok_encode(context), options["max_gen_toks"]
        if room >= self.max_length:
            raise ConfigError(f"max_gen_toks={room} leaves no room for a context in max_length={self.max_length}")
        kept = ids[-(self.max_length - room) :]
        temperature = options.get("temperature", 0.0) if options["do_sample"] else 0.0
        chosen = SamplingOptions(temperature, options.get("top_p", 1.0), options.get("top_k", 0), seed=0)
        sampler, session = Sampler(chosen, self.model.device), Session(self.model, self.enabled)
        decoder, stops, text = StreamDecoder(self.tokenizer), StopText([s for s in options["until"] if s]), ""
        logits = session.read(kept or [self.prefix_token_id])
        for left in range(room, 0, -1):
            assert logits is not None
            token = sampler.choose(logits)
            if token in self._end_ids:
                break
            text += stops.push(decoder.push(token))
            if stops.found or left == 1:
                break
            logits = session.step(token)
        if not stops.found:
            text += stops.push(decoder.flush()) + stops.flush()
        cache = session.cache
        self.tally.add(cache.counters if isinstance(cache, PackedCache) else Counters(), truncated=len(kept) < len(ids))
        return text


def _column(ids: list[int], beside: Tensor) -> Tensor:
    """Token ids as int64 [len(ids), 1] where `beside` is."""
    return torch.tensor(ids, device=beside.device)[:, None]


def main(words: Sequence[str]) -> int:
    """`lm-eval run --model rotaryquant` with these words, in this process: release 0.4.13 finds a model that is no part
    of it only where it is registered already. On the CPU unless they name a device, where the harness would take a GPU.
    """
    named = any(word == "--device" or word.startswith("--device=") for word in words)
    before = sys.argv
    sys.argv = ["lm-eval", "run", "--model", "rotaryquant", *([] if named else ["--device", "cpu"]), *words]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0
