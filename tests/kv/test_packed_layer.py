"""One layer: what is packed when, and that no route or edit changes a code or loses a row."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rotaryquant import KVCacheConfig
from rotaryquant.attention import AttentionOptions, attend
from rotaryquant.counters import Counters
from rotaryquant.errors import NonFiniteError
from rotaryquant.kv.packed import PackedLayer
from support.drive import feed, packed_bytes, seen_rows
from support.fits import some_fit
from support.kernels import force_kernel
from support.models import LOSSLESS_VARIANTS, relative_error

KV_HEADS = 2
STRICT = KVCacheConfig("strict", sinks=0, tail=0, mean=False, protect=False)
RULES: dict[str, KVCacheConfig] = {
    "default": KVCacheConfig(),
    "streaming": KVCacheConfig(prefill="streaming"),
    "no tail": KVCacheConfig(tail=0),
    "no mean": KVCacheConfig(mean=False),
    "no sinks": KVCacheConfig(sinks=0),
    "strict": STRICT,
    "strict streaming": dataclasses.replace(STRICT, prefill="streaming"),
    "fitted": KVCacheConfig(key_fit=some_fit(KV_HEADS, 64), value_fit=some_fit(KV_HEADS, 64, 9, mean=False)),
}


def random_rows(
    batch: int, columns: int, width: int = 64, *, offset: float = 2.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys with a dominating mean in the first head alone, and values."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, KV_HEADS, columns, width, generator=generator)
    keys[:, 0] += offset * torch.randn(width, generator=generator)
    return keys, torch.randn(batch, KV_HEADS, columns, width, generator=generator)


def routes(columns: int) -> dict[str, tuple[list[int], int]]:
    """(chunks, how many of them are declared as the prompt) for the same columns."""
    found = {"bulk": ([columns], 1), "one by one": ([1] * columns, 0)}
    if columns > 1:
        half = columns // 2
        found["prompt and one"] = ([columns - 1, 1], 1)
        found["two chunks"] = ([half, columns - half], 2)
        found["prompt then steps"] = ([half] + [1] * (columns - half), 1)
        size = 7 if columns < 128 else 61
        sizes = [size] * (columns // size) + ([columns % size] if columns % size else [])
        found["chunks"] = (sizes, len(sizes))
        found["undeclared chunks"] = (sizes, 0)
    return found


def due(config: KVCacheConfig, columns: int) -> int:
    """Positions that may be packed by then."""
    if (config.mean or config.tail) and columns < 128:
        return 0
    return (columns - config.tail) // 32 * 32 if config.tail else columns


@pytest.mark.parametrize(
    ("kernel", "dtype", "columns"),
    [
        *(("auto", dtype, n) for dtype in (torch.float32, torch.bfloat16) for n in (1, 2, 17, 127, 128, 129, 300)),
        *(("reference", torch.float32, n) for n in (17, 129)),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_every_write_route_gives_the_same_codes(
    rule: str, kernel: str, dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_kernel(monkeypatch, kernel)
    keys, values = (x.to(dtype) for x in random_rows(1, columns))
    layers = {}
    for name, (chunks, prompt) in routes(columns).items():
        layers[name] = PackedLayer(RULES[rule], 3)
        feed(layers[name], keys, values, chunks, prompt=prompt)
        layers[name].pack_ready()  # what waits for the next token elsewhere is due here too
        assert layers[name].rows[0].packed_len == due(RULES[rule], columns), name
    if due(RULES[rule], columns) == 0:
        return
    want = packed_bytes(layers["bulk"])
    for name, layer in layers.items():
        for got, wanted in zip(packed_bytes(layer), want, strict=True):
            assert torch.equal(got, wanted), name


@pytest.mark.parametrize("width", [80, 96, 112, 128, 256])
def test_write_routes_agree_at_every_width(width: int) -> None:
    keys, values = random_rows(1, 131, width)
    bulk, steps = PackedLayer(STRICT, 0), PackedLayer(STRICT, 0)
    feed(bulk, keys, values, [131], prompt=1)
    feed(steps, keys, values, [1] * 131)
    for got, want in zip(packed_bytes(steps), packed_bytes(bulk), strict=True):
        assert torch.equal(got, want)


def test_codes_follow_layer_and_head() -> None:
    """The same rows in another layer or head are rotated otherwise."""
    keys, values = random_rows(1, 20, offset=0.0)
    keys[:, 1], values[:, 1] = keys[:, 0], values[:, 0]
    first, second = PackedLayer(STRICT, 0), PackedLayer(STRICT, 1)
    for layer in (first, second):
        feed(layer, keys, values, [20], prompt=1)
    codes, other = packed_bytes(first)[0], packed_bytes(second)[0]
    assert not torch.equal(codes, other)
    assert not torch.equal(codes[0], codes[1])


# ---- what is packed when ---------------------------------------------------------------------------------------


def packed_lens(config: KVCacheConfig, columns: int, **kwargs: Any) -> list[int]:
    """Packed positions after each of `columns` single steps."""
    layer, found = PackedLayer(config, 0), []
    keys, values = random_rows(1, columns)
    for column in range(columns):
        feed(layer, keys, values, [1], start=column, **kwargs)
        found.append(layer.rows[0].packed_len)
    return found


def test_the_tail_is_packed_32_tokens_at_a_time_when_the_next_one_arrives() -> None:
    lens = packed_lens(KVCacheConfig(), 258)
    assert lens == [0] * 128 + [64] * 16 + [96] * 32 + [128] * 32 + [160] * 32 + [192] * 18
    assert {length - packed for length, packed in enumerate(lens, 1) if packed} == set(range(49, 81))


@pytest.mark.parametrize("tail", [1, 31, 32, 128, 200])
def test_at_least_tail_tokens_stay_exact(tail: int) -> None:
    config = KVCacheConfig(tail=tail)
    lens = packed_lens(config, 300)
    fills = [length - packed for length, packed in enumerate(lens, 1) if packed]
    assert min(fills) == tail + 1
    assert max(fills[40:]) == tail + 32


def test_without_a_tail_every_token_is_packed_at_once() -> None:
    # the first update of an empty cache is a prompt, and a prompt's newest chunk stays exact
    assert packed_lens(STRICT, 140) == [0, *range(2, 141)]


def test_without_a_tail_a_mean_waits_for_the_first_block() -> None:
    lens = packed_lens(KVCacheConfig(tail=0), 140)
    assert lens == [0] * 127 + list(range(128, 141))


def test_deferred_prompt_stays_exact_until_it_is_over() -> None:
    layer = PackedLayer(KVCacheConfig(), 0)
    keys, values = random_rows(1, 300)
    layer.begin_prefill()
    feed(layer, keys, values, [100, 100, 100])
    assert layer.all_staged()
    layer.end_prefill()
    assert layer.rows[0].packed_len == 224


def test_streaming_prompt_keeps_only_its_newest_chunk_exact() -> None:
    layer = PackedLayer(dataclasses.replace(STRICT, prefill="streaming"), 0)
    keys, values = random_rows(1, 300)
    layer.begin_prefill()
    for start, packed in ((0, 0), (100, 100), (200, 200)):
        feed(layer, keys, values, [100], start=start)
        assert layer.rows[0].packed_len == packed
        assert layer.dense.count == 100
    layer.end_prefill()
    assert layer.rows[0].packed_len == 300


def test_sinks_stay_exact_beside_their_codes() -> None:
    layer = PackedLayer(KVCacheConfig(sinks=4), 0)
    keys, values = random_rows(1, 200)
    feed(layer, keys, values, [200], prompt=1)
    assert layer.view().num_sinks == 4
    stored_keys, stored_values = seen_rows(layer, 0)
    assert torch.equal(stored_keys[:, :4], keys[0, :, :4])
    assert torch.equal(stored_values[:, :4], values[0, :, :4])
    assert not torch.equal(stored_keys[:, 4:128], keys[0, :, 4:128])
    assert torch.equal(stored_keys[:, 128:], keys[0, :, 128:])
    # their codes exist too, for readers that know no sinks
    assert relative_error(layer.decode_keys(0)[:, :4], keys[0, :, :4]) < 0.3


def test_mean_comes_from_the_first_block_without_its_sinks_and_never_changes() -> None:
    layer = PackedLayer(KVCacheConfig(sinks=4, tau=0.5), 0)
    keys, values = random_rows(1, 300)
    keys[:, :, :4] *= 100  # sinks are massive in real models
    keys[:, :, 128:] -= 7  # and later keys may drift
    feed(layer, keys, values, [300], prompt=1)
    assert layer.means is not None
    want = keys[0, :, 4:128].mean(1).bfloat16()
    assert torch.equal(layer.means[0, 0], want[0])
    assert (layer.means[0, 1] == 0).all()  # no dominating mean in the second head
    before = layer.means.clone()
    feed(layer, *random_rows(1, 200, offset=-9.0, seed=2), [1] * 200)
    assert torch.equal(layer.means, before)


@pytest.mark.parametrize(("tau", "removed"), [(0.0, 2), (0.5, 1), (1.0, 0)])
def test_tau_decides_which_heads_lose_their_mean(tau: float, removed: int) -> None:
    layer = PackedLayer(KVCacheConfig(tau=tau), 0)
    feed(layer, *random_rows(1, 200), [200], prompt=1)
    assert layer.means is not None
    assert int((layer.means[0] != 0).any(-1).sum()) == removed
    assert layer.finding is not None
    assert layer.finding.mean_heads == removed


def test_mean_stays_off_coordinates_that_rope_turns() -> None:
    slow = torch.zeros(64, dtype=torch.bool)
    slow[10:40] = True
    layer = PackedLayer(KVCacheConfig(tau=0.1), 0, slow=slow)
    keys, values = random_rows(1, 200, offset=6.0)
    feed(layer, keys, values, [200], prompt=1)
    assert layer.means is not None
    assert (layer.means[0, 0, ~slow] == 0).all()
    assert torch.equal(layer.means[0, 0, slow], keys[0, 0, 4:128].mean(0).bfloat16()[slow])
    assert relative_error(layer.decode_keys(0)[0], keys[0, 0, :128]) < 0.2


def test_removing_a_dominating_mean_pays() -> None:
    keys, values = random_rows(1, 300, offset=6.0)
    errors = {}
    for mean in (True, False):
        layer = PackedLayer(KVCacheConfig(mean=mean, protect=False, sinks=0), 0)
        feed(layer, keys, values, [300], prompt=1)
        errors[mean] = relative_error(layer.decode_keys(0)[0], keys[0, 0, :224])
    assert errors[True] < 0.3 * errors[False]


# ---- batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_left_padded_rows_are_what_they_are_alone(rule: str) -> None:
    """Rows of 300, 171, 44 and 1 tokens, pads never packed nor averaged."""
    config, columns, lengths = RULES[rule], 300, [300, 171, 44, 1]
    keys, values = random_rows(4, columns + 5)
    queries = torch.randn(4, 4, columns + 5, 64)
    pads = [columns - length for length in lengths]
    for index, pad in enumerate(pads):
        keys[index, :, :pad], values[index, :, :pad] = 1e4, -1e4  # poison, but finite: a mean would show it
    batch = PackedLayer(config, 0)
    chunks = [columns] + [1] * 5
    got = feed(batch, keys, values, chunks, queries=queries, pads=pads, prompt=1)
    for index, pad in enumerate(pads):
        alone = PackedLayer(config, 0)
        part = slice(index, index + 1)
        want = feed(
            alone,
            keys[part, :, pad:],
            values[part, :, pad:],
            [lengths[index]] + [1] * 5,
            queries=queries[part, :, pad:],
            prompt=1,
        )
        assert batch.rows[index].packed_len == alone.rows[0].packed_len
        if alone.keys is not None:
            for x, y in zip(packed_bytes(batch, index), packed_bytes(alone), strict=True):
                assert torch.equal(x, y)
        assert relative_error(got[index, :, pad:], want[0]) < 1e-5
        assert (got[index, :, :pad] == 0).all()


def test_pads_may_not_change_later() -> None:
    layer = PackedLayer(KVCacheConfig(), 5)
    keys, values = random_rows(2, 20)
    feed(layer, keys, values, [10], pads=[0, 3])
    layer.update(keys[:, :, 10:], values[:, :, 10:])
    with pytest.raises(ValueError, match=r"layer 5: .*row 1 4 left pads.*filled with 3"):
        layer.settle([0, 4])


def test_a_row_of_pads_alone_may_still_get_more() -> None:
    """A chunked prompt: the first chunk of a short row is all padding."""
    layer = PackedLayer(KVCacheConfig(), 0)
    keys, values = random_rows(2, 24)
    feed(layer, keys, values, [8], pads=[0, 8])
    feed(layer, keys, values, [8], pads=[0, 16], start=8)
    feed(layer, keys, values, [8], pads=[0, 19], start=16)
    assert layer.seq_lens() == [24, 5]


# ---- editing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["default", "no tail", "strict"])
@pytest.mark.parametrize("drop", [1, 4, 43, 44, 45, 75, 76, 77, 100, 171, 172, 173, 299, 300])
def test_crop_keeps_the_codes_of_what_stays(rule: str, drop: int) -> None:
    """300 tokens: the cut falls into the tail (of 76), on its edge, into an open or a sealed block, on their edge."""
    keys, values = random_rows(1, 300)
    layer = PackedLayer(RULES[rule], 0)
    feed(layer, keys, values, [300], prompt=1)
    before, packed = packed_bytes(layer), layer.rows[0].packed_len
    layer.crop(drop)
    kept = min(packed, 300 - drop)
    assert layer.columns == 300 - drop
    assert layer.rows[0].packed_len == kept
    for got, want in zip(packed_bytes(layer), before, strict=True):
        assert torch.equal(got, want[:, :kept])


@pytest.mark.parametrize("drop", [1, 44, 45, 100, 172, 173, 200])
def test_tokens_after_a_crop_are_packed_as_in_a_fresh_run(drop: int) -> None:
    keys, values = random_rows(1, 300)
    layer, fresh = PackedLayer(STRICT, 0), PackedLayer(STRICT, 0)
    feed(layer, keys, values, [300], prompt=1)
    layer.crop(drop)
    more_keys, more_values = random_rows(1, 300, seed=9)
    more_keys[:, :, : 300 - drop], more_values[:, :, : 300 - drop] = keys[:, :, :-drop], values[:, :, :-drop]
    queries = torch.randn(1, 4, 300, 64)
    got = feed(layer, more_keys, more_values, [1] * drop, queries=queries, start=300 - drop)
    feed(fresh, more_keys, more_values, [300 - drop], queries=queries, prompt=1)
    want = feed(fresh, more_keys, more_values, [1] * drop, queries=queries, start=300 - drop)
    for x, y in zip(packed_bytes(layer), packed_bytes(fresh), strict=True):
        assert torch.equal(x, y)
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("kept", [0, 1, 2, 4, 5])
def test_a_crop_into_the_sinks_forgets_the_others(kept: int) -> None:
    """300 tokens with 4 sinks, cut back to a few: what was sink 3 must not be seen beside the new position 3."""
    config = LOSSLESS_VARIANTS["default"]
    keys, values = random_rows(1, 300, 16)
    layer, fresh = PackedLayer(config, 0), PackedLayer(config, 0)
    feed(layer, keys, values, [300], prompt=1)
    layer.crop(300 - kept)
    new_keys, new_values = random_rows(1, 160, 16, seed=3)
    new_keys[:, :, :kept], new_values[:, :, :kept] = keys[:, :, :kept], values[:, :, :kept]
    queries = torch.randn(1, 4, 160, 16)
    if kept:
        feed(fresh, new_keys, new_values, [kept], queries=queries, prompt=1)
    chunks = [1] * (160 - kept)
    got = feed(layer, new_keys, new_values, chunks, queries=queries, start=kept)
    want = feed(fresh, new_keys, new_values, chunks, queries=queries, start=kept)
    assert relative_error(got, want) < 1e-5


def test_crop_refuses_a_negative_count() -> None:
    with pytest.raises(ValueError, match="columns=-1"):
        PackedLayer(KVCacheConfig(), 0).crop(-1)


@pytest.mark.parametrize("rule", ["default", "no tail", "strict"])
def test_forked_rows_share_blocks_until_they_are_written(rule: str) -> None:
    """One sealed block and an open one, of which 32 positions are packed beside a tail of 52."""
    keys, values = random_rows(1, 212)
    layer = PackedLayer(RULES[rule], 0)
    feed(layer, keys, values, [212], prompt=1)
    shared = list(layer.rows[0].blocks)
    assert (len(shared), layer.rows[0].packed_len) == (2, due(RULES[rule], 212))
    bytes_before = layer.keys.nbytes if layer.keys is not None else 0
    layer.select(torch.tensor([0, 0, 0]))
    assert [row.blocks for row in layer.rows] == [shared] * 3
    assert layer.keys is not None
    assert layer.keys.nbytes == bytes_before  # nothing was copied
    more_keys, more_values = random_rows(3, 100, seed=5)
    feed(layer, more_keys, more_values, [1] * 100)
    blocks = [row.blocks for row in layer.rows]
    assert len({row[0] for row in blocks}) == 1  # full before the fork: still shared
    assert len({row[1] for row in blocks}) == 3
    for index in range(3):
        alone = PackedLayer(RULES[rule], 0)
        feed(alone, keys, values, [212], prompt=1)
        feed(alone, more_keys[index : index + 1], more_values[index : index + 1], [1] * 100)
        for x, y in zip(packed_bytes(layer, index), packed_bytes(alone), strict=True):
            assert torch.equal(x, y)


def test_cropping_one_of_two_forks_into_a_sealed_block_spares_the_other() -> None:
    """Both rows are cropped, but they shared the block: it is reopened for each without touching the other's."""
    keys, values = random_rows(1, 300)
    layer = PackedLayer(STRICT, 0)
    feed(layer, keys, values, [300], prompt=1)
    before = packed_bytes(layer)
    layer.select(torch.tensor([0, 0]))
    layer.crop(100)
    assert layer.rows[0].blocks[0] == layer.rows[1].blocks[0]
    assert layer.rows[0].blocks[1] != layer.rows[1].blocks[1]
    for row in range(2):
        for got, want in zip(packed_bytes(layer, row), before, strict=True):
            assert torch.equal(got, want[:, :200])


