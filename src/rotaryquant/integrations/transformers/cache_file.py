"""A cache in a file: everything that says what its bytes mean travels with them, and a reader checks all of it."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from rotaryquant.errors import CacheFileError, RotaryQuantError
from rotaryquant.formats.kv import VERSION
from rotaryquant.formats.whole import written_whole
from rotaryquant.integrations.transformers.cache import PackedCache, PackedCacheLayer
from rotaryquant.integrations.transformers.fingerprint import model_fingerprint
from rotaryquant.kv.state import export_layer, restore_layer

_FORMAT = "rotaryquant-kv"
#: Bookkeeping, which stays there whatever the model's device.
_ON_THE_CPU = ".dense.positions"


def save_cache(path: str | Path, model: PreTrainedModel, cache: PackedCache, token_ids: Tensor) -> None:
    """Write `cache` to `path` (safetensors); the file appears whole or not at all.

    token_ids: int64 [batch, columns], the tokens whose keys it holds. Raises CacheFileError for a layer type that
    has no written form, and ValueError where the tokens do not match the cache.
    """
    columns = cache.get_seq_length()
    if token_ids.shape[-1] != columns:
        raise ValueError(f"token_ids has {token_ids.shape[-1]} columns, the cache holds {columns}")
    header: dict[str, Any] = {
        "version": VERSION,
        "model": model_fingerprint(model),
        "kv": cache.kv.name,
        "dtype": str(model.dtype),
        "layers": [],
    }
    tensors: dict[str, Tensor] = {"token_ids": token_ids.contiguous()}
    for index, layer in enumerate(cache.layers):
        data, named = _export(index, layer)
        header["layers"].append(data)
        tensors.update({f"{index}.{name}": tensor.contiguous().clone() for name, tensor in named.items()})
    with written_whole(path) as name:
        save_file(tensors, name, metadata={"format": _FORMAT, "header": json.dumps(header)})


def load_cache(path: str | Path, model: PreTrainedModel, cache: PackedCache) -> Tensor:
    """Fill the empty `cache` from a file written by `save_cache`, on the model's device; returns its token ids int64
    [batch, columns] on the CPU.

    Raises CacheFileError, naming both values, for a damaged file or one of another version, model, dtype,
    rotation, width or bits.
    """
    if cache.get_seq_length():
        raise ValueError("cache holds tokens already; load into an empty one (enabled.new_cache())")
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise CacheFileError(f"{path}: not a readable cache file ({error}); write it again with save_cache") from error
    if metadata.get("format") != _FORMAT:
        raise CacheFileError(f"{path}: format is {metadata.get('format')!r}, wanted {_FORMAT!r}; not a cache file")
    try:
        return _fill(path, model, cache, json.loads(metadata["header"]), tensors)
    except (RotaryQuantError, KeyError, TypeError, ValueError) as error:
        cache.reset()  # type: ignore[no-untyped-call]
        if isinstance(error, RotaryQuantError):
            raise
        raise CacheFileError(f"{path}: its header or tensors are incomplete ({error!r}); write it again") from error


def _fill(
    path: str | Path, model: PreTrainedModel, cache: PackedCache, header: dict[str, Any], tensors: dict[str, Tensor]
) -> Tensor:
    """Check a file's header field by field and restore every layer."""
    _check(path, "version", header["version"], VERSION)
    _check(path, "model", header["model"], model_fingerprint(model))
    _check(path, "dtype", header["dtype"], str(model.dtype))
    _check(path, "number of layers", len(header["layers"]), len(cache.layers))
    for index, (layer, data) in enumerate(zip(cache.layers, header["layers"], strict=True)):
        named = {
            key.split(".", 1)[1]: t if key.endswith(_ON_THE_CPU) else t.to(model.device)
            for key, t in tensors.items()
            if key.startswith(f"{index}.")
        }
        _restore(path, index, layer, data, named)
    token_ids: Tensor = tensors["token_ids"]
    return token_ids


def _check(path: str | Path, field: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise CacheFileError(f"{path}: {field} is {got!r} in the file, {wanted!r} here; build the cache again")


def _export(index: int, layer: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if isinstance(layer, PackedCacheLayer):
        header, tensors = export_layer(layer.packed)
        return {"type": "packed", **header}, tensors
    if isinstance(layer, DummyLayer):
        return {"type": "none"}, {}
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        data = {"type": type(layer).__name__, "length": layer.get_seq_length()}
        return data, {} if layer.keys is None else {"keys": layer.keys, "values": layer.values}
    if type(layer) is LinearAttentionLayer:
        states = {f"conv.{i}": s for i, s in layer.conv_states.items() if s is not None}
        states |= {f"recurrent.{i}": s for i, s in layer.recurrent_states.items() if s is not None}
        return {"type": "LinearAttentionLayer", "previous": list(layer.has_previous_state.values())}, states
    raise CacheFileError(f"layer {index}: a {type(layer).__name__} has no written form; this cache cannot be saved")


def _restore(path: str | Path, index: int, layer: Any, data: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    kind = "packed" if isinstance(layer, PackedCacheLayer) else type(layer).__name__
    kind = "none" if isinstance(layer, DummyLayer) else kind
    _check(path, f"layer {index} type", data["type"], kind)
    if isinstance(layer, PackedCacheLayer):
        restore_layer(layer.packed, data, tensors)
        if "dense.keys" in tensors:
            layer.lazy_initialization(tensors["dense.keys"], tensors["dense.values"])
    elif "keys" in tensors:
        layer.lazy_initialization(tensors["keys"], tensors["values"])
        layer.keys, layer.values = tensors["keys"], tensors["values"]
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = data["length"]
    elif kind == "LinearAttentionLayer":
        for number, previous in enumerate(data["previous"]):
            conv, recurrent = tensors.get(f"conv.{number}"), tensors.get(f"recurrent.{number}")
            layer.lazy_initialization(conv, recurrent, number)
            if conv is not None:
                layer.conv_states[number].copy_(conv)
            if recurrent is not None:
                layer.recurrent_states[number].copy_(recurrent)
            layer.has_previous_state[number] = previous
