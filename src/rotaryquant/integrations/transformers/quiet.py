"""Loading without the bars and warnings of libraries; failures are raised, so nothing is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging


@contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Errors only from transformers inside; what was set before is set again after. bars: leave progress bars on."""
    switch: Any = logging  # parts of it are not typed
    verbosity, hide = switch.get_verbosity(), not bars and switch.is_progress_bar_enabled()
    switch.set_verbosity_error()
    if hide:
        switch.disable_progress_bar()
    try:
        yield
    finally:
        switch.set_verbosity(verbosity)
        if hide:
            switch.enable_progress_bar()
