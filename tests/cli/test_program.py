"""The program itself: help, bad usage, interrupts and readers that leave."""

import subprocess
import sys
from typing import Any

import pytest

from rotaryquant.cli import main as cli
from support.commands import Run, is_error


def test_help_names_every_command(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert all(name in out for name in cli.COMMANDS)
    status, out, err = run()
    assert (status, out) == (2, "")
    assert "usage:" in err


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from rotaryquant.cli.main import main; status = main(['--help']);"
        "heavy = {'torch', 'transformers', 'rich'} & set(sys.modules); sys.exit(status or (3 if heavy else 0))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_version(run: Run) -> None:
    from rotaryquant import __version__

    assert run("--version")[:2] == (0, f"rotaryquant {__version__}\n")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(run: Run, command: str) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0
    assert out.startswith(f"usage: rotaryquant {command}")


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name not in ("eval", "bench")])
def test_every_command_takes_json(run: Run, command: str) -> None:
    assert "--json" in run(command, "--help")[1]


@pytest.mark.parametrize(
    ("words", "status", "parts"),
    [
        (["frobnicate"], 2, ["frobnicate", "generate"]),
        (["generate", "--frob"], 2, ["--frob"]),
        (["generate", "--mem", "1GB"], 2, ["--mem"]),
        (["generate", "--max-tokens", "x"], 2, ["--max-tokens"]),
        (["generate", "--max-tokens", "0"], 2, ["--max-tokens=0"]),
        (["generate", "--memory", "16"], 2, ["16", "unit"]),
        (["generate", "--memory", "-1GB"], 2, ["--memory"]),
        (["generate", "--kv", "iso9"], 2, ["iso9", "iso3"]),
        (["generate", "--kv", "iso3,sink=2"], 2, ["sink=2", "sinks"]),
        (["generate", "--prompt", ""], 2, ["--prompt is empty"]),
        (["generate", "--prompt", " \n"], 2, ["--prompt is empty"]),
        (["generate", "--stop", ""], 2, ["--stop is empty"]),
        (["generate", "--temperature", "-1"], 2, ["temperature=-1.0"]),
        (["generate", "--top-p", "0"], 2, ["top_p=0.0"]),
        (["generate", "--seed", "-1"], 2, ["seed=-1"]),
        (["generate", "--raw", "--system", "x"], 2, ["--raw"]),
        (["generate", "--dtype", "int3"], 2, ["int3", "bfloat16"]),
        (["generate", "--device", "moon"], 2, ["moon"]),
        (["generate", "--memory", "1GB", "--device", "cuda"], 2, ["--memory", "cuda"]),
        (["generate", "--threads", "0"], 2, ["threads=0"]),
        (["generate", "/nowhere"], 1, ["/nowhere", "no such folder"]),
        (["chat", "nowhere"], 1, ["nowhere", "org/name"]),
        (["chat", "--temperature", "nan"], 2, ["temperature=nan"]),
        (["inspect"], 2, ["MODEL"]),
        (["inspect", "/nowhere"], 1, ["/nowhere"]),
        (["eval", "nothing"], 2, ["nothing", "fidelity"]),
        (["bench", "nothing"], 2, ["nothing", "attention"]),
    ],
)
def test_bad_usage_is_one_line(run: Run, words: list[str], status: int, parts: list[str]) -> None:
    is_error(run(*words), status, *parts)


def test_a_missing_extra_names_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rotaryquant.llm", None)

    def absent(words: Any) -> int:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers.utils")

    from rotaryquant.cli import kernels

    monkeypatch.setattr(kernels, "run", absent)
    is_error(run("kernels"), 2, "pip install 'rotaryquant[hf]'")


def test_a_reader_that_leaves_is_no_traceback() -> None:
    words = [sys.executable, "-m", "rotaryquant.cli.main", "kernels"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"Traceback" not in err
    assert b"Exception" not in err


def test_an_interrupt_is_status_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from rotaryquant.cli import kernels

    def interrupt(words: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "run", interrupt)
    status, out, err = run("kernels")
    assert (status, out, err) == (130, "", "\ninterrupted\n")
