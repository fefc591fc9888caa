"""`rotaryquant bench NAME …`: hands over to the benchmark's own module, prints what it found, and keeps it."""

import importlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rotaryquant.cli import common
from rotaryquant.cli.screen import note, print_json, print_table
from rotaryquant.errors import ConfigError

if TYPE_CHECKING:
    from rotaryquant.measuring import Outcome

#: Benchmark (a module of `rotaryquant.bench`) → line for the help.
BENCHMARKS = {
    "attention": "one-token attention on packed codes against torch's attention on exact rows",
    "append": "packing keys and values, by rotation",
    "decode": "tokens per second of a model, packed cache against transformers' own",
}


def usage() -> str:
    """The help of `bench` itself."""
    lines = "\n".join(f"  {name:<11}{text}" for name, text in BENCHMARKS.items())
    return f"usage: rotaryquant bench NAME [OPTIONS]\n\nbenchmarks:\n{lines}\n\n`bench NAME --help` explains one."


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises ConfigError for an unknown benchmark."""
    if not words or words[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    name = words[0]
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}; valid: {', '.join(BENCHMARKS)}")
    module = importlib.import_module(f"rotaryquant.bench.{name}")
    made = common.parser(f"bench {name}", BENCHMARKS[name])
    made.add_argument("-o", "--output", metavar="PREFIX", help="also write PREFIX.json and PREFIX.md")
    module.add_arguments(made)
    args = made.parse_args(list(words[1:]))
    if args.output is not None and not Path(args.output).absolute().parent.is_dir():
        raise ConfigError(f"--output {args.output}: {Path(args.output).parent} is no folder")
    outcome: Outcome = module.run(args, note)
    outcome.data["command"] = command(name, words[1:])
    if args.output is not None:
        _write(args.output, outcome)
    if args.json:
        print_json(outcome.data)
        return 0
    for line in outcome.lines:
        print(line)
    print_table(outcome.rows, outcome.headers, right=range(len(outcome.headers)))
    return 0


def command(name: str, words: Sequence[str]) -> str:
    """The command that makes a benchmark's numbers again, without where it puts them.

    Of a path its last part, since folders differ by machine.
    """
    kept, rest = [], iter(words)
    for word in rest:
        if word in ("-o", "--output"):
            next(rest, None)
        elif word != "--json" and not word.startswith(("-o", "--output=")):
            option, equals, value = word.rpartition("=")
            kept.append(f"{option}{equals}{Path(value).name if Path(value).exists() else value}")
    return shlex.join(["rotaryquant", "bench", name, *kept])


def _write(prefix: str, outcome: "Outcome") -> None:
    """The JSON object and the same as Markdown, side by side."""
    data = json.dumps(outcome.data, ensure_ascii=False, allow_nan=False, indent=1)
    Path(f"{prefix}.json").write_text(data + "\n", encoding="utf-8")
    Path(f"{prefix}.md").write_text(markdown(outcome), encoding="utf-8")


def markdown(outcome: "Outcome") -> str:
    """A benchmark as Markdown: the command, where and when it ran, what else to say, the table."""
    data = outcome.data
    versions = ", ".join(f"{package} {version}" for package, version in data["versions"].items())
    where = f"{data['machine']}, {data['date']}, {versions}"
    table = [outcome.headers, ["---:"] * len(outcome.headers), *outcome.rows]
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    notes = [f"- {line}" for line in outcome.lines]
    return "\n".join([where, "```", data["command"], "```", *notes, "", *lines]) + "\n"