@pytest.mark.parametrize("rule", ["default", "no tail", "strict"])
def test_forks_cropped_within_a_shared_open_block_part_ways(rule: str) -> None:
    """Both forks forget the end of the open block and go on differently: neither writes into the other's rows."""
    keys, values = random_rows(1, 300)
    layer = PackedLayer(RULES[rule], 0)
    feed(layer, keys, values, [300], prompt=1)
    before = packed_bytes(layer)
    layer.select(torch.tensor([0, 0]))
    layer.crop(100)
    more_keys, more_values = random_rows(2, 160, seed=5)
    feed(layer, more_keys, more_values, [1] * 160)
    assert layer.rows[0].blocks[0] == layer.rows[1].blocks[0]
    assert layer.rows[0].blocks[1] != layer.rows[1].blocks[1]
    for row in range(2):
        alone = PackedLayer(RULES[rule], 0)
        feed(alone, keys, values, [300], prompt=1)
        alone.crop(100)
        part = slice(row, row + 1)
        feed(alone, more_keys[part], more_values[part], [1] * 160)
        for got, want, old in zip(packed_bytes(layer, row), packed_bytes(alone), before, strict=True):
            assert torch.equal(got, want)
            assert torch.equal(got[:, :200], old[:, :200])


@pytest.mark.parametrize("variant", LOSSLESS_VARIANTS)
@pytest.mark.parametrize("seed", range(2))
def test_random_histories_read_back_as_they_were_written(variant: str, seed: int) -> None:
    """Any order of appending, cropping, selecting and repeating: each row holds its own history, nothing else."""
    rng = random.Random(seed)
    config = LOSSLESS_VARIANTS[variant]
    layer = PackedLayer(config, 0)
    pads = [0, rng.randrange(60)]
    total = 150
    keys, values = random_rows(2, total, 8, seed=seed)
    feed(layer, keys, values, [total], pads=pads, prompt=1)
    truth = [(keys[i, :, pad:], values[i, :, pad:]) for i, pad in enumerate(pads)]
    for step in range(24):
        action = rng.choice(["append", "append", "crop", "select"])
        if action == "append":
            new_keys, new_values = random_rows(len(truth), rng.choice([1, 1, 2, 60, 130]), 8, seed=100 + step)
            feed(layer, new_keys, new_values, [new_keys.shape[2]])
            truth = [
                (torch.cat([k, new_keys[i]], 1), torch.cat([v, new_values[i]], 1)) for i, (k, v) in enumerate(truth)
            ]
        elif action == "crop":
            drop = rng.choice([1, 3, 20, 128])
            if drop >= min(k.shape[1] for k, _ in truth):
                continue
            layer.crop(drop)
            truth = [(k[:, :-drop], v[:, :-drop]) for k, v in truth]
        else:
            index = [rng.randrange(len(truth)) for _ in range(rng.choice([1, 2, 3]))]
            layer.select(torch.tensor(index))
            truth = [truth[i] for i in index]
        for row in range(len(truth)) if step % 4 == 3 or step == 23 else [step % len(truth)]:
            for got, want in zip(seen_rows(layer, row), truth[row], strict=True):
                assert relative_error(got, want) < 1e-5, (step, action)


