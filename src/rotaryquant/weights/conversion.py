"""A checkpoint to one with packed weights: tensor by tensor, in the memory of one of them.

What comes out has the names of what went in. A rounded tensor keeps its name with its codes (uint8) and gets a second
one, `NAME_scale`, beside it; all others are copied. How a tensor is stored is told by its shapes and by its role and
layer (`PackedConfig`), never by a table of names, which change on the way into a model.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rotaryquant.errors import ModelFileError
from rotaryquant.formats import weight as formats
from rotaryquant.formats.weight import WeightFormat
from rotaryquant.models.roles import SCALE, Role, layer_number, roles_of
from rotaryquant.ops.dequant_matmul import dequantize
from rotaryquant.ops.weights import PackedWeight
from rotaryquant.weights.headers import INDEX_NAME, SINGLE_NAME, TensorInfo, read_folder
from rotaryquant.weights.packed_config import METHOD, PackedConfig, refuse_transposed
from rotaryquant.weights.recipes import Recipe, bits_of
from rotaryquant.weights.rounding import round_matrix
from rotaryquant.weights.shards import Entry, ShardWriter, write_whole

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
    """One tensor of the checkpoint. form: how its rows are packed, or None where it is copied."""

    source: TensorInfo
    role: Role
    form: WeightFormat | None

    def entries(self) -> list[Entry]:
        """What it becomes."""
        name, shape = self.source.name, self.source.shape
        if self.form is None:
            return [Entry(name, self.source.dtype, shape)]
        return [
            Entry(name, "U8", (*shape[:-1], self.form.code_bytes)),
            Entry(name + SCALE, "BF16", (*shape[:-1], self.form.groups)),
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
    roles = roles_of(tensor.name for tensor in tensors)
    refuse_transposed(tensors, roles)
    matrices = {tensor.name: roles[tensor.name] for tensor in tensors if len(tensor.shape) in (2, 3)}
    bits, items = bits_of(recipe, matrices), []
    for tensor in sorted(tensors, key=lambda one: _order(one.name)):
        form = None
        if tensor.name in bits:
            if tensor.dtype not in _FLOATS:
                raise ModelFileError(
                    f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}, wanted one of {', '.join(_FLOATS)}; "
                    f"quantise from a checkpoint that is not quantised yet"
                )
            form = base.form(tensor.shape[-1], bits[tensor.name])
        items.append(Item(tensor, roles[tensor.name], form))
    return items


def _order(name: str) -> tuple[int, str]:
    """Layers by number, what stands outside of them first."""
    layer = layer_number(name)
    return (-1 if layer is None else layer), name


def config_of(items: Sequence[Item], recipe: Recipe, base: PackedConfig) -> PackedConfig:
    """What the checkpoint's configuration says of its packed tensors: their bits by role and layer.

    Raises ModelFileError where tensors of one role and layer have different bits: no reader could tell them apart.
    """
    found: dict[Role, dict[int | None, int]] = {}
    for item in items:
        bits = item.form.bits if item.form is not None else None
        if bits is None:
            continue
        layer = layer_number(item.source.name)
        if found.setdefault(item.role, {}).setdefault(layer, bits) != bits:
            raise ModelFileError(
                f"{item.source.name}: {bits} bits, others of its role and layer {layer} have other ones"
            )
    return base.with_bits(recipe.name, found)


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

    hessian_of: inputs' second moment of a matrix (for a stack: of each), or None. heard: of how many inputs, filled by
    then. Returns the log, an entry a tensor.
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
    log = _Log(out / _LOG)
    for name, shard in zip(names, shards, strict=True):
        path = out / name
        if path.is_file():  # of the run that was stopped
            done += sum(item.source.nbytes for item in shard)
            continue
        with ShardWriter(path, [entry for item in shard for entry in item.entries()]) as writer:
            at = 0
            for item in shard:
                at += len(item.entries())
                if at > writer.done:
                    tensors, said = _converted(item, hessian_of)
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
    if out.is_dir() and any(out.iterdir()) and (not note.is_file() or note.read_text() != wanted):
        raise ModelFileError(f"{out}: holds files that are not of this conversion; name another folder, or empty it")
    out.mkdir(parents=True, exist_ok=True)
    write_whole(note, wanted)


def _converted(item: Item, hessian_of: Callable[[str], Tensor | None]) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors that an item becomes, and what the log says of it."""
    source = item.source
    with safe_open(source.file, "pt") as file:
        tensor = file.get_tensor(source.name)
    said: dict[str, Any] = {
        "name": source.name, "role": item.role.value, "elements": source.elements, "nbytes": item.nbytes,
    }  # fmt: skip
    if item.form is None:
        return [tensor], {**said, "bits": None, "relative_error": 0.0}
    matrices = tensor if tensor.dim() == 3 else tensor[None]
    hessian = hessian_of(source.name)
    packed = [
        round_matrix(matrix, item.form, None if hessian is None else hessian if hessian.dim() == 2 else hessian[index])
        for index, matrix in enumerate(matrices)
    ]
    error = sum(map(_lost, packed, matrices)) / max(float(matrices.double().square().sum()), 1e-300)
    codes, scales = torch.stack([one.codes for one in packed]), torch.stack([one.scales for one in packed])
    said |= {"bits": item.form.bits, "group": item.form.group, "grid": item.form.grid, "relative_error": error}
    return [codes.view(*source.shape[:-1], -1), scales.view(*source.shape[:-1], -1)], said


def _lost(packed: PackedWeight, matrix: Tensor) -> float:
    """Squared error of a rounded matrix; rotations leave it as it is."""
    rotation = formats.input_rotation(packed.codec.format)
    wanted = matrix.float()
    if rotation is not None:
        wanted = wanted @ torch.from_numpy(rotation).to(wanted)
    return float((dequantize(packed) - wanted).double().square().sum())


class _Log:
    """A line a tensor, kept while the run goes on, so that one that is stopped loses none. path: of the whole log."""

    def __init__(self, path: Path) -> None:
        self._whole, self._path = path, path.with_name(path.name + ".partial")

    def add(self, said: Mapping[str, Any]) -> None:
        """One more tensor; written before the tensor counts as there."""
        with self._path.open("a") as file:
            file.write(json.dumps(said) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        for path in (self._whole, self._path):
            for line in path.read_text().splitlines() if path.is_file() else ():
                try:
                    yield json.loads(line)
                except ValueError:  # cut off by a stop; the tensor was then written again, and so was its line
                    continue

    def finish(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """All lines in the order of the tensors, each tensor's last, as the whole log."""
        by_name = {line["name"]: line for line in self._lines()}
        lines = [by_name[name] for name in names]
        write_whole(self._whole, "".join(json.dumps(line) + "\n" for line in lines))
        self._path.unlink(missing_ok=True)
        return lines


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
