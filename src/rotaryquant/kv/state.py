"""A layer's cache as named tensors and back, and several layers' rows joined into one batch.

Rows are written in canonical order, one sequence at a time, so that neither the slab size nor a kernel's layout
enters a file.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rotaryquant.errors import CacheFileError, ConfigError
from rotaryquant.formats.kv import BLOCK, StreamFormat
from rotaryquant.kv.blocks import Row
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.kv.protect import Finding
from rotaryquant.kv.store import StreamStore


def export_layer(layer: PackedLayer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header (plain data) and tensors of a layer between two forwards.

    Tensors: per batch row b "rows.b.keys.codes" uint8 [num_kv_heads, packed, code_bytes] and "….scales", the same
    for values; "dense.keys", "dense.values", "dense.positions" of all exact rows; "means" where there are any.
    """
    layer.require_settled()
    header: dict[str, Any] = {
        "layer": layer.layer,
        "columns": layer.columns,
        "pads": [row.pad for row in layer.rows],
        "packed_lens": [row.packed_len for row in layer.rows],
        "dense_start": layer.dense.start,
        "dense_count": layer.dense.count,
        "exact_newest": layer.exact_newest,
        "sinks": layer.config.sinks,
        "tail": layer.config.tail,
        "finding": dataclasses.asdict(layer.finding) if layer.finding else None,
        "formats": [s.format.to_dict() for s in _stores(layer)],
        "fingerprints": [s.format.fingerprint() for s in _stores(layer)],
    }
    tensors: dict[str, Tensor] = {}
    for store in _stores(layer):
        for index, row in enumerate(layer.rows):
            codes, scales = _row_bytes(store, row)
            tensors[f"rows.{index}.{store.format.name}.codes"] = codes
            tensors[f"rows.{index}.{store.format.name}.scales"] = scales
    if layer.dense.keys is not None and layer.dense.values is not None:
        used = layer.dense.num_sinks + layer.dense.count
        tensors["dense.keys"] = layer.dense.keys[:, :, :used].contiguous()
        tensors["dense.values"] = layer.dense.values[:, :, :used].contiguous()
        tensors["dense.positions"] = layer.dense.positions[:, :used].contiguous()
    if layer.means is not None:
        tensors["means"] = layer.means
    return header, tensors


