"""Free heap memory back to the system while a long prompt is read, and between measurements.

glibc keeps what activations have freed. Their sizes vary from chunk to chunk where experts are routed, so the kept
memory grows with the prompt although nothing of it is in use; a bounded peak is what streaming prefill is for.
"""

import ctypes
from collections.abc import Callable
from functools import cache


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The function of glibc, or None where the C library has none (macOS, musl)."""
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def give_back() -> None:
    """Return free heap pages to the system, where the C library can."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
