"""Options that several commands share, and loading a model as they ask."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rotaryquant.cli.screen import note
from rotaryquant.errors import ConfigError

if TYPE_CHECKING:
    from rotaryquant.llm import LLM

_MODEL_HELP = "a model folder, a .gguf file, org/name on the hub, glm4moe-70m or smollm2-135m"


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like those of the commands themselves."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line on stderr."""
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """Parser of a command, with `--json`. Abbreviated options are refused: they break when options are added."""
    made = Parser(prog=f"rotaryquant {command}", description=description, allow_abbrev=False)
    made.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
    return made


def add_model(made: argparse.ArgumentParser, *, required: bool = False) -> None:
    """MODEL and `--kv`."""
    if required:
        made.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    else:
        made.add_argument(
            "model", metavar="MODEL", nargs="?", help=f"{_MODEL_HELP} (default: the embedded glm4moe-70m)"
        )
    made.add_argument(
        "--kv",
        metavar="SPEC",
        default="iso3",
        help="KV cache: fp16, iso3 (default), iso3t, iso3-strict, iso2, iso4, k4v3, turbo3, or key=value pairs",
    )


def add_loading(made: argparse.ArgumentParser) -> None:
    """How the model is loaded."""
    made.add_argument("--dtype", default="auto", metavar="TYPE", help="auto (as stored), bfloat16, float16 or float32")
    made.add_argument("--device", default="cpu", metavar="NAME", help="as torch names it: cpu, cuda, cuda:1, mps")
    made.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: its own choice)")


def add_sampling(made: argparse.ArgumentParser, max_tokens: int) -> None:
    """How long an answer gets and how its tokens are chosen."""
    made.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"at most (default {max_tokens})")
    made.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): the likeliest token")
    made.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens that hold P")
    made.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens, 0: all")
    made.add_argument("--seed", type=int, metavar="N", help="for temperatures above 0 (default: a fresh one)")
    made.add_argument("--system", metavar="TEXT", help="system message")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM.stream`. Raises ConfigError for a value out of range, before a model is loaded."""
    from rotaryquant.sampling import SamplingOptions

    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens={args.max_tokens} must be at least 1")
    options = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, "seed": args.seed}
    SamplingOptions(**options)
    return {"max_tokens": args.max_tokens, **options}


def load(args: argparse.Namespace, check: Callable[[Path], None] = lambda folder: None) -> "LLM":
    """The model that the options ask for; what takes long is said on stderr."""
    from rotaryquant.llm import LLM

    return LLM.load(
        args.model,
        kv=args.kv,
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        notify=note,
        check=check,
    )
