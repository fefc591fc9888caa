"""Bytes: what a layer really holds, and what the formula says it stores per value."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rotaryquant import KVCacheConfig
from rotaryquant.formats.kv import StreamFormat
from rotaryquant.kv.accounting import LayerBits, bits_all_layers, bits_per_value, bits_worst
from rotaryquant.kv.packed import PackedLayer
from support.drive import feed, packed_bytes

KV_HEADS = 2
STRICT = KVCacheConfig(sinks=0, tail=0, mean=False, protect=False)


def rows(columns: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, KV_HEADS, columns, width, generator=generator).bfloat16() for _ in range(2))
    return keys, values


def filled(config: KVCacheConfig, columns: int, width: int, chunk: int = 0) -> PackedLayer:
    layer = PackedLayer(config, 0)
    chunks = [columns] if not chunk else [chunk] * (columns // chunk) + [columns % chunk] * bool(columns % chunk)
    feed(layer, *rows(columns, width), chunks, prompt=len(chunks))
    return layer


def tensors_of(thing: object, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that an object holds, however deep, without shared tables of other modules."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    if isinstance(thing, dict):
        children = list(thing.values())
    elif isinstance(thing, list | tuple):
        children = list(thing)
    else:
        names = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
        children = [getattr(thing, name, None) for name in names] + list(getattr(thing, "__dict__", {}).values())
    for child in children:
        if isinstance(child, Tensor | dict | list | tuple) or type(child).__module__.startswith("rotaryquant"):
            yield from tensors_of(child, seen)


def held_bytes(layer: PackedLayer) -> int:
    """Bytes of all storages that a layer keeps alive, its tables included."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(layer, set())}
    return sum(storages.values())


@pytest.mark.parametrize(("width", "limit"), [(128, 52), (64, 28)])
@pytest.mark.parametrize("config", ["iso3", "strict", "streaming"])
def test_a_row_costs_its_codes_and_a_scale(width: int, limit: int, config: str) -> None:
    """Slope of all bytes held from 1,000 to 2,000 tokens, per stored row; rotation and codebook do not grow."""
    kv = {
        "iso3": KVCacheConfig(),
        "strict": STRICT,
        "streaming": KVCacheConfig(prefill="streaming"),
    }[config]
    short, long = filled(kv, 1000, width, 100), filled(kv, 2000, width, 100)
    per_row = (held_bytes(long) - held_bytes(short)) / (1000 * KV_HEADS * 2)
    assert 0.9 * limit * 48 / 52 < per_row <= limit
    tables = [
        sum(t.numel() * t.element_size() for t in tensors_of([s.rotation, s.packed.codec], set()))
        for layer in (short, long)
        for s in (layer.keys, layer.values)
        if s is not None
    ]
    assert len(set(tables)) == 1


def test_nbytes_is_what_the_layer_holds() -> None:
    """Everything but small tables and integers: rotations, codebooks, positions, block table."""
    layer = filled(KVCacheConfig(), 2000, 128)
    unlisted = held_bytes(layer) - layer.nbytes
    assert 0 <= unlisted < 0.1 * layer.nbytes
    assert layer.nbytes > 2000 * KV_HEADS * 2 * 50


def test_the_exact_prompt_is_given_back_when_it_is_packed() -> None:
    layer = PackedLayer(KVCacheConfig(), 0)
    keys, values = rows(2000, 128)
    layer.begin_prefill()
    feed(layer, keys, values, [2000])
    exact = layer.dense.nbytes
    assert exact >= 2000 * KV_HEADS * 2 * 128 * 2
    layer.end_prefill()
    assert layer.dense.nbytes <= (128 + 4) * KV_HEADS * 2 * 128 * 2


def test_decode_takes_memory_by_the_slab_not_by_the_token() -> None:
    layer = filled(KVCacheConfig(), 500, 64)
    sizes = [layer.packed_nbytes]
    for step in range(300):
        feed(layer, *rows(1, 64, step), [1])
        sizes.append(layer.packed_nbytes)
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 3
    assert layer.keys is not None
    assert sizes[-1] - sizes[0] <= layer.keys.packed.blocks_per_slab * 128 * KV_HEADS * 2 * 26 * 2


@pytest.mark.parametrize("columns", [200, 1000, 5000])
def test_slack_of_the_slabs_is_bounded(columns: int) -> None:
    """At most a quarter of what is stored, or two blocks of a short cache."""
    layer = filled(STRICT, columns, 64)
    stored = columns * KV_HEADS * 2 * 26
    assert layer.packed_nbytes <= max(1.3 * stored, stored + 2 * 128 * KV_HEADS * 2 * 26)


