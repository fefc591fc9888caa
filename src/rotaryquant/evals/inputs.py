"""What measurements read: a model and a text, checked before minutes of work."""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from rotaryquant.errors import ConfigError
from rotaryquant.integrations.sources import name_of
from rotaryquant.integrations.transformers.checkpoints import Loaded, load_folder, model_folder
from rotaryquant.measuring import read_text as read_text


def add_model_arguments(parser: argparse.ArgumentParser, dtype: str) -> None:
    """What `load_model` takes: MODEL, and `add_loading_arguments`."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="folder, .gguf file or hub id (default: the embedded glm4moe-70m)"
    )
    add_loading_arguments(parser, dtype)


def add_loading_arguments(parser: argparse.ArgumentParser, dtype: str) -> None:
    """How a model is loaded: `--dtype` with its default, `--device`, `--threads`."""
    parser.add_argument(
        "--dtype", default=dtype, metavar="TYPE", help=f"float32, bfloat16 or auto, the file's (default {dtype})"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="as torch names it: cpu, cuda, cuda:1, mps (default cpu)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch")


def load_model(model: str | None, dtype: str, threads: int | None = None, device: str = "cpu") -> Loaded:
    """The model that MODEL names, on `device`. threads: of torch, for the whole process.

    Raises ConfigError or ModelFileError with one clear line.
    """
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads={threads} must be at least 1")
        torch.set_num_threads(threads)
    return load_folder(model_folder(model), name_of(model), dtype=dtype, device=device)


def ids_tensor(loaded: Loaded, ids: Sequence[int]) -> Tensor:
    """Token ids as the model takes them: int64 [tokens] on its device. Whatever is read to a model comes by here."""
    return torch.tensor(ids, dtype=torch.int64, device=loaded.model.device)
