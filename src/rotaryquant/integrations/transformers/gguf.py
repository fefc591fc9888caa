"""GGUF files as model folders: converted once to safetensors, kept in the cache folder, never half-written.

A converted model lives in `models/<stem>-<first 12 hex digits of the source's sha256>`, with a marker that names
its source. It is written to a temporary sibling and renamed when whole; a lock makes a second process wait.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from rotaryquant import env
from rotaryquant.errors import ModelFileError
from rotaryquant.formats.gguf import GgufHeader, read_gguf_header
from rotaryquant.integrations.transformers.quiet import quiet
from rotaryquant.weights.headers import refuse_pointer

MARKER = "rotaryquant-source.json"

#: Raised when what a conversion writes changes, so that folders of an older layout are not taken for new ones.
_LAYOUT = 1
_BF16_BYTES = 2


def check_gguf(path: Path) -> GgufHeader:
    """Header of a GGUF file that is whole. Raises ModelFileError with expected and found bytes otherwise."""
    refuse_pointer(path)
    try:
        header = read_gguf_header(path)
    except ValueError as error:
        raise ModelFileError(f"{path} ({path.stat().st_size} bytes): {error}; fetch the file again") from error
    size = path.stat().st_size
    if size < header.size:
        raise ModelFileError(
            f"{path}: expected {header.size} bytes, found {size}; the download was probably cut short; "
            f"fetch the file again"
        )
    return header


def gguf_config(path: Path) -> PretrainedConfig:
    """The transformers configuration that a GGUF file describes. Raises ModelFileError where it cannot be read."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, OSError) as error:
        raise ModelFileError(f"{path}: transformers cannot read this GGUF file: {error}") from error
    return config


def converted_folder(path: Path, notify: Callable[[str], None]) -> Path:
    """Folder with the safetensors form of a GGUF file, converted now if it is not there yet.

    notify: told in words before a conversion, which takes a while. Raises ModelFileError where the file is
    damaged, is of an architecture that transformers cannot read, or where the disk has no room.
    """
    header = check_gguf(path)
    digest = _sha256(path)
    source = {"layout": _LAYOUT, "name": path.name, "size": path.stat().st_size, "sha256": digest}
    models = env.cache_dir() / "models"
    target = models / f"{path.stem}-{digest[:12]}"
    if _is_converted(target, source):
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f".{target.name}.lock"):
            if not _is_converted(target, source):
                _check_room(models, header)
                notify(f"converting {path.name} to safetensors in {target} (once)")
                with quiet(bars=True):
                    _convert(path, target, header, source)
    except OSError as error:
        raise ModelFileError(f"{target}: cannot write the converted model: {error}; set RQ_CACHE elsewhere") from error
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_converted(target: Path, source: dict[str, Any]) -> bool:
    """Whether `target` is whole and was made from this very file."""
    marker = target / MARKER
    if not marker.is_file():
        return False
    try:
        found = json.loads(marker.read_text())
    except ValueError as error:
        raise ModelFileError(f"{marker}: damaged ({error}); remove the folder {target} and run again") from error
    return all(found.get(key) == source[key] for key in ("layout", "size", "sha256"))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Exclusive between processes; the system releases it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_room(models: Path, header: GgufHeader) -> None:
    needed = _BF16_BYTES * sum(tensor.elements for tensor in header.tensors)
    free = shutil.disk_usage(models).free
    if free < needed:
        raise ModelFileError(
            f"{models}: the converted model needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
            f"make room, or set RQ_CACHE to a folder on another disk"
        )


def _convert(path: Path, target: Path, header: GgufHeader, source: dict[str, Any]) -> None:
    """Write the folder beside `target`, then rename it: only a whole one ever has the final name."""
    for stale in target.parent.glob(f".{target.name}.partial-*"):
        shutil.rmtree(stale)  # left by a conversion that was interrupted; ours is the lock
    if target.exists():
        shutil.rmtree(target)  # an older layout, or without marker
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        _write(path, partial, header)
        (partial / MARKER).write_text(json.dumps(source, indent=1))
        _sync(partial)
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(path: Path, folder: Path, header: GgufHeader) -> None:
    """Model in bf16, tokenizer and configuration."""
    where = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.bfloat16, **where)
    except Exception as error:  # whatever the readers meet in a foreign file; tokenizers raises plain Exception
        raise ModelFileError(f"{path}: transformers cannot read this GGUF file: {error!r}") from error
    # the loader marks the model as quantized, which forbids saving, though all its tensors are dense by now
    quantizer: Any = model.hf_quantizer
    quantizer.remove_quantization_config(model)
    model.config.dtype = torch.bfloat16
    turn_end = header.metadata.get("tokenizer.ggml.eot_token_id")
    if isinstance(turn_end, int):
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        model.generation_config.eos_token_id = list(dict.fromkeys([*ends, turn_end]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _sync(folder: Path) -> None:
    """Push the files to the disk before the rename, so that a power cut leaves no empty ones behind the marker."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
