"""Windows of real text, as a model was trained to read them, and whether its perplexity there can be true."""

from typing import Any

import torch
from torch import Tensor

from rotaryquant.errors import ConfigError
from rotaryquant.evals.inputs import ids_tensor
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.tokens import bos_policy, encode_text

#: A reference perplexity outside this range means that text, tokenizer or BOS do not fit the model (case C63).
PLAUSIBLE_PERPLEXITY = (1.05, 500.0)


def windows_of(
    loaded: Loaded, text: str, context: int, tokens: int, prefix: int | None = None
) -> tuple[list[Tensor], dict[str, Any]]:
    """Windows of consecutive text with enough scored positions, int64 [context] on the model's device, and how they
    begin.

    Each window starts with BOS if the model expects one. What follows its first `prefix` tokens, half of them by
    default, is scored. Raises ConfigError where the text is too short.
    """
    bos, source = bos_policy(loaded.tokenizer, loaded.model.config)
    scored = context - 1 - (context // 2 if prefix is None else prefix)
    count = -(-tokens // scored)
    step = context - (bos is not None)
    ids = ids_tensor(loaded, encode_text(loaded.tokenizer, text))
    if len(ids) < count * step:
        raise ConfigError(
            f"tokens={tokens} at context={context} needs {count} windows of {step} tokens, the text has {len(ids)} "
            f"tokens; ask for at most {len(ids) // step * scored} or use a longer text"
        )
    start = [] if bos is None else [ids_tensor(loaded, [bos])]
    windows = [torch.cat([*start, ids[i * step : (i + 1) * step]]) for i in range(count)]
    return windows, {"bos": bos, "bos_source": source, "first_ids": windows[0][:4].tolist()}


def check_plausible(perplexity: float, start: dict[str, Any]) -> None:
    """Raise ConfigError for a reference perplexity that says something is wrong with the set-up."""
    low, high = PLAUSIBLE_PERPLEXITY
    if not low <= perplexity <= high:
        raise ConfigError(
            f"ppl_ref={perplexity:.4g} is outside {low:g}..{high:g}: text, tokenizer or BOS do not fit this model "
            f"(first ids {start['first_ids']}, BOS {start['bos']}: {start['bos_source']}); pass --any-baseline to "
            f"measure all the same"
        )
