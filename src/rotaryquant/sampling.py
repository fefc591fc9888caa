"""The next token from logits: greedy, or drawn after temperature, top-k and top-p, in that order."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rotaryquant.errors import ConfigError, NonFiniteError

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen.

    temperature: 0 takes the most likely token. top_k: keep the k most likely, 0 keeps all. top_p: keep the
    smallest set of most likely tokens that holds this probability, 1 keeps all. seed: None takes a fresh one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature={self.temperature} must be 0 (greedy) or a finite number above it")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be 0 (off) or above")
        if self.seed is not None and not 0 <= self.seed <= _MAX_SEED:
            raise ConfigError(f"seed={self.seed} must be between 0 and {_MAX_SEED}")


class Sampler:
    """Chooses tokens one after the other; the same options and logits give the same tokens on the same device.

    seed: the one in use, also where the options left it open.
    """

    def __init__(self, options: SamplingOptions, device: torch.device | str = "cpu") -> None:
        self.options = options
        self.generator = torch.Generator(device=device)
        if options.seed is None:
            self.seed = self.generator.seed() & _MAX_SEED
        else:
            self.seed = options.seed
        self.generator.manual_seed(self.seed)

    def choose(self, logits: Tensor) -> int:
        """Next token id.

        logits: [vocab], any float dtype, on the sampler's device; -inf forbids a token. Raises NonFiniteError for
        NaN or +inf, or where every token is forbidden.
        """
        logits = logits.float()
        top = logits.max()  # NaN wins a maximum, so one look finds all three
        if not bool(torch.isfinite(top)):
            raise NonFiniteError(
                f"the model's logits have maximum {top.item()}; check its dtype (float16 overflows, try "
                f"--dtype float32) and its weights"
            )
        if self.options.temperature == 0:
            return int(logits.argmax())
        probabilities = self._probabilities(logits - top)
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities of the tokens that may be drawn. logits: fp32 [vocab], maximum 0."""
        options = self.options
        logits = logits / options.temperature
        if 0 < options.top_k < logits.numel():
            weakest = logits.topk(options.top_k).values[-1]
            logits = logits.masked_fill(logits < weakest, -torch.inf)
        probabilities = logits.softmax(-1)
        if options.top_p < 1:
            ordered, index = probabilities.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # the token that crosses top_p is kept
            probabilities = probabilities.index_fill(0, index[before >= options.top_p], 0.0)
        return probabilities
