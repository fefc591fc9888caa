"""A layer written out and read back, and several layers joined into one batch."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from rotaryquant import KVCacheConfig
from rotaryquant.errors import CacheFileError, ConfigError
from rotaryquant.formats.codebook import QUANTIZERS
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.kv.state import export_layer, merge_layers, restore_layer
from support.drive import feed, packed_bytes, seen_rows
from support.fits import some_fit
from support.models import relative_error

KV_HEADS = 2
STRICT = KVCacheConfig("strict", sinks=0, tail=0, mean=False, protect=False)
RULES = {
    "default": KVCacheConfig(),
    "no tail": KVCacheConfig(tail=0),
    "strict": STRICT,
    "trellis": KVCacheConfig(quantizer="trellis"),
    "fitted": KVCacheConfig(key_fit=some_fit(KV_HEADS, 64), value_fit=some_fit(KV_HEADS, 64, 9, mean=False)),
}
LENGTHS = [1, 100, 128, 129, 300]


def rows(batch: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, KV_HEADS, columns, 64, generator=generator)
    keys[:, 0] += 2 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    return keys, torch.randn(batch, KV_HEADS, columns, 64, generator=generator)


def filled(config: KVCacheConfig, columns: int, *, batch: int = 1, seed: int = 0, **kwargs: Any) -> PackedLayer:
    layer = PackedLayer(config, 4)
    feed(layer, *rows(batch, columns, seed), [columns], prompt=1, **kwargs)
    return layer


def continued(layer: PackedLayer, steps: int = 140, seed: int = 50) -> Tensor:
    return feed(layer, *rows(layer.batch_size, steps, seed), [1] * steps)


@pytest.mark.parametrize("columns", LENGTHS)
@pytest.mark.parametrize("rule", RULES)
def test_a_restored_layer_goes_on_as_if_nothing_had_happened(rule: str, columns: int) -> None:
    layer = filled(RULES[rule], columns, batch=2, pads=[0, columns // 3])
    header, tensors = export_layer(layer)
    copy = PackedLayer(RULES[rule], 4)
    restore_layer(copy, header, {name: tensor.clone() for name, tensor in tensors.items()})
    assert copy.finding == layer.finding
    assert torch.equal(continued(copy), continued(layer))
    for row in range(2):
        for got, want in zip(packed_bytes(copy, row), packed_bytes(layer, row), strict=True):
            assert torch.equal(got, want)


def test_rows_of_another_fit_are_neither_restored_nor_joined() -> None:
    """They would be read through the wrong matrix."""
    other = KVCacheConfig(key_fit=some_fit(KV_HEADS, 64, 3), value_fit=RULES["fitted"].value_fit)
    layer = filled(RULES["fitted"], 200)
    header, tensors = export_layer(layer)
    with pytest.raises(CacheFileError, match="the file has fit="):
        restore_layer(PackedLayer(other, 4), header, tensors)
    with pytest.raises(ConfigError, match="cannot join"):
        merge_layers([layer, filled(other, 200)])


def test_an_exported_layer_does_not_change_with_its_source() -> None:
    layer = filled(STRICT, 200)
    _, tensors = export_layer(layer)
    before = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("rows.")}
    continued(layer)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


def test_codes_are_exported_in_canonical_order_whatever_their_block() -> None:
    """The 128th row seals its block; what is written must not change by that."""
    keys, values = rows(1, 128)
    open_rows, sealed_rows = PackedLayer(STRICT, 4), PackedLayer(STRICT, 4)
    feed(open_rows, keys, values, [127], prompt=1)
    feed(sealed_rows, keys, values, [128], prompt=1)
    for a, b in zip(packed_bytes(open_rows), packed_bytes(sealed_rows), strict=True):
        assert torch.equal(a, b[:, :127])


def test_a_layer_in_the_middle_of_a_forward_is_not_exported() -> None:
    layer = PackedLayer(STRICT, 4)
    layer.update(*rows(1, 5))
    with pytest.raises(ValueError, match=r"layer 4: .*not been attended"):
        export_layer(layer)


def test_restoring_into_a_used_layer_is_refused() -> None:
    header, tensors = export_layer(filled(STRICT, 20))
    with pytest.raises(ValueError, match=r"layer 4: restore into an empty layer"):
        restore_layer(filled(STRICT, 20), header, tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"layer 4 key: the file has seed=0, this cache uses 1"),
        ({"key_bits": 4}, r"layer 4 key: the file has bits=3, this cache uses 4"),
        ({"value_bits": 2}, r"layer 4 value: the file has bits=3, this cache uses 2"),
        ({"rotation": "hadamard"}, r"the file has rotation='isoquant', this cache uses 'hadamard'"),
        ({"signs": False}, r"the file has signs=True, this cache uses False"),
        ({"scale": "norm"}, r"the file has scale_rule='score', this cache uses 'norm'"),
        ({"mean": True}, r"the file has mean='none', this cache uses 'block0'"),
    ],
)
def test_rows_that_mean_something_else_are_refused_and_the_layer_stays_empty(
    change: dict[str, Any], message: str
) -> None:
    header, tensors = export_layer(filled(STRICT, 150))
    layer = PackedLayer(dataclasses.replace(STRICT, **change), 4)
    with pytest.raises(CacheFileError, match=message):
        restore_layer(layer, header, tensors)
    assert (layer.columns, layer.batch_size, layer.nbytes) == (0, 0, 0)
    feed(layer, *rows(1, 150), [150], prompt=1)  # and still works


def test_another_rotation_under_the_same_name_is_refused() -> None:
    header, tensors = export_layer(filled(STRICT, 150))
    header["fingerprints"][0] = "0" * 16
    with pytest.raises(CacheFileError, match=r"fingerprint 0{16}, this version computes [0-9a-f]{16}"):
        restore_layer(PackedLayer(STRICT, 4), header, tensors)


def test_a_header_that_promises_other_rows_is_refused() -> None:
    header, tensors = export_layer(filled(STRICT, 150))
    header["packed_lens"] = [149]
    with pytest.raises(CacheFileError, match=r"holds \(150, .*its header \(149, "):
        restore_layer(PackedLayer(STRICT, 4), header, tensors)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_boosted_keys_are_restored_at_their_bits(quantizer: str) -> None:
    config = KVCacheConfig(mean=False, sinks=0, quantizer=quantizer)
    layer = PackedLayer(config, 4)
    keys, values = rows(1, 200)
    keys[..., :4] += 300.0
    feed(layer, keys, values, [200], queries=torch.randn(keys.shape), prompt=1)
    assert layer.keys is not None
    assert layer.keys.format.bits == 8
    header, tensors = export_layer(layer)
    copy = PackedLayer(config, 4)
    restore_layer(copy, header, tensors)
    assert copy.keys is not None
    assert (copy.keys.format.bits, copy.keys.format.quantizer) == (8, "scalar")
    assert copy.values is not None
    assert copy.values.format.quantizer == quantizer
    assert torch.equal(continued(copy), continued(layer))


# ---- joining ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_joined_rows_go_on_as_they_would_alone(rule: str) -> None:
    """Exact, partly packed and mostly packed sequences in one batch, one of them two rows with pads."""
    config = RULES[rule]
    parts = [filled(config, n, seed=n) for n in (3, 140, 300)]
    parts.append(filled(config, 200, batch=2, seed=9, pads=[0, 60]))
    joined = merge_layers(parts)
    assert joined.columns == 300
    assert [row.pad for row in joined.rows] == [297, 160, 0, 100, 160]
    steps = 140
    new = [rows(layer.batch_size, steps, 70 + i) for i, layer in enumerate(parts)]
    got = feed(joined, torch.cat([k for k, _ in new]), torch.cat([v for _, v in new]), [1] * steps)
    row = 0
    for layer, (keys, values) in zip(parts, new, strict=True):
        want = feed(layer, keys, values, [1] * steps)
        for index in range(layer.batch_size):
            assert relative_error(got[row], want[index]) < 1e-5
            assert joined.rows[row].packed_len == layer.rows[index].packed_len
            for a, b in zip(seen_rows(joined, row), seen_rows(layer, index), strict=True):
                assert torch.equal(a, b)
            row += 1


def test_joining_leaves_its_sources_alone() -> None:
    parts = [filled(STRICT, 200), filled(STRICT, 100, seed=1)]
    before = [packed_bytes(layer) for layer in parts]
    continued(merge_layers(parts))
    for layer, want in zip(parts, before, strict=True):
        for a, b in zip(packed_bytes(layer), want, strict=True):
            assert torch.equal(a, b)


def test_joining_exact_layers_packs_nothing() -> None:
    joined = merge_layers([filled(KVCacheConfig(), 20), filled(KVCacheConfig(), 7, seed=1)])
    assert joined.all_staged()
    assert joined.keys is None
    continued(joined)
    assert [row.packed_len for row in joined.rows] == [96, 96]


def test_layers_that_differ_are_not_joined() -> None:
    with pytest.raises(ConfigError, match=r"kv=other cannot join layer 4 with kv=strict"):
        merge_layers([filled(STRICT, 20), filled(dataclasses.replace(STRICT, name="other", seed=3), 20)])
    other = PackedLayer(STRICT, 5)
    feed(other, *rows(1, 20), [20], prompt=1)
    with pytest.raises(ConfigError, match=r"layer 5 .* cannot join layer 4"):
        merge_layers([filled(STRICT, 20), other])


def test_layers_with_different_protection_are_not_joined() -> None:
    config = KVCacheConfig(mean=False, sinks=0)
    loud = PackedLayer(config, 4)
    keys, values = rows(1, 200)
    keys[..., :4] += 300.0
    feed(loud, keys, values, [200], queries=torch.randn(keys.shape), prompt=1)
    with pytest.raises(ConfigError, match=r"layer 4: one cache holds its keys at 8 bits, another at 3"):
        merge_layers([filled(config, 200), loud])
