"""What commands print: tables for people, one JSON object for programs, notes and errors on stderr."""

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rotaryquant import env

_STYLES = {"ok": "green", "ready": "green", "warn": "yellow", "fail": "bold red"}


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout; NaN would not be JSON, so it is an error."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n")


def note(message: str) -> None:
    """A line for the person who waits, on stderr."""
    print(message, file=sys.stderr, flush=True)


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
