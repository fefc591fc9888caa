"""What measurements read: a model and a text, checked before minutes of work."""

import argparse

import torch

from rotaryquant.errors import ConfigError
from rotaryquant.integrations.transformers.checkpoints import Loaded, default_gguf, load_folder, model_folder
from rotaryquant.measuring import read_text as read_text


def add_model_arguments(parser: argparse.ArgumentParser, dtype: str) -> None:
    """What `load_model` takes: MODEL, `--dtype` with its default, `--threads`."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="folder, .gguf file or hub id (default: SmolLM2-135M)"
    )
    parser.add_argument(
        "--dtype", default=dtype, metavar="TYPE", help=f"float32, bfloat16 or auto, the file's (default {dtype})"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch")


def load_model(model: str | None, dtype: str, threads: int | None = None) -> Loaded:
    """The model that MODEL names, on the CPU. threads: of torch, for the whole process.

    Raises ConfigError or ModelFileError with one clear line.
    """
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads={threads} must be at least 1")
        torch.set_num_threads(threads)
    return load_folder(model_folder(model), model or default_gguf().stem, dtype=dtype)
