"""What the tests of commands share: a way to run one, tiny models, a user who types."""

from collections.abc import Callable

import pytest

from support.tiny_llm import byte_tokenizer, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("models") / "plain", byte_tokenizer(template=None)))


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lines that the user types; an exception is raised in place of a line, the end follows."""

    def feed(*lines: str | type[BaseException]) -> None:
        waiting = list(lines)

        def read(prompt: str = "") -> str:
            if not waiting:
                raise EOFError
            line = waiting.pop(0)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)

    return feed