def test_reset_forgets_everything_but_the_configuration() -> None:
    layer = PackedLayer(KVCacheConfig(), 2)
    feed(layer, *random_rows(2, 200), [200], prompt=1)
    layer.reset()
    assert (layer.columns, layer.batch_size, layer.nbytes) == (0, 0, 0)
    keys, values = random_rows(1, 150)
    feed(layer, keys, values, [150], prompt=1)
    assert layer.rows[0].packed_len == 96


# ---- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_rows_name_layer_head_and_row(what: str, bad: float) -> None:
    keys, values = random_rows(2, 144)
    (keys if what == "keys" else values)[1, 1, 95, 5] = bad
    layer = PackedLayer(KVCacheConfig(sinks=0, mean=False), 7)
    with pytest.raises(NonFiniteError, match=rf"layer 7, KV head 1, batch row 1: the {what}"):
        feed(layer, keys, values, [144], prompt=1)


@pytest.mark.parametrize(("chunks", "packed"), [([144], 0), ([143, 1, 1], 64)])
def test_non_finite_keys_are_named_with_means_and_protection_on(chunks: list[int], packed: int) -> None:
    """In the rows that are packed first; and behind them, yet in the block that decides mean and bits."""
    keys, values = random_rows(1, 145)
    keys[0, 1, 77, 5] = float("nan")
    layer = PackedLayer(KVCacheConfig(), 7)
    with pytest.raises(NonFiniteError, match=r"layer 7, KV head 1, batch row 0: the keys"):
        feed(layer, keys, values, chunks, prompt=1)
    assert layer.rows[0].packed_len == packed


