"""Sizes as people write them, tables and JSON."""

import argparse
import io
import sys

import pytest

from rotaryquant import env
from rotaryquant.cli import screen
from rotaryquant.cli.measurements import numeric_columns
from rotaryquant.cli.sizes import parse_size, show_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("16GB", 16 * 10**9), ("1.5GiB", 3 * 2**29), ("800 MB", 8 * 10**8), ("1B", 1), ("2TiB", 2**41), (" 3KB ", 3000)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "16", "0GB", "-1GB", "16gb", "16 G", "1e9B", "GB", "1,5GB", "16GBs", "nanGB", "0.0MB"]
)
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="unit"):
        parse_size(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (23_040, "23.0 KB"), (269e6, "269 MB"), (5e15, "5000 TB")],
)
def test_sizes_are_shown(count: float, text: str) -> None:
    assert show_bytes(count) == text


def test_tables_are_plain_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen.print_table([("a", "1"), ("bb", "22")], ("name", "n"), right=(1,))
    assert capsys.readouterr().out == "name   n\na      1\nbb    22\n"


@pytest.mark.parametrize("no_color", ["", "1"])
def test_tables_on_a_terminal_honor_no_color(
    no_color: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    assert env.color_allowed() is (no_color == "")
    screen.print_table([("a", "ok"), ("[b]", "fail")], ("name", "state"))
    out = capsys.readouterr().out
    assert "[b]" in out
    assert ("\x1b[" in out) is (no_color == "")


def test_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        screen.print_json({"rate": float("nan")})


class Terminal(io.StringIO):
    """Keeps what a terminal of 100 columns would get."""

    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_shows_the_share_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    with screen.Waiting(out) as progress:
        progress("reading [a]")
        progress("window 3 of 4: iso3", 0.5)
        progress._bar.refresh()
        shown = out.getvalue()
    assert "reading [a]" in shown
    assert "50%" in shown.split("window 3 of 4: iso3")[-2]
    assert out.getvalue()[len(shown) :].endswith("\x1b[2K")  # the line is wiped


def test_a_message_is_a_line_away_from_a_terminal() -> None:
    out = io.StringIO()
    with screen.Waiting(out) as progress:
        progress("one")
        progress("two", 0.5)
    assert out.getvalue() == "one\ntwo\n"


def test_lines_do_where_rich_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    out = Terminal()
    with screen.Waiting(out) as progress:
        progress("one", 0.5)
    assert out.getvalue() == "one\n"


def test_columns_of_numbers_are_those_that_begin_as_one_in_every_row() -> None:
    rows = [["iso3", "0%", "+1.5 (-2..3)", "-", "3 / 1", "holds"], ["4bit x", ".5", "0.0", "", "-0", "8 fail"]]
    assert numeric_columns(rows) == [1, 2, 3, 4]
    assert numeric_columns([]) == []
