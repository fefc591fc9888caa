"""`chat`: turns that share a cache, its commands, Ctrl-C, a full context."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commands import Run, is_error
from support.tiny_llm import byte_tokenizer, save_tiny


def test_chat_keeps_its_cache_from_turn_to_turn(run: Run, model: str, typed: Callable[..., None]) -> None:
    typed("first question", "", "second question")
    status, out, _ = run("chat", model, "--max-tokens", "12", "--json")
    turns = json.loads(out)["turns"]
    assert status == 0
    assert [turn["user"] for turn in turns] == ["first question", "second question"]
    assert turns[0]["usage"]["reused_tokens"] == 0
    assert turns[1]["usage"]["reused_tokens"] >= turns[0]["usage"]["prompt_tokens"]


def test_chat_commands(run: Run, model: str, typed: Callable[..., None]) -> None:
    typed("/help", "/report", "/nothing", "hello", "/report", "/reset", "/report", "/exit", "never read")
    status, out, err = run("chat", model, "--max-tokens", "5")
    assert status == 0
    assert out.count("\n") == 1
    assert "/reset" in err
    assert "unknown command /nothing" in err
    assert err.count("nothing was said yet") == 2
    assert err.count("finish reason") == 1
    assert "cut after --max-tokens 5" in err


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(
    run: Run, model: str, typed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rotaryquant.integrations.transformers.session import Session

    step, steps = Session.step, []

    def interrupted(self: Session, token: int) -> Any:
        steps.append(token)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, token)

    monkeypatch.setattr(Session, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    typed("first", "second")
    status, out, err = run("chat", model, "--max-tokens", "40", "--json")
    first, second = json.loads(out)["turns"]
    assert status == 0
    assert "(stopped)" in err
    assert (first["finish_reason"], second["finish_reason"]) == ("cancelled", "length")
    assert first["usage"]["completion_tokens"] == 3
    assert second["usage"]["reused_tokens"] >= first["usage"]["prompt_tokens"]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_answer_takes_the_question_back(
    run: Run, model: str, typed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rotaryquant.integrations.transformers.session import Session

    read, reads = Session.read, []

    def interrupted(self: Session, ids: Any, cancelled: Any) -> Any:
        reads.append(len(ids))
        if len(reads) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return read(self, ids, cancelled)

    monkeypatch.setattr(Session, "read", interrupted)
    typed("first", "second")
    status, out, err = run("chat", model, "--max-tokens", "3", "--json")
    assert status == 0
    assert "(stopped)" in err
    (turn,) = json.loads(out)["turns"]
    assert turn["user"] == "second"
    typed("second")
    _, out, _ = run("chat", model, "--max-tokens", "3", "--json")
    assert turn["usage"]["prompt_tokens"] == json.loads(out)["turns"][0]["usage"]["prompt_tokens"]


def test_a_message_that_does_not_fit_is_not_kept(run: Run, typed: Callable[..., None], tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path / "short", max_position_embeddings=128))
    typed("hello", "y" * 200, "ok")
    status, out, err = run("chat", folder, "--max-tokens", "3")
    assert status == 0
    assert err.count("error: the prompt has") == 1
    assert out.count("\n") == 2


def test_a_full_context_is_said_and_the_chat_can_start_over(
    run: Run, typed: Callable[..., None], tmp_path: Path
) -> None:
    folder = str(save_tiny(tmp_path / "short", max_position_embeddings=64))
    typed("hello", "more", "/reset", "again")
    status, out, err = run("chat", folder, "--max-tokens", "200")
    assert status == 0
    assert err.count("(the context of 64 tokens is full; /reset starts over)") == 2
    assert "error: the prompt has" in err
    assert out.count("\n") == 2


def test_a_template_that_refuses_the_system_message_is_told_at_start(run: Run, tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    folder = str(save_tiny(tmp_path / "strict", byte_tokenizer(template=template)))
    is_error(run("chat", folder, "--system", "be kind"), 2, "no system role")
