"""How many of a sequence's newest tokens stay exact: a function of its length alone.

At least `tail` tokens are exact and TAIL_STEP are packed at a time, so tail + 1 to tail + TAIL_STEP rows are exact
when a query is scored. Packing whole blocks of 128 instead leaves a query right after a block's edge with nothing
exact behind it: at the same mean fill that costs 7 to 9% in KL divergence (docs/experiments.md).
"""

from rotaryquant.config import KVCacheConfig
from rotaryquant.formats.kv import BLOCK, STRIP

#: Tokens that move from the tail into packed blocks at a time: a strip, which is sealed at once.
TAIL_STEP = STRIP


def packed_end(config: KVCacheConfig, seq_len: int, *, fresh: bool = False) -> int:
    """Positions [0, packed_end) are due for packing in a sequence of `seq_len` tokens.

    fresh: nothing of the sequence is packed yet. Its mean and the bits of its keys are decided from a whole first
    block, so that the write route cannot matter; a sequence with either, or a tail, waits for that block.
    """
    if fresh and seq_len < BLOCK and (config.mean or config.protect or config.tail > 0):
        return 0
    if config.tail == 0:
        return seq_len
    return max(0, (seq_len - config.tail) // TAIL_STEP * TAIL_STEP)


def next_packing(config: KVCacheConfig, packed_len: int) -> int:
    """Tokens from which on `packed_end` is past `packed_len`, where so many positions of a sequence are packed."""
    due = (packed_len // TAIL_STEP + 1) * TAIL_STEP + config.tail if config.tail else packed_len + 1
    return max(due, packing_starts(config)) if packed_len == 0 else due


def packing_starts(config: KVCacheConfig) -> int:
    """Tokens that a sequence must have before any of them is due."""
    if config.tail:
        return max(BLOCK, config.tail + TAIL_STEP)
    return BLOCK if config.mean or config.protect else 1


def mean_tail(tail: int) -> float:
    """Mean number of exact rows that a query sees, itself included, over the steps between two packings."""
    return tail + (TAIL_STEP + 1) / 2 if tail else 0.0


def full_tail(tail: int) -> int:
    """Exact rows right before the next packing."""
    return tail + TAIL_STEP if tail else 0