def stored_bits(layer: PackedLayer) -> int:
    """Bits of everything that one sequence stores, counted from the stored tensors themselves."""
    codes = sum(8 * part.numel() * part.element_size() for part in packed_bytes(layer))
    positions = layer.dense.positions[0]
    exact = int(((positions >= 0) & (positions < layer.seq_lens()[0])).sum())
    assert layer.dense.keys is not None
    width = layer.dense.keys.shape[-1]
    means = 0 if layer.means is None else 16 * width * int((layer.means[0] != 0).any(-1).sum())
    return codes + exact * KV_HEADS * 2 * width * 16 + means


def layer_bits(layer: PackedLayer) -> LayerBits:
    assert layer.keys is not None
    assert layer.values is not None
    width = layer.keys.format.width
    removed = 0 if layer.means is None else int((layer.means[0] != 0).any(-1).sum()) * width
    return LayerBits(layer.keys.format, layer.values.format, KV_HEADS, layer.config.sinks, layer.config.tail, removed)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize(("mean", "width"), [(True, 64), (False, 128)])
def test_bits_equal_what_a_decoding_layer_stores(sinks: int, mean: bool, width: int) -> None:
    """Over four packings, with the tail that the layer really has; and the mean over its fill by the formula."""
    layer = filled(KVCacheConfig(sinks=sinks, mean=mean, tau=0.0), 256, width)
    total, fills = 0.0, []
    for length in range(257, 385):
        feed(layer, *rows(1, width, length), [1])
        record = layer_bits(layer)
        fill = length - layer.rows[0].packed_len
        if fill in (49, 50, 63, 64, 79, 80):
            assert stored_bits(layer) == record.bits(length, fill)
        fills.append(fill)
        total += record.bits(2000, fill) / record.values_of(2000)
    assert fills == [*range(65, 81), *list(range(49, 81)) * 3, *range(49, 65)]
    assert bits_per_value([layer_bits(layer)], 2000) == pytest.approx(total / 128, rel=1e-12)
    assert bits_worst([layer_bits(layer)], 2000) == pytest.approx(
        layer_bits(layer).bits(2000, 80) / layer_bits(layer).values_of(2000), rel=1e-12
    )


def test_strict_rows_cost_their_codes_and_scale_alone() -> None:
    layer = filled(STRICT, 300, 128)
    assert stored_bits(layer) == layer_bits(layer).bits(300, 0)
    assert bits_per_value([layer_bits(layer)], 300) == 3.125
    assert bits_worst([layer_bits(layer)], 300) == 3.125


def _record(key_bits: int = 3, **changes: object) -> LayerBits:
    keys, values = StreamFormat("key", 128, key_bits, "score"), StreamFormat("value", 128, 3, "value")
    return dataclasses.replace(LayerBits(keys, values, 8, 4, 48, 0), **changes)


def test_default_stays_under_three_and_a_half_bits_at_four_thousand_tokens() -> None:
    assert bits_per_value([_record()], 4096) == pytest.approx(
        (3.125 * (4096 - 64.5) + 16 * (64.5 + 4)) / 4096, rel=1e-12
    )
    assert bits_per_value([_record()], 4096) <= 3.5


def test_boosted_layers_count() -> None:
    ordinary, boosted = _record(), _record(key_bits=8)
    mixed = bits_per_value([ordinary, ordinary, ordinary, boosted], 4096)
    assert mixed == pytest.approx(bits_per_value([ordinary], 4096) + (5 / 2) / 4 * (4096 - 64.5) / 4096, rel=1e-9)


@pytest.mark.parametrize("tokens", [10, 64, 65, 127])
def test_a_sequence_shorter_than_the_first_block_is_exact_and_counted_once(tokens: int) -> None:
    assert _record().bits(tokens, 64.5) == tokens * 8 * 256 * 16
    assert bits_per_value([_record()], tokens) == bits_worst([_record()], tokens) == 16


def test_a_sequence_of_the_first_block_has_packed_rows() -> None:
    assert _record().bits(128, 64.5) == 8 * 256 * ((128 - 64.5) * 3.125 + (64.5 + 4) * 16)


@pytest.mark.parametrize("tokens", [128, 150, 216])
def test_a_sequence_shorter_than_a_long_tail_is_exact_and_counted_once(tokens: int) -> None:
    record = _record(tail=200)
    assert bits_per_value([record], tokens) == bits_worst([record], tokens) == 16
    assert bits_worst([record], 232) == 16
    assert bits_worst([record], 240) == ((240 - 232) * 3.125 + (232 + 4) * 16) / 240


def test_layers_left_alone_pull_the_whole_up() -> None:
    packed = _record()
    stock = packed.values_of(4096)
    assert bits_all_layers([packed], 4096, stock) == pytest.approx((bits_per_value([packed], 4096) + 16) / 2)
    assert bits_all_layers([packed], 4096, 0) == bits_per_value([packed], 4096)


def test_nothing_to_count_is_an_error() -> None:
    with pytest.raises(ValueError, match="tokens=0"):
        bits_per_value([_record()], 0)
    with pytest.raises(ValueError, match="no packed values"):
        bits_per_value([], 4096)
