"""The kernel that every op runs on, chosen by a test."""

import pytest

from rotaryquant import env


def force_kernel(monkeypatch: pytest.MonkeyPatch, kernel: str | None) -> None:
    """To the end of the test, what RQ_KERNEL is for a process that starts with it; None or "auto": unset."""
    monkeypatch.setattr(env, "kernel_override", lambda: None if kernel == "auto" else kernel)
