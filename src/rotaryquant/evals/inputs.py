"""What measurements read: a model and a text, checked before minutes of work."""

from pathlib import Path

import torch

from rotaryquant.errors import ConfigError
from rotaryquant.integrations.transformers.checkpoints import Loaded, default_gguf, load_folder, model_folder


def load_model(model: str | None, dtype: str, threads: int | None = None) -> Loaded:
    """The model that MODEL names, on the CPU. threads: of torch, for the whole process.

    Raises ConfigError or ModelFileError with one clear line.
    """
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads={threads} must be at least 1")
        torch.set_num_threads(threads)
    return load_folder(model_folder(model), model or default_gguf().stem, dtype=dtype)


def read_text(path: Path) -> str:
    """The whole file as one string. Raises ConfigError where it is absent, empty or not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: cannot be read as UTF-8 text ({error})") from error
    if not text.strip():
        raise ConfigError(f"--text {path}: the file is empty")
    return text
