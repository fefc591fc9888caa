"""The needle measurement: strict scoring, prompts that hold what they claim, and a control."""

import random
from pathlib import Path
from typing import Any

import pytest

from rotaryquant.config import parse_kv
from rotaryquant.evals import needle
from rotaryquant.evals.needle import Needle, NeedleError, build_haystack, is_exact
from rotaryquant.evals.teacher_forcing import PathError
from rotaryquant.integrations.transformers.checkpoints import Loaded
from support.models import tiny
from support.tiny_llm import byte_tokenizer

FACT = Needle("amber falcon", "4926", 0.5)


@pytest.mark.parametrize(
    ("answer", "exact"),
    [
        ("4926", True),
        (" 4926. ", True),
        ("The secret code of the amber falcon is 4926.", True),
        ("14926", False),
        ("49 26", False),
        ("4926 4926", False),
        ("copper copper lynx 4926", False),
        ("The secret code of the amber falcon is 4926 or 4927.", False),
        ("", False),
    ],
)
def test_only_the_code_or_its_sentence_counts(answer: str, exact: bool) -> None:
    assert is_exact(answer, FACT) is exact


@pytest.fixture(scope="module")
def loaded() -> Any:
    return Loaded("tiny", Path(), tiny(max_position_embeddings=4096), byte_tokenizer())


LINES = [f"Line {number} of the filler says something plain about the weather." for number in range(200)]


def test_a_context_has_its_length_and_every_fact_once(loaded: Any) -> None:
    haystack = build_haystack(loaded, LINES, 2000, 4, random.Random(0))
    assert 1940 <= len(haystack.ids) <= 2000
    text = loaded.tokenizer.decode(haystack.ids)
    at = [text.index(fact.sentence) / len(text) for fact in haystack.needles]
    assert all(text.count(fact.code) == 1 for fact in haystack.needles)
    assert at == sorted(at)
    assert at == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.06)
    assert len({fact.code for fact in haystack.needles}) == 4
    for fact, question in zip(haystack.needles, haystack.questions, strict=True):
        assert fact.name in loaded.tokenizer.decode(question)
        assert fact.code not in loaded.tokenizer.decode(question)


def test_too_little_filler_is_an_error_and_no_miss(loaded: Any) -> None:
    with pytest.raises(NeedleError, match="filler text is too short"):
        build_haystack(loaded, LINES[:3], 2000, 4, random.Random(0))


def test_questions_leave_the_context_as_it_was_and_read_packed_rows(loaded: Any) -> None:
    haystack = build_haystack(loaded, LINES, 1500, 2, random.Random(1))
    first, again = (needle.ask(loaded, haystack, parse_kv("iso3")) for _ in range(2))
    assert first.texts == again.texts
    assert len(first.packed_reads) == 2
    assert min(first.packed_reads) > 0
    control = needle.ask(loaded, haystack, None)
    assert control.packed_reads == []
    assert len(control.found) == 2


def test_answers_without_packed_reads_are_refused(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    haystack = build_haystack(loaded, LINES, 1500, 1, random.Random(1))
    monkeypatch.setattr("rotaryquant.kv.packed.packed_end", lambda config, seq_len, fresh: 0)
    with pytest.raises(PathError, match="read no packed row"):
        needle.ask(loaded, haystack, parse_kv("iso3"))
