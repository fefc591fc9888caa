"""How the tests of commands judge what a command printed."""

from collections.abc import Callable

Run = Callable[..., tuple[int, str, str]]


def is_error(result: tuple[int, str, str], status: int, *parts: str) -> None:
    """One line on stderr that holds all parts, nothing on stdout."""
    found, out, err = result
    assert (found, out) == (status, "")
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    for part in parts:
        assert part in err
