"""Headers of safetensors files: what a checkpoint holds, and whether all of it is there.

Only headers and file sizes are read, so that a damaged checkpoint of any size is refused at once, by name.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotaryquant.errors import ModelFileError

#: Bits of one element, by the name that safetensors files use.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

#: The format's own limit; a longer header is a damaged or hostile length field.
_MAX_HEADER = 100_000_000
_POINTER = b"version https://git-lfs"
_AGAIN = "the download was probably cut short; fetch the file again"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint. shape: in elements. nbytes: in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def refuse_pointer(path: Path) -> None:
    """Raise ModelFileError where `path` is empty, or a Git LFS pointer in place of the data."""
    size = path.stat().st_size
    if size == 0:
        raise ModelFileError(f"{path}: the file is empty (0 bytes); {_AGAIN}")
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
    if start == _POINTER:
        raise ModelFileError(
            f"{path}: a Git LFS pointer of {size} bytes stands in place of the data; run `git lfs pull` in its folder"
        )


def read_header(path: Path) -> list[TensorInfo]:
    """Tensors of one safetensors file, in the order of their bytes.

    Raises ModelFileError where the file is not a whole safetensors file, with the expected and the found bytes.
    """
    refuse_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ModelFileError(f"{path}: expected at least 8 bytes of header length, found {size}; {_AGAIN}")
        length = header_length(path, prefix)
        if 8 + length > size:
            raise ModelFileError(f"{path}: expected at least {8 + length} bytes for its header, found {size}; {_AGAIN}")
        text = file.read(length)
    return parse_header(path, text, size)


def header_length(path: Path, prefix: bytes) -> int:
    """Bytes of the header that follows the first 8 of a file. Raises ModelFileError for more than the format allows."""
    (length,) = struct.unpack("<Q", prefix)
    if length > _MAX_HEADER:
        raise ModelFileError(
            f"{path}: its header claims {length} bytes, the format allows {_MAX_HEADER}; not a safetensors file"
        )
    return int(length)


def parse_header(path: Path, text: bytes, size: int) -> list[TensorInfo]:
    """Tensors of a header, in the order of their bytes. path: to name the file by. size: of the whole file.

    Raises ModelFileError where text is not a header, or not one of a file of that size.
    """
    tensors, length = _parse_header(path, text), len(text)
    expected = 8 + length + sum(tensor.nbytes for tensor in tensors)
    if expected != size:
        cause = _AGAIN if size < expected else "bytes follow the last tensor; the file was not written by one writer"
        raise ModelFileError(f"{path}: expected {expected} bytes, found {size}; {cause}")
    return tensors


def _parse_header(path: Path, text: bytes) -> list[TensorInfo]:
    """Tensors of a header, each checked: known dtype, bytes that fit the shape, no gap and no overlap."""
    try:
        header = json.loads(text)
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        entries.sort(key=lambda item: (item[1]["data_offsets"][0], item[1]["data_offsets"][1]))
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelFileError(f"{path}: its header is not the JSON of a safetensors file ({error})") from error
    tensors, end = [], 0
    for name, entry in entries:
        tensor, begin = _parse_entry(path, name, entry)
        if begin != end:
            raise ModelFileError(f"{path}: tensor {name} starts at byte {begin}, expected {end}: a gap or an overlap")
        end += tensor.nbytes
        tensors.append(tensor)
    return tensors


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    """One tensor and the byte at which it starts."""
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        begin, stop = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{path}: tensor {name} lacks dtype, shape or data_offsets ({error!r})") from error
    if dtype not in DTYPE_BITS or min(shape, default=0) < 0:
        raise ModelFileError(f"{path}: tensor {name} has dtype {dtype!r} and shape {shape}, which no reader knows")
    tensor = TensorInfo(name, dtype, shape, stop - begin, path)
    expected = -(-tensor.elements * DTYPE_BITS[dtype] // 8)
    if tensor.nbytes != expected:
        raise ModelFileError(
            f"{path}: tensor {name} ({dtype}, shape {list(shape)}) needs {expected} bytes, found {tensor.nbytes}"
        )
    return tensor, begin


def read_folder(folder: Path) -> list[TensorInfo]:
    """Tensors of all weight files of a model folder, checked as a whole.

    Raises ModelFileError where a shard is missing or damaged, where a tensor is in two shards, or where the index
    and the shards disagree.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _read_sharded(folder, index)
    single = folder / SINGLE_NAME
    if single.is_file():
        return read_header(single)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1:
        raise ModelFileError(f"{folder}: {len(found)} safetensors files but no {INDEX_NAME}; fetch the index as well")
    if found:
        raise ModelFileError(f"{folder}: no {SINGLE_NAME}, only {found[0].name}; rename it if it is the whole model")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise ModelFileError(
            f"{folder}: only pickle files ({pickled[0]}), which can run code when they are read; "
            f"convert the model to safetensors"
        )
    raise ModelFileError(f"{folder}: no {SINGLE_NAME} and no {INDEX_NAME}; this folder holds no weights")


def _read_sharded(folder: Path, index: Path) -> list[TensorInfo]:
    weight_map = read_weight_map(index)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelFileError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing, first {missing[0]}; finish the download"
        )
    return join_shards(index, weight_map, {shard: read_header(folder / shard) for shard in shards})


def read_weight_map(index: Path) -> dict[str, str]:
    """Which shard holds each tensor, by an index file. Raises ModelFileError where it is damaged."""
    refuse_pointer(index)
    try:
        weight_map = {str(name): str(shard) for name, shard in json.loads(index.read_bytes())["weight_map"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelFileError(f"{index}: not an index of a sharded checkpoint ({error!r}); {_AGAIN}") from error
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ModelFileError(f"{index}: names the shard {shard!r} outside its own folder")
    return weight_map


def join_shards(
    index: Path, weight_map: Mapping[str, str], headers: Mapping[str, list[TensorInfo]]
) -> list[TensorInfo]:
    """Tensors of all shards. Raises ModelFileError where they and the index disagree. headers: by shard."""
    folder, seen = index.parent, dict[str, TensorInfo]()
    for shard, tensors in headers.items():
        for tensor in tensors:
            if tensor.name in seen:
                first = seen[tensor.name].file.name
                raise ModelFileError(f"{folder}: tensor {tensor.name} is in {first} and again in {shard}")
            seen[tensor.name] = tensor
    for name, shard in weight_map.items():
        if name not in seen or seen[name].file.name != shard:
            where = f"it is in {seen[name].file.name}" if name in seen else "no shard holds it"
            raise ModelFileError(f"{index}: says that {shard} holds tensor {name}, but {where}")
    for name, tensor in seen.items():
        if name not in weight_map:
            raise ModelFileError(f"{folder}: {tensor.file.name} holds tensor {name}, which {INDEX_NAME} does not name")
    return list(seen.values())