def test_non_finite_pads_do_no_harm() -> None:
    keys, values = random_rows(2, 140)
    keys[1, :, :9], values[1, :, :9] = float("nan"), float("inf")
    layer = PackedLayer(STRICT, 0)
    feed(layer, keys, values, [140], pads=[0, 9], prompt=1)
    layer.update(*random_rows(2, 1))
    out = attend(layer, torch.randn(2, 4, 1, 64), AttentionOptions(0.1), Counters())
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ((1, 2, 3, 64), (1, 2, 4, 64), "agree in all but width"),
        ((2, 3, 64), (2, 3, 64), "must be"),
        ((2, 2, 3, 64), (2, 2, 3, 64), "batch 2, but the cache holds 1"),
        ((1, 4, 3, 64), (1, 4, 3, 64), "keys have 4 heads of 64, the cache holds 2 of 64"),
        ((1, 2, 3, 32), (1, 2, 3, 64), "keys have 2 heads of 32, the cache holds 2 of 64"),
        ((1, 2, 3, 64), (1, 2, 3, 32), "values have 2 heads of 32, the cache holds 2 of 64"),
    ],
)
def test_wrong_shapes_are_refused(keys: tuple[int, ...], values: tuple[int, ...], message: str) -> None:
    layer = PackedLayer(KVCacheConfig(), 3)
    feed(layer, *random_rows(1, 5), [5])
    with pytest.raises(ValueError, match=f"layer 3: .*{message}"):
        layer.update(torch.zeros(keys), torch.zeros(values))
    assert layer.columns == 5


