"""The command line: picks the command, runs it, turns errors into one line and an exit status.

Exit status: 0 done, 1 failed at run time, 2 bad usage or configuration, 130 interrupted.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

#: Command → (module in this package, line for the help). A module is imported when its command is run.
COMMANDS = {
    "generate": ("generate", "answer one prompt and report what the KV cache took"),
    "chat": ("chat", "talk to a model"),
    "inspect": ("inspect_model", "layers and KV bytes of a model, from its headers alone"),
    "plan": ("plan", "whether a model fits, what it costs and what to change, from headers alone"),
    "kernels": ("kernels", "which kernels can run here, and why others cannot"),
    "doctor": ("doctor", "check this installation and say how to mend it"),
    "quantize": ("quantize", "write a checkpoint with packed weights"),
    "calibrate": ("calibrate", "measure which layers few bits hurt, for --kv ...,calibration=FILE"),
    "eval": ("evaluate", "measure what a packed KV cache costs"),
    "bench": ("bench", "measure how fast it is, against named peers"),
}

_EXTRA = {"transformers", "huggingface_hub", "gguf", "jinja2", "tokenizers"}

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130


def usage() -> str:
    """The help of the program itself."""
    lines = [f"  {name:<11}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rotaryquant COMMAND [OPTIONS]",
            "",
            "Run language models with a packed KV cache, and measure what that costs.",
            "",
            "commands:",
            *lines,
            "",
            "`rotaryquant COMMAND --help` explains a command; `rotaryquant --version` prints the version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. argv: its words without the program's name, sys.argv by default. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # the reader is gone; what is still buffered must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    return status


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else _USAGE
    if words[0] == "--version":
        from rotaryquant import __version__

        print(f"rotaryquant {__version__}")
        return 0
    if words[0] not in COMMANDS:
        return _error(f"unknown command {words[0]!r}; commands: {', '.join(COMMANDS)}", _USAGE)
    return _run(f"rotaryquant.cli.{COMMANDS[words[0]][0]}", words[1:])


def _run(module_name: str, words: list[str]) -> int:
    from rotaryquant.errors import ConfigError, RotaryQuantError

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to die
    try:
        command: ModuleType = importlib.import_module(module_name)
        status: int = command.run(words)
    except SystemExit as stop:  # argparse: help, or a usage error that it has printed
        return stop.code if isinstance(stop.code, int) else _USAGE
    except ConfigError as error:
        return _error(str(error), _USAGE)
    except RotaryQuantError as error:
        return _error(str(error), _FAILED)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _EXTRA:
            raise
        return _error(f"{error.name} is not installed; run `pip install 'rotaryquant[hf]'`", _USAGE)
    return status


def _error(message: str, status: int) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
