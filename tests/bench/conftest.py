"""What the tests of benchmarks share: short samples, a small roof buffer, a way to run the command."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rotaryquant.bench import roofs, timing
from support.tiny_llm import save_tiny


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(roofs, "STREAM_BYTES", 1 << 16)


@pytest.fixture
def measure(run: Callable[..., tuple[int, str, str]]) -> Callable[..., dict[str, Any]]:
    """The JSON object of a benchmark that must succeed."""

    def call(*words: str) -> dict[str, Any]:
        status, out, err = run("bench", *words, "--json")
        assert status == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("models") / "tiny"))
