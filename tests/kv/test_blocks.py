"""Block bookkeeping on integers alone."""

import random

import pytest

from rotaryquant.formats.kv import BLOCK
from rotaryquant.kv.blocks import BlockPool, Row


def grown(pool: BlockPool, tokens: int, row: Row | None = None) -> Row:
    """A row packed up to `tokens`."""
    row = row or Row()
    pool.writable(row, tokens)
    row.packed_len = tokens
    return row


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (300, 3)])
def test_a_row_gets_as_many_blocks_as_it_fills(tokens: int, blocks: int) -> None:
    pool = BlockPool()
    row = grown(pool, tokens)
    assert len(row.blocks) == blocks
    assert pool.used == blocks
    assert pool.num_blocks == blocks


def test_growing_within_a_block_takes_none() -> None:
    pool = BlockPool()
    row = grown(pool, 100)
    assert pool.writable(row, 128) == []
    assert len(row.blocks) == 1


def test_the_lowest_free_id_comes_first() -> None:
    pool = BlockPool()
    first, second = grown(pool, 300), grown(pool, 100)
    assert (first.blocks, second.blocks) == ([0, 1, 2], [3])
    pool.release_row(first)
    assert grown(pool, 200).blocks == [0, 1]
    assert pool.num_blocks == 4


def test_a_fork_shares_all_and_frees_when_the_last_user_goes() -> None:
    pool = BlockPool()
    row = grown(pool, 200)
    fork = pool.fork(row)
    assert fork == row
    assert fork.blocks is not row.blocks
    assert pool.used == 2
    pool.release_row(row)
    assert pool.used == 2
    assert not pool.is_shared(fork.blocks[0])
    pool.release_row(fork)
    assert pool.used == 0
    assert (fork.blocks, fork.packed_len) == ([], 0)


def test_fork_keeps_the_pads() -> None:
    pool = BlockPool()
    row = grown(pool, 130, Row(pad=7))
    assert pool.fork(row).pad == 7


def test_writing_into_a_shared_open_block_copies_it_once() -> None:
    pool = BlockPool()
    row = grown(pool, 200)
    fork = pool.fork(row)
    assert pool.writable(row, 201) == [(1, 2)]
    assert row.blocks == [0, 2]
    assert fork.blocks == [0, 1]
    # the fork is now the only user of block 1 and keeps it
    assert pool.writable(fork, 201) == []


def test_a_full_shared_block_is_not_copied() -> None:
    pool = BlockPool()
    row = grown(pool, 256)
    fork = pool.fork(row)
    assert pool.writable(row, 257) == []
    assert row.blocks[:2] == fork.blocks[:2]
    assert row.blocks[2] != 1


def test_nothing_new_to_write_copies_nothing() -> None:
    pool = BlockPool()
    row = grown(pool, 200)
    pool.fork(row)
    assert pool.writable(row, 200) == []


@pytest.mark.parametrize(
    ("before", "after", "blocks", "was_full"),
    [
        (300, 300, 3, False),
        (300, 299, 3, False),  # the open strip just gets shorter
        (300, 289, 3, False),
        (300, 288, 3, False),  # cut at a strip's edge: what stays is full
        (300, 287, 3, True),
        (300, 257, 3, True),
        (300, 256, 2, False),
        (300, 255, 2, True),
        (300, 129, 2, True),
        (300, 128, 1, False),
        (300, 1, 1, True),
        (300, 0, 0, False),
        (256, 225, 2, True),  # the last strip was full itself
        (255, 225, 2, False),
        (32, 31, 1, True),
    ],
)
def test_truncate_says_whether_a_full_strip_is_open_again(before: int, after: int, blocks: int, was_full: bool) -> None:
    pool = BlockPool()
    row = grown(pool, before)
    assert pool.truncate(row, after) == was_full
    assert row.packed_len == after
    assert len(row.blocks) == blocks
    assert pool.used == blocks


def test_truncate_to_more_than_there_is_changes_nothing() -> None:
    pool = BlockPool()
    row = grown(pool, 100)
    assert not pool.truncate(row, 500)
    assert (row.packed_len, len(row.blocks)) == (100, 1)


def test_truncate_leaves_a_fork_alone() -> None:
    pool = BlockPool()
    row = grown(pool, 300)
    fork = pool.fork(row)
    pool.truncate(row, 100)
    assert (fork.packed_len, fork.blocks) == (300, [0, 1, 2])
    assert pool.used == 3
    assert pool.is_shared(0)


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_keep_every_token_where_its_row_reads_it(seed: int) -> None:
    """Blocks as a dict of what was written; each row must read back its own history after any edit."""
    rng = random.Random(seed)
    pool, rows, truth = BlockPool(), [Row()], [[]]  # type: tuple[BlockPool, list[Row], list[list[int]]]
    storage: dict[tuple[int, int], int] = {}
    stamp = 0
    for _ in range(200):
        pick = rng.randrange(len(rows))
        action = rng.choice(["grow", "grow", "grow", "truncate", "fork", "drop"])
        if action == "grow":
            end = rows[pick].packed_len + rng.choice([1, 1, 5, 127, 128, 129])
            for source, copy in pool.writable(rows[pick], end):
                storage.update({(copy, i): v for (b, i), v in list(storage.items()) if b == source})
            for position in range(rows[pick].packed_len, end):
                stamp += 1
                storage[rows[pick].blocks[position // BLOCK], position % BLOCK] = stamp
                truth[pick].append(stamp)
            rows[pick].packed_len = end
        elif action == "truncate":
            keep = rng.randrange(rows[pick].packed_len + 1)
            if pool.truncate(rows[pick], keep) and pool.is_shared(rows[pick].blocks[keep // BLOCK]):
                source, copy = pool.replace(rows[pick], keep // BLOCK)
                storage.update({(copy, i): v for (b, i), v in list(storage.items()) if b == source})
            del truth[pick][keep:]
        elif action == "fork" and len(rows) < 5:
            rows.append(pool.fork(rows[pick]))
            truth.append(list(truth[pick]))
        elif action == "drop" and len(rows) > 1:
            pool.release_row(rows.pop(pick))
            truth.pop(pick)
        for row, wanted in zip(rows, truth, strict=True):
            assert [storage[row.blocks[p // BLOCK], p % BLOCK] for p in range(row.packed_len)] == wanted
        assert pool.used == len({block for row in rows for block in row.blocks})
