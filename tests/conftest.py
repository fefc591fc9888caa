"""One thread, fixed seeds, and an honest account of what a run did not try."""

import os
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from rotaryquant.cli import main as cli
from rotaryquant.ops import dispatch
from support.assets import missing_asset

_untried_assets: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `assets(*names)` where one of them is missing."""
    for mark in item.iter_markers("assets"):
        if reason := missing_asset(*mark.args):
            _untried_assets[item.nodeid] = reason
            pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which kernels and assets no test of this run has tried."""
    rows = dispatch.explain()
    absent = [f"{op}/{kernel}: {reason}" for op, kernel, reason in rows if reason != "ready"]
    idle = [f"{op}/{kernel}" for op, kernel, reason in rows if reason == "ready" and not dispatch.calls[op, kernel]]
    terminalreporter.section("not tried")
    terminalreporter.write_line(
        f"kernels: {len(absent) + len(idle)} of {len(rows)} not tried ({len(absent)} cannot run here, {len(idle)} not "
        f"called by this run); assets: {len(_untried_assets)} tests skipped for want of them"
    )
    for line in [*absent, *(f"{name}: not called" for name in idle), *sorted(set(_untried_assets.values()))]:
        terminalreporter.write_line(f"  {line}")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Status, stdout and stderr of one command."""

    def call(*words: str) -> tuple[int, str, str]:
        status = cli.main(words)
        out, err = capsys.readouterr()
        return status, out, err

    return call
