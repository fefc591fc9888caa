"""From a MODEL argument to a loaded model: find its files, check them, load them. Never runs a model's code."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import rotaryquant.integrations.transformers.packed_weights  # noqa: F401 - transformers learns to read them
from rotaryquant.errors import ConfigError, ModelFileError
from rotaryquant.integrations.sources import find_source
from rotaryquant.integrations.transformers.gguf import converted_folder
from rotaryquant.integrations.transformers.quiet import quiet
from rotaryquant.weights.headers import TensorInfo, read_folder, refuse_pointer

#: What is fetched from the hub: weights as safetensors, configuration, tokenizer. No pickle, no code.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["original/*", "onnx/*", "*.py", "*.bin", "*.pt", "*.pth"]

DTYPES = {"auto": "auto", "bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, in evaluation mode. name: as the user knows it."""

    name: str
    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer, by the generation configuration, the model's, and the tokenizer."""
        found: set[int] = set()
        for holder in (self.model.generation_config, self.model.config, self.tokenizer):
            ends = getattr(holder, "eos_token_id", None)
            found.update(ends if isinstance(ends, list | tuple) else [] if ends is None else [ends])
        return frozenset(found)


def _quiet(message: str) -> None:
    """Tell nobody."""


def model_folder(model: str | None, notify: Notify = _quiet) -> Path:
    """Local folder with config.json, checked safetensors and tokenizer of MODEL; fetches or converts if needed.

    notify: told in words what takes long. Raises ModelFileError where files are missing or damaged.
    """
    source = find_source(model)
    if isinstance(source, str):
        return _fetch(source)
    if source.is_dir():
        return source
    return converted_folder(source, notify)


def _fetch(hub_id: str) -> Path:
    """Snapshot of a hub repository in the hub's own cache."""
    ways = "check the name, go online or log in (`hf auth login`), or give a local folder"
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = _first_line(error)
        raise ModelFileError(f"model {hub_id!r} is not here and cannot be fetched: {reason}; {ways}") from error


def read_config(folder: Path) -> PretrainedConfig:
    """Configuration of a model folder. Raises ModelFileError where it is damaged or of an unknown kind."""
    refuse_pointer(folder / "config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ModelFileError(f"{folder / 'config.json'}: {_first_line(error)}") from error
    return config


def load_folder(folder: Path, name: str, *, dtype: str = "auto", device: str = "cpu") -> Loaded:
    """Load a model folder whose files are checked first.

    dtype: a key of `DTYPES`; "auto" takes the checkpoint's own. device: as torch names it. Raises ConfigError for
    an unknown dtype or absent device, ModelFileError for files that are damaged or incomplete.
    """
    stored, target = parse_dtype(dtype), parse_device(device)
    tensors = read_folder(folder)
    with quiet():
        read_config(folder)
        tokenizer = load_tokenizer(folder)
        model = _load_model(folder, stored, tensors)
    return Loaded(name, folder, model.to(target).eval(), tokenizer)  # type: ignore[arg-type]


def parse_dtype(dtype: str) -> Any:
    """What transformers takes for a key of `DTYPES`. Raises ConfigError otherwise."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown; valid: {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: str) -> torch.device:
    """The device, if this machine has it. Raises ConfigError otherwise."""
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={device!r} cannot be used here: {_first_line(error)}") from error
    return target


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Tokenizer of a model folder. Raises ModelFileError where it has none or it is damaged."""
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        if (folder / name).is_file():
            refuse_pointer(folder / name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    # tokenizers raises plain Exception for a damaged file
    except Exception as error:
        raise ModelFileError(f"{folder}: its tokenizer cannot be loaded: {_first_line(error)}") from error
    return tokenizer


def _load_model(folder: Path, dtype: Any, tensors: list[TensorInfo]) -> PreTrainedModel:
    """The model with every tensor it needs taken from the files."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        raise ModelFileError(f"{folder}: transformers cannot load this model: {_first_line(error)}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ModelFileError(
            f"{folder}: {len(missing)} tensors that the model needs are not among the {len(tensors)} in its files, "
            f"first {missing[0]}; they would be random numbers"
        )
    assert isinstance(model, PreTrainedModel)
    return model


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