def test_max_tokens_is_never_exceeded() -> None:
    layer = PackedLayer(KVCacheConfig(), 3, max_tokens=140)
    keys, values = random_rows(1, 141)
    feed(layer, keys, values, [139, 1])
    held = layer.nbytes
    with pytest.raises(ValueError, match=r"layer 3: 140 \+ 1 tokens exceed max_tokens=140"):
        layer.update(keys[:, :, :1], values[:, :, :1])
    assert layer.columns == 140
    assert layer.nbytes == held


@pytest.mark.parametrize("columns", [0, 1])
def test_no_columns_and_one_column(columns: int) -> None:
    layer = PackedLayer(STRICT, 0)
    keys, values = random_rows(1, columns)
    out = feed(layer, keys, values, [columns], prompt=1)
    assert out.shape == (1, KV_HEADS, columns, 64)
    assert layer.columns == columns
    more_keys, more_values = random_rows(1, 3, seed=1)
    out = feed(layer, more_keys, more_values, [1, 1, 1])
    assert torch.isfinite(out).all()
    assert layer.seq_lens() == [columns + 3]


def test_rows_of_another_dtype_join_the_exact_ones() -> None:
    """A model may turn autocast on or off between steps: rows take the dtype that the buffer has."""
    keys, values = random_rows(1, 150)
    layer = PackedLayer(KVCacheConfig(), 0)
    feed(layer, keys[:, :, :147].bfloat16(), values[:, :, :147].bfloat16(), [147])
    for column, dtype in ((147, torch.bfloat16), (148, torch.float32), (149, torch.bfloat16)):
        step = slice(column, column + 1)
        feed(layer, keys[:, :, step].to(dtype), values[:, :, step].to(dtype), [1])
    newest = [rows[:, :, -2:] for rows in layer.dense.staged()]
    for held, given in zip(newest, (keys, values), strict=True):
        assert held.dtype == torch.bfloat16
        assert torch.equal(held, given[:, :, 148:].bfloat16())


