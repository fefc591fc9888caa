"""One sequence in a model's cache: read a prompt, step token by token, keep what the next prompt shares."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.enable import EnabledModel

#: Prompt tokens in one forward, on the CPU and elsewhere: enough to keep the multiplications busy, few enough to bound
#: what they need. A GPU takes as long for a few hundred as it takes to be told what to do.
CHUNK, CHUNK_ELSEWHERE = 512, 2048


class Session:
    """The cache of one running conversation and the tokens it holds, which always agree.

    tokens: ids whose keys and values are in the cache, in order. cache: packed, or the stock one where `enabled`
    is None. chunk: prompt tokens in one forward. One that is interrupted leaves layers of different length, so the
    cache is then dropped whole.
    """

    def __init__(self, model: PreTrainedModel, enabled: EnabledModel | None) -> None:
        self.model = model
        self.enabled = enabled
        self.chunk = CHUNK if model.device.type == "cpu" else CHUNK_ELSEWHERE
        self.tokens: list[int] = []
        self.cache: Cache | None = None

    def forget(self) -> None:
        """Start over with an empty cache at the next token."""
        self.tokens, self.cache = [], None

    def reuse(self, ids: Sequence[int]) -> int:
        """Cut the cache back to what it shares with the start of `ids`; returns how many tokens that is.

        At least the last id is left to be read, since its logits are wanted. Layers that cannot go back (a
        sliding window that has moved on, a recurrent state) mean that nothing is shared.
        """
        shared = 0
        limit = min(len(self.tokens), len(ids) - 1)
        while shared < limit and self.tokens[shared] == ids[shared]:
            shared += 1
        surplus = len(self.tokens) - shared
        if shared == 0 or self.cache is None or (surplus and not _can_crop(self.cache)):
            self.forget()
            return 0
        if surplus:
            with torch.inference_mode():  # as the forwards that made its tensors
                self.cache.crop(-surplus)
            del self.tokens[shared:]
        return shared

    def read(self, ids: Sequence[int], cancelled: Callable[[], bool] = lambda: False) -> Tensor | None:
        """Read a prompt (or what `reuse` left of it), in chunks; logits [vocab] after its last token.

        ids: at least one. cancelled: asked between chunks; None is returned where it says so, with what was read
        so far kept.
        """
        if not ids:
            raise ValueError("ids is empty; a prompt needs at least one token")
        logits = None
        try:
            with torch.inference_mode(), self._prefill():
                for begin in range(0, len(ids), self.chunk):
                    if cancelled():
                        return None
                    logits = self._forward(ids[begin : begin + self.chunk])
        except BaseException:  # packing at the prompt's end may refuse as well
            self.forget()
            raise
        return logits

    def step(self, token: int) -> Tensor:
        """Logits [vocab] after one more token."""
        return self._forward([token])

    def _prefill(self) -> AbstractContextManager[None]:
        cache = self._cache()
        return cache.prefill() if isinstance(cache, PackedCache) else nullcontext()

    def _cache(self) -> Cache:
        if self.cache is None:
            self.cache = self.enabled.new_cache() if self.enabled else DynamicCache(config=self.model.config)
        return self.cache

    def _forward(self, ids: Sequence[int]) -> Tensor:
        inputs = torch.tensor([list(ids)], dtype=torch.long, device=self.model.device)
        try:
            with torch.inference_mode():
                out = self.model(input_ids=inputs, cache=self._cache(), logits_to_keep=1)
        except BaseException:
            self.forget()
            raise
        self.tokens.extend(ids)
        logits: Tensor = out.logits[0, -1]
        return logits


def _can_crop(cache: Cache) -> bool:
    """Whether every layer can go back: sliding and recurrent ones forget what they no longer need."""
    layers: list[Any] = cache.layers
    return all(
        layer.is_croppable and (not layer.is_sliding or layer.get_seq_length() < layer.sliding_window)
        for layer in layers
    )
