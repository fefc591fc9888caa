"""What commands print: tables for people, one JSON object for programs, notes and errors on stderr."""

import json
import sys
from collections.abc import Sequence
from typing import Any, Self, TextIO

from rotaryquant import env

_STYLES = {"ok": "green", "ready": "green", "warn": "yellow", "fail": "bold red"}


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout; NaN would not be JSON, so it is an error."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n")


def note(message: str, file: TextIO | None = None) -> None:
    """A line for the person who waits, on stderr by default."""
    print(message, file=file or sys.stderr, flush=True)


class Waiting:
    """How far a long command is, for the person who waits: a bar on a terminal, elsewhere a line for each message.

    A context manager, which wipes the bar. Calls are those of `measuring.Progress`.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self._bar: Any = _new_bar(self._file) if self._file.isatty() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, message: str, share: float | None = None) -> None:
        """Say what is under way, and draw the share of all that is done."""
        if self._bar is None:
            note(message, self._file)
            return
        if not self._bar.task_ids:
            self._bar.add_task(message, total=1.0)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], description=message, completed=share)


def _new_bar(file: TextIO) -> Any:
    """A bar that nothing is on yet, or None where rich is not installed (it is for looks alone)."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    said = TextColumn("{task.description}", markup=False)  # brackets are no markup
    console = Console(file=file, no_color=not env.color_allowed())
    return Progress(TaskProgressColumn(), BarColumn(24), TimeRemainingColumn(), said, console=console, transient=True)


def print_table(
    rows: Sequence[Sequence[str]],
    headers: Sequence[str] = (),
    *,
    right: Sequence[int] = (),
    file: TextIO | None = None,
) -> None:
    """A table: with lines and color on a terminal, plain aligned text elsewhere or with NO_COLOR.

    rows: cells. right: columns aligned to the right. file: stdout by default.
    """
    out = file or sys.stdout
    if out.isatty() and env.color_allowed() and _print_rich(rows, headers, right, out):
        return
    lines = [list(headers), *map(list, rows)] if headers else [list(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))] if lines else []
    for line in lines:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        out.write("  ".join(cells).rstrip() + "\n")
    out.flush()


def _print_rich(rows: Sequence[Sequence[str]], headers: Sequence[str], right: Sequence[int], out: TextIO) -> bool:
    """Print with rich; False where it is not installed (it is for looks alone)."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(*headers, box=SIMPLE_HEAD, show_header=bool(headers), pad_edge=False, show_edge=False)
    for column in range(len(rows[0]) if rows else 0):
        if column >= len(headers):
            table.add_column(style="bold" if column == 0 else None)
        table.columns[column].justify = "right" if column in right else "left"
        table.columns[column].overflow = "fold"
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))  # Text: brackets are no markup
    Console(file=out, highlight=False).print(table)
    return True
