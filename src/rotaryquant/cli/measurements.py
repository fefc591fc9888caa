"""What `eval` and `bench` share: a module a name, its options, a table or one JSON object, and files that keep both."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotaryquant.cli import common
from rotaryquant.cli.screen import Waiting, print_json, print_table
from rotaryquant.errors import ConfigError

if TYPE_CHECKING:
    from rotaryquant.measuring import Outcome


#: A cell that begins as a number does, or is empty or a dash.
_NUMERIC = re.compile(r"[-+]?\.?\d|-?$")


@dataclass(frozen=True)
class Kind:
    """One of the two commands.

    command: its name. package: of the modules. noun: what one of them is. names: module → line for the help.
    pictures: whether they draw (`--plot`).
    """

    command: str
    package: str
    noun: str
    names: Mapping[str, str]
    pictures: bool = False

    def usage(self) -> str:
        """The help of the command itself."""
        width = max(map(len, self.names)) + 2
        lines = "\n".join(f"  {name:<{width}}{text}" for name, text in self.names.items())
        return (
            f"usage: rotaryquant {self.command} NAME [OPTIONS]\n\n{self.noun}s:\n{lines}\n\n"
            f"`{self.command} NAME --help` explains one."
        )

    def run(self, words: Sequence[str]) -> int:
        """Run the command; returns the exit status, 1 where the outcome does not pass. Raises ConfigError."""
        if not words or words[0] in ("-h", "--help"):
            print(self.usage(), file=sys.stdout if words else sys.stderr)
            return 0 if words else 2
        name = words[0]
        if name not in self.names:
            raise ConfigError(f"unknown {self.noun} {name!r}; valid: {', '.join(self.names)}")
        module = importlib.import_module(f"{self.package}.{name}")
        made = common.parser(f"{self.command} {name}", self.names[name])
        made.add_argument("-o", "--output", metavar="PREFIX", help="also write PREFIX.json and PREFIX.md")
        if self.pictures:
            made.add_argument("--plot", metavar="FILE.png", help="draw it")
        module.add_arguments(made)
        args = made.parse_args(list(words[1:]))
        plot = Path(args.plot) if self.pictures and args.plot is not None else None
        for option, path in (("--output", args.output), ("--plot", plot)):
            if path is not None and not Path(path).absolute().parent.is_dir():
                raise ConfigError(f"{option} {path}: {Path(path).parent} is no folder")
        if plot is not None:
            _figure(plot, 1.0, 1.0)  # better to hear of it before hours of work than behind them
        with Waiting() as progress:
            outcome: Outcome = module.run(args, progress)
        outcome.data["command"] = command_line(self.command, words)
        if args.output is not None:
            _write(args.output, outcome)
        if plot is not None:
            assert outcome.picture is not None, f"{name} draws nothing"
            figure = _figure(plot, outcome.picture.width, outcome.picture.height)
            outcome.picture.draw(figure)
            figure.savefig(plot)
        if args.json:
            print_json(outcome.data)
        else:
            for line in outcome.lines:
                print(line)
            print_table(outcome.rows, outcome.headers, right=numeric_columns(outcome.rows))
        return 0 if outcome.passed else 1


def command_line(command: str, words: Sequence[str]) -> str:
    """The command that makes an outcome's numbers again, without where it puts them.

    Of a path its last part, since folders differ by machine.
    """
    kept, rest = [], iter(words)
    for word in rest:
        if word in ("-o", "--output"):
            next(rest, None)
        elif word != "--json" and not word.startswith(("-o", "--output=")):
            kept.append(",".join(map(_without_folder, word.split(","))))
    return shlex.join(["rotaryquant", command, *kept])


def _without_folder(part: str) -> str:
    """A path, or an option with one as its value, by its last part; anything else as it is."""
    option, equals, value = part.rpartition("=")
    return f"{option}{equals}{Path(value).name if Path(value).exists() else value}"


def _figure(path: Path, width: float, height: float) -> Any:
    """An empty figure, inches. Raises ConfigError where matplotlib is not installed or does not write such files."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot {path}: matplotlib is not installed ({error}); pip install 'rotaryquant[eval]'"
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"--plot {path}: wanted a file whose name ends in .png, .svg or .pdf")
    return figure


def _write(prefix: str, outcome: "Outcome") -> None:
    """The JSON object and the same as Markdown, side by side."""
    data = json.dumps(outcome.data, ensure_ascii=False, allow_nan=False, indent=1)
    Path(f"{prefix}.json").write_text(data + "\n", encoding="utf-8")
    Path(f"{prefix}.md").write_text(markdown(outcome), encoding="utf-8")


def numeric_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """Columns of a table in which every cell begins as a number does, or stands for one that there is not."""
    return [number for number, cells in enumerate(zip(*rows, strict=True)) if all(map(_NUMERIC.match, cells))]


def markdown(outcome: "Outcome") -> str:
    """An outcome as Markdown: the command, where and when it ran, what else to say, the table."""
    data = outcome.data
    versions = ", ".join(f"{package} {version}" for package, version in data["versions"].items())
    device = "" if data["device"] == "cpu" else f"{data['device']}, "
    where = f"{device}{data['machine']}, {data['date']}, {versions}"
    numeric = numeric_columns(outcome.rows)
    rule = ["---:" if column in numeric else "---" for column in range(len(outcome.headers))]
    table = [outcome.headers, rule, *outcome.rows]
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    notes = [f"- {line}" for line in outcome.lines]
    return "\n".join([where, "```", data["command"], "```", *notes, "", *lines]) + "\n"
