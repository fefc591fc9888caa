"""A checkpoint to one with packed weights: tensor by tensor, in the memory of one of them.

What comes out has the names of what went in. A rounded tensor keeps its name with its codes (uint8) and gets a second
one, `NAME_scale`, beside it, with AWQ a third, `NAME_inputs`; all others are copied. How a tensor is stored is told by
its shapes and by its part and layer (`PackedConfig`), never by a table of names, which change on the way into a model.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import safe_open
from torch import Tensor

from rotaryquant.errors import ModelFileError
from rotaryquant.formats import weight as formats
from rotaryquant.formats.weight import WeightFormat
from rotaryquant.models.roles import SCALE, UP_INPUTS, Part, inputs_name, layer_number, parts_of
from rotaryquant.weights.awq import SharedFactors
from rotaryquant.weights.conversion_log import Log
from rotaryquant.weights.headers import INDEX_NAME, SINGLE_NAME, TensorInfo, read_folder
from rotaryquant.weights.packed_config import METHOD, PackedConfig, refuse_transposed
from rotaryquant.weights.recipes import ROUNDED, Place, Recipe, bits_of, by_role
from rotaryquant.weights.sensitivity import MEASURED
from rotaryquant.weights.shards import Entry, ShardWriter, header_bytes, write_whole
from rotaryquant.weights.stacks import round_tensor, squared_error

#: Bytes of a file at most, but for a single tensor that is larger.
_SHARD_BYTES = 5_000_000_000

#: How often progress is told of, at most.
_STEPS = 50

_FLOATS = ("F32", "F16", "BF16")

#: Files that are not copied: weights, and what tells of weights.
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".md"}
_LOG = "quantization-log.jsonl"
#: Stands in a folder that is not whole yet, and says of what.
_NOTE = "quantization.partial.json"


@dataclass(frozen=True)
class Item:
    """One tensor of the checkpoint. form: how its rows are packed, or None where it is copied.

    inputs: the name of its inputs' factors, or None where it has none. leads: whether these are written with it, and
    not with another tensor that shares them.
    """

    source: TensorInfo
    part: Part
    form: WeightFormat | None
    inputs: str | None = None
    leads: bool = True

    @property
    def shares(self) -> str | None:
        """The name of the factors that it shares with others."""
        return self.inputs if self.inputs is not None and self.inputs.endswith(UP_INPUTS) else None

    def entries(self) -> list[Entry]:
        """What it becomes."""
        name, shape = self.source.name, self.source.shape
        if self.form is None:
            return [Entry(name, self.source.dtype, shape)]
        factors = shape[-1:] if self.shares else (*shape[:-2], shape[-1])
        return [
            Entry(name, "U8", (*shape[:-1], self.form.code_bytes)),
            Entry(name + SCALE, "BF16", (*shape[:-1], self.form.groups)),
            *([Entry(self.inputs, "BF16", factors)] if self.inputs is not None and self.leads else []),
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of what it becomes."""
        return sum(entry.nbytes for entry in self.entries())


def plan_items(tensors: Sequence[TensorInfo], recipe: Recipe, base: PackedConfig) -> list[Item]:
    """What becomes of every tensor, in the order of names.

    base: grid, group and seed. Raises UnsupportedModelError for a tensor of which no role is known, ModelFileError for
    one that is not of floating-point numbers, as in a checkpoint that is quantised already.
    """
    parts = parts_of(tensor.name for tensor in tensors)
    refuse_transposed(tensors, {name: part.role for name, part in parts.items()})
    matrices = {tensor.name: parts[tensor.name] for tensor in tensors if len(tensor.shape) in (2, 3)}
    bits, items, led = bits_of(recipe, matrices), [], set()
    for tensor in sorted(tensors, key=lambda one: _order(one.name)):
        form = None
        if tensor.name in bits:
            if tensor.dtype not in _FLOATS:
                raise ModelFileError(
                    f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}, wanted one of {', '.join(_FLOATS)}; "
                    f"quantise from a checkpoint that is not quantised yet"
                )
            form = base.form(tensor.shape[-1], bits[tensor.name])
        part = parts[tensor.name]
        inputs = inputs_name(tensor.name, part.role) if form is not None and base.factors else None
        items.append(Item(tensor, part, form, inputs, inputs not in led))
        led.add(inputs)
    return items


def _order(name: str) -> tuple[int, str]:
    """Layers by number, what stands outside of them first."""
    layer = layer_number(name)
    return (-1 if layer is None else layer), name


def config_of(items: Sequence[Item], recipe: Recipe, base: PackedConfig) -> PackedConfig:
    """What the checkpoint's configuration says of its packed tensors: their bits by part and layer.

    Raises ModelFileError where tensors of one part and layer have different bits: no reader could tell them apart.
    """
    found: dict[Part, dict[int | None, int]] = {}
    for item in items:
        bits = item.form.bits if item.form is not None else None
        if bits is None:
            continue
        layer = layer_number(item.source.name)
        if found.setdefault(item.part, {}).setdefault(layer, bits) != bits:
            raise ModelFileError(
                f"{item.source.name}: {bits} bits, others of its part and layer {layer} have other ones"
            )
    return base.with_bits(recipe.name, found)


def sizes_of(tensors: Sequence[TensorInfo], base: PackedConfig) -> tuple[dict[Place, dict[int, int]], int]:
    """Bytes of each part in each layer at each of BITS, and of everything else in the files, headers included."""
    sizes: dict[Place, dict[int, int]] = {}
    kept, headers = 0, 0
    for bits in formats.BITS:
        items = plan_items(tensors, Recipe("", by_role(bits, bits, bits)), base)
        kept = sum(item.nbytes for item in items if not _is_rounded(item))
        headers = max(headers, sum(header_bytes(_entries(shard)) for shard in shards_of(items)))
        for item in filter(_is_rounded, items):
            at = sizes.setdefault((item.part, layer_number(item.source.name)), dict.fromkeys(formats.BITS, 0))
            at[bits] += item.nbytes
    return sizes, kept + headers


