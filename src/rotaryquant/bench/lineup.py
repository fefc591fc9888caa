"""What `bench decode` measures: a plan, a prompt, and every cache that takes part."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rotaryquant.bench.runs import LLAMA_TYPES, QUANTIZED, LlamaRun, ModelRun, Run, missing_package, quantized_run
from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.formats.kv import BLOCK
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.geometry import text_config
from rotaryquant.integrations.transformers.tokens import bos_policy, encode_text

#: Names of llama.cpp's KV types among `PEERS`. Apart, since it takes minutes to read a long prompt in some of them.
_LLAMA = {f"llama-{kind}": kind for kind in LLAMA_TYPES}

#: Peers besides transformers' DynamicCache, which is always there.
PEERS = (*QUANTIZED, *_LLAMA)

_NOT_ASKED = "not asked for by --peers"

#: Random tokens are repeated after this many.
_RANDOM_PERIOD = 512


@dataclass(frozen=True)
class Plan:
    """What every model is measured at.

    text: None for random tokens. peers: of `PEERS`, those to try. llama: a GGUF file for llama.cpp, or None.
    """

    kv: KVCacheConfig
    dtypes: list[str]
    depths: list[int]
    steps: int
    pairs: int
    threads: int
    text: str | None
    peers: list[str]
    llama: Path | None

    @property
    def growth(self) -> int:
        """Tokens that a run adds to its depth: the timed ones and one more in each window."""
        return self.pairs * (self.steps + 1)


@dataclass
class Entry:
    """One run of a row.

    dtype: of the model, None for other hosts. packed: whether it is ours. times: seconds a token in each window.
    peak_bytes: the most that its cache held after a window, None where the host does not say.
    """

    run: Run
    dtype: str | None
    packed: bool = False
    times: list[float] = field(default_factory=list)
    peak_bytes: int | None = None


def prompt_ids(loaded: Loaded, depth: int, text: str | None) -> list[int]:
    """Token ids of a prompt of max(1, depth) tokens, behind the BOS that the model expects.

    text: real text, or None for random tokens that repeat. Raises ConfigError where the text is too short.
    """
    bos, _ = bos_policy(loaded.tokenizer, loaded.model.config)
    start = [] if bos is None else [bos]
    wanted = max(1, depth)
    if text is None:
        vocabulary = int(text_config(loaded.model).vocab_size)
        special = set(loaded.tokenizer.all_special_ids)
        drawn = torch.randint(vocabulary, (2 * _RANDOM_PERIOD,), generator=torch.Generator().manual_seed(0)).tolist()
        period = [token for token in drawn if token not in special][:_RANDOM_PERIOD] or [0]
        return (start + period * (wanted // len(period) + 1))[:wanted]
    ids = start + encode_text(loaded.tokenizer, text)
    if len(ids) < wanted:
        raise ConfigError(f"--text has {len(ids):,} tokens, depth {depth:,} needs as many; use a longer text")
    return ids[:wanted]


def line_up(loaded: Mapping[str, Loaded], plan: Plan, depth: int) -> tuple[dict[str, Entry], list[dict[str, str]]]:
    """All runs by label, and peers that were not tried with the reason."""
    entries: dict[str, Entry] = {}
    missing: dict[str, str] = {}
    for dtype, one in loaded.items():
        entries[f"kv={plan.kv.name} {dtype}"] = Entry(ModelRun(one.model, plan.kv), dtype, packed=True)
        entries[f"DynamicCache {dtype}"] = Entry(ModelRun(one.model), dtype)
        for backend in QUANTIZED:
            label = f"QuantizedCache {backend} {dtype}"
            made = quantized_run(one.model, backend) if backend in plan.peers else _NOT_ASKED
            if isinstance(made, str):
                missing[label] = made
            else:
                entries[label] = Entry(made, dtype)
    for name, kind in _LLAMA.items():
        label = f"llama.cpp {kind}"
        why = _no_llama(plan) if name in plan.peers else _NOT_ASKED
        if why is not None:
            missing[label] = why
        else:
            assert plan.llama is not None
            room = -(-(depth + plan.growth + 1) // BLOCK) * BLOCK
            entries[label] = Entry(LlamaRun(plan.llama, kind, room, plan.threads), None)
    return entries, [{"peer": label, "reason": reason} for label, reason in missing.items()]


def _no_llama(plan: Plan) -> str | None:
    """Why llama.cpp cannot be tried, or None."""
    return "no --llama-gguf FILE given" if plan.llama is None else missing_package("llama-cpp-python", "llama_cpp")


def host_ids(run: Run, ids: list[int], text: str | None) -> list[int]:
    """The prompt as the host of `run` counts it: llama.cpp has a tokenizer of its own, and perhaps fewer tokens."""
    if not isinstance(run, LlamaRun):
        return ids
    if text is None:
        return [token % run.llama.n_vocab() for token in ids]
    size = 16 * len(ids)  # characters: tokenizing a whole book takes minutes
    own: list[int] = run.llama.tokenize(text[:size].encode())
    while len(own) <= len(ids) and size < len(text):
        size *= 2
        own = run.llama.tokenize(text[:size].encode())
    if len(own) < len(ids):
        raise ConfigError(f"--text has {len(own):,} tokens for llama.cpp, {len(ids):,} are needed; use a longer text")
    return own[: len(ids)]
