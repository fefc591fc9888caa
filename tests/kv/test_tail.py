"""The tail rule as a function of lengths alone, and how it is asked for."""

import pytest

from rotaryquant import KVCacheConfig, parse_kv
from rotaryquant.errors import ConfigError
from rotaryquant.kv.tail import TAIL_STEP, full_tail, mean_tail, next_packing, packed_end, packing_starts

NOTHING = {"mean": False, "protect": False}


@pytest.mark.parametrize("tail", [True, -1])
def test_a_tail_that_is_no_count_is_refused_by_name(tail: int) -> None:
    with pytest.raises(ConfigError, match=rf"kv tail={tail} must be a number of tokens, 0 for none"):
        KVCacheConfig(tail=tail)


@pytest.mark.parametrize("field", ["tail", "sinks"])
def test_off_means_none(field: str) -> None:
    for text in ("off", "OFF", "0"):
        config = parse_kv(f"iso3,{field}={text}")
        assert config is not None
        value = getattr(config, field)
        assert value == 0
        assert type(value) is int


@pytest.mark.parametrize("tail", [1, 31, 32, 48, 80, 96, 97, 200])
def test_nothing_is_due_before_the_first_block_and_then_32_positions_at_a_time(tail: int) -> None:
    config = KVCacheConfig(tail=tail)
    first = max(128, tail + TAIL_STEP)
    ends = [packed_end(config, seq_len, fresh=True) for seq_len in range(601)]
    assert ends[:first] == [0] * first
    assert packing_starts(config) == first
    assert all(ends[seq_len] == (seq_len - tail) // 32 * 32 > 0 for seq_len in range(first, 601))
    # what is packed before a query's token arrives leaves it these exact rows, itself included
    fills = [seq_len + 1 - ends[seq_len] for seq_len in range(first + 32, first + 32 + 256)]
    assert (min(fills), max(fills)) == (tail + 1, full_tail(tail))
    assert sum(fills) / len(fills) == mean_tail(tail)


@pytest.mark.parametrize("seq_len", [0, 1, 47, 48, 79, 80, 127, 128])
def test_a_row_that_has_packed_rows_waits_for_no_block(seq_len: int) -> None:
    """After a crop a row may be short and yet hold packed rows; its mean and bits are decided."""
    config = KVCacheConfig()
    assert packed_end(config, seq_len) == {80: 32, 127: 64, 128: 64}.get(seq_len, 0)
    assert packed_end(config, seq_len, fresh=True) == (64 if seq_len == 128 else 0)


@pytest.mark.parametrize("changes", [{}, {"mean": True}, {"protect": True}])
def test_without_a_tail_everything_is_due_once_mean_and_bits_can_be_decided(changes: dict[str, bool]) -> None:
    config = KVCacheConfig(tail=0, **{**NOTHING, **changes})
    waits = any(changes.values())
    for seq_len in (0, 1, 127, 128, 129, 300):
        assert packed_end(config, seq_len, fresh=True) == (0 if waits and seq_len < 128 else seq_len)
        assert packed_end(config, seq_len) == seq_len
    assert packing_starts(config) == (128 if waits else 1)
    assert full_tail(0) == mean_tail(0) == 0


@pytest.mark.parametrize("tail", [0, 1, 31, 32, 48, 97])
@pytest.mark.parametrize("others", [{}, NOTHING])
def test_next_packing_is_the_first_length_at_which_more_is_due(tail: int, others: dict[str, bool]) -> None:
    config = KVCacheConfig(tail=tail, **others)
    for packed_len in (0, 1, 5, 31, 32, 33, 96, 128, 300):
        fresh = packed_len == 0
        due = [length for length in range(700) if packed_end(config, length, fresh=fresh) > packed_len]
        assert next_packing(config, packed_len) == due[0]