def _is_rounded(item: Item) -> bool:
    return item.part.role in ROUNDED and len(item.source.shape) in (2, 3)


def _entries(items: Sequence[Item]) -> list[Entry]:
    return [entry for item in items for entry in item.entries()]


def shards_of(items: Sequence[Item]) -> list[list[Item]]:
    """Items in files of _SHARD_BYTES at most."""
    shards: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    return shards


def convert(
    folder: Path,
    out: Path,
    recipe: Recipe,
    base: PackedConfig,
    hessian_of: Callable[[str], Tensor | None],
    progress: Callable[[str, float], None],
    heard: Mapping[str, int] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Write the packed checkpoint of `folder` into `out`, which is new or holds a stopped run of the same.

    hessian_of: inputs' second moment of a matrix (for a stack: of each) or by the name of shared factors, or None.
    heard: of how many inputs, filled by then. Returns the log, an entry a tensor.
    Raises ModelFileError where files are damaged, the disk is full, or `out` holds something else.
    """
    items = plan_items(read_folder(folder), recipe, base)
    config = config_of(items, recipe, base)
    _prepare(out, items, config)
    shards = shards_of(items)
    names = [SINGLE_NAME] if len(shards) == 1 else [
        f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))
    ]  # fmt: skip
    total, done = sum(item.source.nbytes for item in items), 0
    log, shared = Log(out / _LOG), SharedFactors(hessian_of)
    for item in items:
        if item.shares is not None and item.form is not None:
            shared.add(item.shares, item.source, item.form)
    for name, shard in zip(names, shards, strict=True):
        path = out / name
        if path.is_file():  # of the run that was stopped
            done += sum(item.source.nbytes for item in shard)
            continue
        with ShardWriter(path, _entries(shard)) as writer:
            at = 0
            for item in shard:
                at += len(item.entries())
                if at > writer.done:
                    tensors, said = _converted(item, hessian_of, shared)
                    log.add({**said, "samples": heard.get(item.source.name, 0)})
                    writer.add(tensors)
                if (done + item.source.nbytes) * _STEPS // total > done * _STEPS // total:
                    progress(item.source.name, (done + item.source.nbytes) / total)
                done += item.source.nbytes
            writer.finish()
    if len(shards) > 1:
        _write_index(out, names, shards)
    lines = log.finish([item.source.name for item in items])
    _finish_config(folder, out, config)
    return lines


def _prepare(out: Path, items: Sequence[Item], config: PackedConfig) -> None:
    """Make `out`, with a note on what is being written there. Raises ModelFileError where it holds something else.

    The note knows the source's files by size and time of change, so that two models of one shape are never mixed.
    """
    note = out / _NOTE
    files = sorted({item.source.file for item in items})
    source = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    tensors = [[item.source.name, item.source.dtype, list(item.source.shape)] for item in items]
    wanted = json.dumps({"files": source, "tensors": tensors, **config.as_dict()})
    held = {path.name for path in out.iterdir()} - {MEASURED} if out.is_dir() else set()
    if held and (not note.is_file() or note.read_text() != wanted):
        raise ModelFileError(f"{out}: holds files that are not of this conversion; name another folder, or empty it")
    out.mkdir(parents=True, exist_ok=True)
    write_whole(note, wanted)


def _converted(
    item: Item, hessian_of: Callable[[str], Tensor | None], shared: SharedFactors
) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors that an item becomes, and what the log says of it."""
    source = item.source
    with safe_open(source.file, "pt") as file:
        tensor = file.get_tensor(source.name)
    said: dict[str, Any] = {
        "name": source.name, "role": item.part.role.value, "elements": source.elements, "nbytes": item.nbytes,
    }  # fmt: skip
    if item.form is None:
        return [tensor], {**said, "bits": None, "relative_error": 0.0}
    given = shared(item.shares) if item.shares is not None else None
    found = round_tensor(tensor, item.form, hessian_of(source.name), scaled=item.inputs is not None, shared=given)
    error = squared_error(tensor, found.values)
    said |= {"bits": item.form.bits, "group": item.form.group, "grid": item.form.grid, "relative_error": error}
    factors = given if given is not None else found.factors
    return [found.codes, found.scales, *([factors] if factors is not None and item.leads else [])], said


def _write_index(out: Path, names: Sequence[str], shards: Sequence[Sequence[Item]]) -> None:
    pairs = [
        (entry, name) for name, shard in zip(names, shards, strict=True) for item in shard for entry in item.entries()
    ]
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry, _ in pairs)},
        "weight_map": {entry.name: name for entry, name in pairs},
    }
    write_whole(out / INDEX_NAME, json.dumps(index, indent=1) + "\n")


def _finish_config(folder: Path, out: Path, config: PackedConfig) -> None:
    """Tokenizer and other files as they are; config.json, which makes it a model, last."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix not in _NOT_COPIED and path.name not in (INDEX_NAME, "config.json"):
            shutil.copyfile(path, out / path.name)
    model = json.loads((folder / "config.json").read_text())
    model["quantization_config"] = {"quant_method": METHOD, **config.as_dict()}
    write_whole(out / "config.json", json.dumps(model, indent=2) + "\n")
    (out / _NOTE).unlink()