def restore_layer(layer: PackedLayer, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Fill an empty layer of the same configuration with what `export_layer` gave.

    Raises CacheFileError, naming both values, where the rows were coded differently than this layer codes them.
    """
    if layer.rows:
        raise ValueError(f"layer {layer.layer}: restore into an empty layer")
    for field in ("sinks", "tail"):
        if header[field] != (own := getattr(layer.config, field)):
            raise CacheFileError(
                f"layer {layer.layer}: the file has {field}={header[field]!r}, this cache uses {own!r}; enable the "
                f"model with the file's --kv, or build the cache again"
            )
    formats = [StreamFormat.from_dict(data) for data in header["formats"]]
    finding = Finding(**header["finding"]) if header["finding"] else None
    if formats:
        _check_formats(layer, formats, finding, header["fingerprints"])
        _check_rows(formats, header["packed_lens"], tensors)
    layer.finding = finding
    layer.rows = [Row(pad) for pad in header["pads"]]
    layer.columns = int(header["columns"])
    layer.exact_newest = bool(header["exact_newest"])
    layer.pads_known = bool(layer.rows)
    layer.means = tensors.get("means")
    if "dense.keys" in tensors:
        layer.dense.restore(
            tensors["dense.keys"], tensors["dense.values"], tensors["dense.positions"],
            int(header["dense_start"]), int(header["dense_count"]),
        )  # fmt: skip
    if formats:
        _restore_rows(layer, formats, header["packed_lens"], tensors)


def _restore_rows(
    layer: PackedLayer, formats: list[StreamFormat], packed_lens: list[int], tensors: dict[str, Tensor]
) -> None:
    like = tensors[f"rows.0.{formats[0].name}.codes"]
    blocks = sum(-(-packed_len // BLOCK) for packed_len in packed_lens)
    layer.open_stores(formats[0], formats[1], like.shape[0], like.device, blocks)
    layer.take_blocks(list(packed_lens))
    for store in _stores(layer):
        for index, row in enumerate(layer.rows):
            name = f"rows.{index}.{store.format.name}"
            codes, scales = tensors[f"{name}.codes"], tensors[f"{name}.scales"]
            for number, block in enumerate(row.blocks):
                part = slice(number * BLOCK, min((number + 1) * BLOCK, packed_lens[index]))
                store.load_block(block, codes[:, part], scales[:, part])
    for row, packed_len in zip(layer.rows, packed_lens, strict=True):
        row.packed_len = packed_len


def merge_layers(layers: list[PackedLayer]) -> PackedLayer:
    """One layer whose batch holds the rows of all, each as it would be alone; shorter ones get more left pads.

    The layers must be of the same model layer and configuration, and settled. Packed rows are copied, not coded
    again. Raises ConfigError where they differ.
    """
    first = layers[0]
    for other in layers[1:]:
        if other.config != first.config or other.layer != first.layer:
            raise ConfigError(
                f"layer {other.layer} with kv={other.config.name} cannot join layer {first.layer} with "
                f"kv={first.config.name}"
            )
    for layer in layers:
        layer.require_settled()
    merged = PackedLayer(first.config, first.layer, slow=first.slow)
    merged.columns = max(layer.columns for layer in layers)
    merged.pads_known = True
    opened = [layer for layer in layers if layer.keys is not None]
    for layer in layers:
        merged.rows += [Row(row.pad + merged.columns - layer.columns) for row in layer.rows]
    merged.dense.join([(layer.dense, merged.columns - layer.columns) for layer in layers])
    if opened:
        _copy_packed(merged, layers, opened[0])
    merged.place_all()
    return merged


def _copy_packed(merged: PackedLayer, layers: list[PackedLayer], like: PackedLayer) -> None:
    assert like.keys is not None
    assert like.values is not None
    for layer in layers:
        if layer.keys is not None and layer.keys.format != like.keys.format:
            raise ConfigError(
                f"layer {like.layer}: one cache holds its keys at {layer.keys.format.bits} bits, another at "
                f"{like.keys.format.bits}; caches with different protection cannot share a batch"
            )
    merged.finding = like.finding
    lens = [row.packed_len for layer in layers for row in layer.rows]
    blocks = sum(-(-packed_len // BLOCK) for packed_len in lens)
    merged.open_stores(like.keys.format, like.values.format, like.keys.num_kv_heads, like.keys.device, blocks)
    merged.take_blocks(lens)
    position = 0
    for layer in layers:
        for row in layer.rows:
            target = merged.rows[position]
            for store, origin in zip(_stores(merged), _stores(layer), strict=bool(row.packed_len)):
                for new, old in zip(target.blocks, row.blocks, strict=True):
                    store.copy_block(old, new, origin)
            target.packed_len = row.packed_len
            position += 1
    if any(layer.means is not None for layer in layers):
        blank = torch.zeros(
            1, like.keys.num_kv_heads, like.keys.format.width, dtype=torch.bfloat16, device=like.keys.device
        )
        merged.means = torch.cat(
            [m if (m := layer.means) is not None else blank.expand(len(layer.rows), -1, -1) for layer in layers]
        )


def _stores(layer: PackedLayer) -> list[StreamStore]:
    return [store for store in (layer.keys, layer.values) if store is not None]


def _row_bytes(store: StreamStore, row: Row) -> tuple[Tensor, Tensor]:
    """Canonical codes and scales of a row's packed positions, [num_kv_heads, packed, …]."""
    parts = []
    for index, block in enumerate(row.blocks):
        parts.append(store.canonical(block, min(BLOCK, row.packed_len - index * BLOCK)))
    if not parts:
        codec = store.packed.codec
        codes = torch.zeros(store.num_kv_heads, 0, codec.code_bytes, dtype=torch.uint8, device=store.device)
        return codes, torch.zeros(store.num_kv_heads, 0, codec.groups, dtype=codec.scale_dtype, device=store.device)
    return torch.cat([codes for codes, _ in parts], 1), torch.cat([scales for _, scales in parts], 1)


def _check_rows(formats: list[StreamFormat], packed_lens: list[int], tensors: dict[str, Tensor]) -> None:
    """Every row's tensors must have the sizes that the header promises."""
    for stream in formats:
        for index, packed_len in enumerate(packed_lens):
            for part, width in (("codes", stream.code_bytes), ("scales", stream.groups)):
                name = f"rows.{index}.{stream.name}.{part}"
                if tuple(tensors[name].shape[1:]) != (packed_len, width):
                    raise CacheFileError(
                        f"{name}: the file holds {tuple(tensors[name].shape[1:])}, its header ({packed_len}, {width})"
                    )


def _check_formats(
    layer: PackedLayer, formats: list[StreamFormat], finding: Finding | None, fingerprints: list[str]
) -> None:
    """The file's formats must be what this configuration gives; only protection may have raised the keys' bits."""
    wanted = layer.config.stream_formats(formats[0].width, formats[1].width)
    boosted = wanted[0].with_bits(formats[0].bits)
    expected = (boosted if finding and finding.action == "boosted" else wanted[0], wanted[1])
    for got, want, stored in zip(formats, expected, fingerprints, strict=True):
        for field in dataclasses.fields(StreamFormat):
            old, new = getattr(got, field.name), getattr(want, field.name)
            if old != new:
                raise CacheFileError(
                    f"layer {layer.layer} {want.name}: the file has {field.name}={old!r}, this cache uses {new!r}; "
                    f"enable the model with the file's --kv, or build the cache again"
                )
        if want.fingerprint() != stored:
            raise CacheFileError(
                f"layer {layer.layer} {want.name}: the file's rotation and codebook have fingerprint {stored}, this "
                f"version computes {want.fingerprint()}; build the cache again"
            )