def test_layers_that_share_a_cache_ask_in_their_own_way() -> None:
    """What is kept from one call on a cache to the next must not leak into a call that asks otherwise."""
    keys, values = random_rows(1, 300)
    layer = PackedLayer(STRICT, 0)
    feed(layer, keys, values, [299, 1])
    queries, sinks = torch.randn(1, 4, 1, 64), torch.full((4,), 10.0)
    options = [
        AttentionOptions(0.1),
        AttentionOptions(0.2),
        AttentionOptions(0.1, window=40),
        AttentionOptions(0.1, softcap=2.0),
        AttentionOptions(0.1, sink_logits=sinks),
        AttentionOptions(0.1, sink_logits=sinks + 3),
    ]

    def ask(option: AttentionOptions) -> Tensor:
        return attend(layer, queries, option, Counters(), append=False)

    alone = []
    for option in options:
        layer.prepared = None
        alone.append(ask(option))
    for option, wanted in zip(options[1:], alone[1:], strict=True):  # the first differs from each in one thing
        assert not torch.allclose(wanted, alone[0], rtol=0.01)
        assert torch.equal(ask(options[0]), alone[0])
        assert torch.equal(ask(option), wanted)
    assert torch.equal(ask(options[-2]), alone[-2])


def test_rows_are_kept_differently_until_some_are_packed() -> None:
    layer = PackedLayer(KVCacheConfig(tail=1 << 30, protect=False), 0)
    keys, values = torch.randn(1, 2, 200, 64), torch.randn(1, 2, 200, 64)
    layer.update(keys, values)
    layer.settle(None)
    with pytest.raises(ValueError, match="layer 0: packed rows and sinks stay"):
        layer.reconfigure(KVCacheConfig(sinks=0))
    layer.reconfigure(KVCacheConfig(key_bits=2, protect=False))
    layer.update(keys[:, :, :1], values[:, :, :1])
    assert layer.keys is not None
    assert layer.keys.format.bits == 2
    assert layer.rows[0].packed_len == 128
    with pytest.raises(ValueError, match="packed rows and sinks stay"):
        layer.reconfigure(KVCacheConfig())


@pytest.mark.parametrize("rule", ["default", "fitted"])
def test_rows_that_share_blocks_are_read_each_with_its_own_newest(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference unpacks what they share once; keys, values, means and queries of their own must not mix."""
    force_kernel(monkeypatch, "reference")
    keys, values = random_rows(2, 300)
    together = PackedLayer(RULES[rule], 0)
    feed(together, keys, values, [300], prompt=1)
    together.select(torch.tensor([0, 0, 1, 1]))
    new_keys, new_values = random_rows(4, 5, seed=3)
    queries = torch.randn(4, 2 * KV_HEADS, 5, 64, generator=torch.Generator().manual_seed(4))
    got = feed(together, new_keys, new_values, [5], queries=queries)
    for row, source in enumerate([0, 0, 1, 1]):
        alone, own = PackedLayer(RULES[rule], 0), slice(row, row + 1)
        feed(alone, keys[source : source + 1], values[source : source + 1], [300], prompt=1)
        want = feed(alone, new_keys[own], new_values[own], [5], queries=queries[own])
        assert relative_error(got[own], want) < 1e-5
