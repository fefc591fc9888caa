"""What attention read: the closed form against counting pair by pair."""

import random

import pytest
import torch

from rotaryquant import KVCacheConfig
from rotaryquant.attention import AttentionOptions
from rotaryquant.counters import Counters, visible_pairs
from rotaryquant.kv.packed import PackedLayer
from support.drive import feed


def counted(rows: int, seq_len: int, begin: int, end: int, window: int) -> int:
    return sum(
        begin <= key < end and key <= query and (window == 0 or query - key < window)
        for query in range(max(0, seq_len - rows), seq_len)
        for key in range(seq_len)
    )


@pytest.mark.parametrize("seed", range(6))
def test_visible_pairs_equals_counting(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        seq_len = rng.randrange(0, 30)
        begin = rng.randrange(0, seq_len + 1)
        end = rng.randrange(begin, seq_len + 1)
        rows, window = rng.randrange(0, 35), rng.choice([0, 0, 1, 3, 40])
        got = visible_pairs(rows, seq_len, begin, end, window)
        assert got == counted(rows, seq_len, begin, end, window), (rows, seq_len, begin, end, window)


@pytest.mark.parametrize(("rows", "seq_len"), [(0, 10), (3, 0), (1, 1), (10, 10), (12, 10)])
@pytest.mark.parametrize("window", [0, 4])
def test_visible_pairs_at_the_edges(rows: int, seq_len: int, window: int) -> None:
    assert visible_pairs(rows, seq_len, 0, seq_len, window) == counted(rows, seq_len, 0, seq_len, window)
    assert visible_pairs(rows, seq_len, 0, 0, window) == 0


def test_packed_reads_are_length_minus_sinks_minus_tail() -> None:
    layer, counters = PackedLayer(KVCacheConfig(sinks=4), 0), Counters()
    x = torch.randn(1, 2, 305, 64)
    feed(layer, x, x, [300], prompt=1)
    feed(layer, x, x, [1] * 5, start=300, counters=counters)
    packed = 4 * (224 - 4) + (256 - 4)  # 304 tokens are the first that leave 48 behind 256
    assert counters.packed_reads == packed
    assert counters.dense_reads == sum(301 + i for i in range(5)) - packed
    assert (counters.packed_calls, counters.dense_calls) == (5, 0)


def test_exact_calls_are_counted_apart() -> None:
    layer, counters = PackedLayer(KVCacheConfig(), 0), Counters()
    x = torch.randn(1, 2, 20, 64)
    feed(layer, x, x, [19, 1], prompt=1, counters=counters)
    assert counters.as_dict() == {
        "packed_reads": 0,
        "dense_reads": 19 * 20 // 2 + 20,
        "packed_calls": 0,
        "dense_calls": 2,
    }


def test_rows_of_a_batch_add_up_without_their_pads() -> None:
    layer, counters = PackedLayer(KVCacheConfig(sinks=0, tail=0, mean=False, protect=False), 0), Counters()
    x = torch.randn(2, 2, 21, 64)
    feed(layer, x, x, [20], pads=[0, 13], prompt=1)
    feed(layer, x, x, [1], start=20, counters=counters)
    assert counters.packed_reads == 21 + 8
    assert counters.dense_reads == 0


def test_a_window_limits_what_is_read() -> None:
    layer, counters = PackedLayer(KVCacheConfig(sinks=0, tail=0, mean=False, protect=False), 0), Counters()
    x = torch.randn(1, 2, 41, 64)
    feed(layer, x, x, [40], prompt=1)
    feed(layer, x, x, [1], start=40, counters=counters, options=AttentionOptions(0.1, window=9))
    assert counters.packed_reads == 9


def test_counts_add_up() -> None:
    total = Counters(1, 2, 3, 4)
    total.add(Counters(10, 20, 30, 40))
    assert total == Counters(11, 22, 33, 44)
