"""Contexts that hold what they claim, strict scores, answers that are proved to come from packed rows."""

import random
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rotaryquant import enabled
from rotaryquant.errors import ConfigError
from rotaryquant.evals.peers import parse_spec
from rotaryquant.evals.retrieval import answers
from rotaryquant.evals.retrieval.answers import ask
from rotaryquant.evals.retrieval.contexts import (
    MARGIN,
    Context,
    Filler,
    RetrievalError,
    build_context,
    check_length,
    check_unique,
)
from rotaryquant.evals.retrieval.forms import Chat, Cloze, Form, form_of
from rotaryquant.evals.retrieval.measure import Setting, measure
from rotaryquant.evals.retrieval.questions import LAST, Draft, Fact, Question, Turn, is_value, plain, score
from rotaryquant.evals.retrieval.tasks import TASKS, codes, needles
from rotaryquant.evals.teacher_forcing import PathError
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.tokens import encode_text
from support.progress import Told
from support.tiny_llm import byte_tokenizer, tiny_model

FILLER = "\n".join(f"Line {number} says something plain about rain. It goes on for a while." for number in range(300))


def turns(*starts: str) -> tuple[Turn, ...]:
    return tuple(Turn("", start) for start in starts)


# ---- scores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "exact"),
    [
        ("4926", True),
        (" 4926. ", True),
        ("4926 .", True),
        ("The secret code of the amber falcon is 4926.", True),
        ("14926", False),
        ("49266", False),
        ("4926.5", False),
        ("49 26", False),
        ("4926 4926", False),
        ("4926 or 4927", False),
        ("4926, as the text says", False),
        ("I cannot say. 4926", False),
        ("copper copper lynx 4926", False),
        ("The secret code of the azure falcon is 4926.", False),
        ("", False),
    ],
)
def test_only_the_value_or_its_sentence_counts(answer: str, exact: bool) -> None:
    assert is_value(answer, "4926", "The secret code of the amber falcon is") is exact


@pytest.mark.parametrize(
    ("ordered", "said", "share", "exact"),
    [
        (True, ["11", "22", "33"], 1.0, True),
        (True, ["22", "11", "33"], 1 / 3, False),
        (False, ["22", "33", "11"], 1.0, True),
        (False, ["11", "11", "11"], 1 / 3, False),  # once is as good as thrice
        (False, ["11", "22", "22"], 2 / 3, False),
        (False, ["111", "22", "33"], 2 / 3, False),
        (False, ["no", "11 22 33", ""], 0.0, False),  # a list in one turn is no value
        (True, ["", "", ""], 0.0, False),
    ],
)
def test_every_wanted_value_counts_once(ordered: bool, said: list[str], share: float, exact: bool) -> None:
    question = Question("row", turns("a", "b", "c"), ("11", "22", "33"), ordered=ordered)
    assert score(question, said) == (pytest.approx(share), exact)


def test_a_turn_is_told_what_was_answered_before() -> None:
    turn = Turn(f"What holds {LAST}?", f"The value moves {LAST}")
    assert turn.after([]).start == "The value moves "
    assert turn.after(["one.", " ABCDE . "]) == Turn("What holds ABCDE?", "The value moves ABCDE")
    chain = Question("row", (Turn("", "moves 7"), turn), ("ABCDE", "FGHIJ"), ordered=False)
    assert score(chain, ["ABCDE", "The value moves ABCDE FGHIJ."]).exact
    assert not score(chain, ["ABCDE", "The value moves 7 FGHIJ."]).exact
    assert plain(" a b . ") == "a b"


# ---- contexts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded() -> Any:
    return Loaded("tiny", Path(), tiny_model(max_position_embeddings=16384), byte_tokenizer())


@pytest.fixture(scope="module")
def filler(loaded: Any) -> Filler:
    return Filler(loaded, FILLER)


def form(loaded: Any, name: str) -> Form:
    return form_of(name, loaded)


def drawn(
    loaded: Any, filler: Filler, name: str, task: Any, length: int = 4096, seed: int = 0
) -> tuple[Draft, Context]:
    rng = random.Random(seed)
    draft = task(rng, form(loaded, name).wording)
    return draft, build_context(loaded, form(loaded, name), filler, draft, length, rng.randrange(100))


ALL = {**TASKS, "needles": needles([0, 50, 100], 2)}


@pytest.mark.parametrize("name", ["chat", "cloze"])
@pytest.mark.parametrize("task", ALL)
def test_a_context_says_each_answer_in_its_facts_and_nowhere_else(
    loaded: Any, filler: Filler, name: str, task: str
) -> None:
    draft, context = drawn(loaded, filler, name, ALL[task])
    text = loaded.tokenizer.decode(context.ids)
    left = text
    for fact in draft.facts:
        assert f"{fact.text}\n" in left
        left = left.replace(fact.text, "", 1)
    wanted = {value for question in draft.questions for value in question.wanted}
    names = {phrase for phrase in draft.unique if phrase in text}
    assert wanted < names == draft.unique
    assert not [phrase for phrase in draft.unique if phrase in left]
    for question in draft.questions:
        assert len(question.turns) == len(question.wanted)
        for number, turn in enumerate(question.turns):
            asked = form(loaded, name).tail([*question.turns[:number], turn], ["?"] * number)
            assert not [value for value in question.wanted if value in asked]
    # the longest way to ask and answer still fits, and the values stand where the context says
    longest = max(
        len(
            encode_text(
                loaded.tokenizer, form(loaded, name).tail(one.turns, ["?" * context.limit] * len(one.turns[1:]))
            )
        )
        + context.limit
        for one in draft.questions
    )
    assert 0.95 * (4096 - longest) <= len(context.ids) <= 4096 - longest
    between = loaded.tokenizer.decode(context.ids[context.first : context.last])
    assert all(value in between for value in wanted)
    assert any(between.startswith(value) for value in wanted)
    assert any(between.endswith(value) for value in wanted)
    assert context.last <= len(context.ids) - MARGIN


@pytest.mark.parametrize("task", ALL)
def test_contexts_are_seeded(loaded: Any, filler: Filler, task: str) -> None:
    (_, first), (_, again), (_, other) = (drawn(loaded, filler, "cloze", ALL[task], seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.ids, again.ids)
    assert first.questions == again.questions
    assert first.questions != other.questions


def test_facts_stand_at_their_depths(loaded: Any, filler: Filler) -> None:
    draft, context = drawn(loaded, filler, "chat", needles([0, 25, 50, 75, 100], 2))
    text = loaded.tokenizer.decode(context.ids)
    span = len(text) - MARGIN - len(draft.facts[0].text)
    for fact, question in zip(draft.facts, draft.questions, strict=True):
        assert text.index(fact.text) / span == pytest.approx(fact.depth, abs=0.06)
        assert question.row == f"{100 * fact.depth:g}%"
        assert question.wanted[0] in fact.text
    assert text.index(draft.facts[0].text) < 40
    assert len(text) - text.index(draft.facts[-1].text) < MARGIN + 200


def test_filler_with_a_key_or_a_value_is_left_out(loaded: Any) -> None:
    bad = "The amber falcon flew over 1234567 trees on that day."
    filler = Filler(loaded, f"{bad}\nNobody counted 12345678 trees in all these years.\n{FILLER}")
    assert filler.sentences[0] == bad
    taken = list(filler.take(3000, 0, frozenset(["Amber Falcon"])))
    assert bad not in taken
    assert bad not in list(filler.take(3000, 0, frozenset(["1234567"])))
    assert any("12345678" in sentence for sentence in taken)
    assert sum(filler.tokens(sentence) for sentence in taken) <= 3000


def test_an_answer_that_is_said_elsewhere_is_an_error() -> None:
    fact = "The secret code is Oslo 1234567."
    draft = Draft([Fact(fact, 0.5)], [], frozenset(["Oslo", "1234567"]))
    check_unique(f"Before.\n{fact}\nIn all 12345678 and 91234567.", draft)
    for leak in ("Again 1234567 it is.", "In oslo."):
        with pytest.raises(RetrievalError, match="is 2 times in the context and 1 times in its facts"):
            check_unique(f"{fact}\n{leak}", draft)
    with pytest.raises(RetrievalError, match="is 0 times in the context"):
        check_unique("The fact was cut away.", draft)


def test_too_little_filler_is_an_error_and_no_miss(loaded: Any) -> None:
    with pytest.raises(RetrievalError, match="the filler must have enough"):
        drawn(loaded, Filler(loaded, FILLER[:500]), "cloze", TASKS["single"])
    with pytest.raises(ConfigError, match="no line of more than 20 characters"):
        Filler(loaded, "short\nlines\n")


def test_a_context_longer_than_the_model_is_refused(loaded: Any) -> None:
    check_length(loaded, [512, 16384])
    with pytest.raises(ConfigError, match="--context 16385: this model has 16384 positions"):
        check_length(loaded, [512, 16385])


# ---- tasks -------------------------------------------------------------------------------------------------------


def test_codes_are_different_numbers_of_one_length() -> None:
    drawn = codes(random.Random(0), 500)
    assert len(set(drawn)) == 500
    assert all(re.fullmatch(r"[1-9]\d{6}", code) for code in drawn)


def test_copies_stand_behind_what_they_copy_and_chains_in_between_each_other(loaded: Any) -> None:
    together = 0
    for seed in range(20):
        draft = TASKS["tracking"](random.Random(seed), Cloze.wording)
        of_chain = []
        for question in draft.questions:
            start = re.findall(r"\d{7}", question.turns[0].start)[0]
            names = [start, *question.wanted]
            facts = [Cloze.wording.copy.fact.format(key=a, value=b) for a, b in pairwise(names)]
            at = [[fact.text for fact in draft.facts].index(fact) for fact in facts]
            assert at == sorted(at)
            assert len({name[0] for name in names}) == 4
            of_chain.append(at)
        together += max(of_chain[0]) > min(of_chain[1]) and max(of_chain[1]) > min(of_chain[0])
        assert [fact.depth for fact in draft.facts] == sorted(fact.depth for fact in draft.facts)
    assert together > 10


def test_the_common_value_is_reported_more_often_than_any_other() -> None:
    draft = TASKS["common"](random.Random(0), Cloze.wording)
    assert len(draft.facts) == 4 * 13
    for question in draft.questions:
        values = [fact.text.split()[-1] for fact in draft.facts if fact.text.startswith(question.turns[0].start)]
        counts = sorted(map(values.count, set(values)))
        assert counts == [1] * 8 + [5]
        assert values.count(f"{question.wanted[0]}.") == 5


def test_values_of_a_key_can_be_told_apart_by_how_they_begin() -> None:
    draft = TASKS["multi-value"](random.Random(0), Chat.wording)
    assert len(draft.facts) == 8
    for question in draft.questions:
        assert question.distinct
        assert not question.ordered
        assert len({value[0] for value in question.wanted}) == 2


# ---- forms -------------------------------------------------------------------------------------------------------


def test_a_chat_is_told_on_from_where_the_context_ends(loaded: Any) -> None:
    chat = Chat(loaded)
    two = (Turn("Q1?", "A one is"), Turn("Q2?", "A two is"))
    assert chat.head("BODY") + chat.tail(two, ["1."]) == (
        "<turn>user\nBODY<end><turn>assistant\nI have read it.<end><turn>user\nQ1?<end>"
        "<turn>assistant\nA one is 1.<end><turn>user\nQ2?<end><turn>assistant\nA two is"
    )
    assert Cloze().head("BODY") + Cloze().tail(two, ["1."]) == "BODY\nA one is 1.\nA two is"


def test_the_form_follows_the_template(loaded: Any) -> None:
    plain = Loaded("tiny", Path(), loaded.model, byte_tokenizer(template=None))
    assert [form_of(name, loaded).name for name in ("auto", "chat", "cloze")] == ["chat", "chat", "cloze"]
    assert form_of("auto", plain).name == "cloze"
    with pytest.raises(ConfigError, match="no chat template"):
        form_of("chat", plain)
    with pytest.raises(ConfigError, match="--form 'poem' is unknown; valid: auto, chat, cloze"):
        form_of("poem", loaded)


def test_a_template_that_rewrites_what_was_said_is_refused(loaded: Any) -> None:
    newest = byte_tokenizer(template="{{ messages | length }}{% for m in messages %}{{ m['content'] }};{% endfor %}")
    with pytest.raises(ConfigError, match="rewrites earlier messages; use --form cloze"):
        Chat(Loaded("tiny", Path(), loaded.model, newest)).tail((Turn("Q1?", "a"), Turn("Q2?", "b")), ["1"])


# ---- answers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def context(loaded: Any, filler: Filler) -> Context:
    return drawn(loaded, filler, "cloze", TASKS["multi-query"], length=1500)[1]


def said(loaded: Any, context: Context, spec: str, batch: int) -> list[list[str]]:
    return [one.answers for one in ask(loaded, Cloze(), context, parse_spec(spec), batch).said]


@pytest.mark.parametrize("spec", ["fp16", "iso3", "iso3-strict", "int4,sinks=4,tail=48"])
def test_a_batch_answers_as_each_question_alone(loaded: Any, context: Context, spec: str) -> None:
    together, alone, again = (said(loaded, context, spec, batch) for batch in (8, 1, 3))
    assert together == alone == again
    assert [len(answers) for answers in together] == [3, 3, 3, 3]
    assert len({answers[0] for answers in together}) > 1


def test_answers_are_those_of_greedy_generation(loaded: Any, context: Context) -> None:
    found = said(loaded, context, "fp16", 8)
    for question, one in zip(context.questions, found, strict=True):
        for turn in range(3):
            tail = Cloze().tail(question.turns[: turn + 1], one[:turn])
            ids = torch.cat([context.ids, torch.tensor(loaded.tokenizer.encode(tail, add_special_tokens=False))])
            made = loaded.model.generate(ids[None], max_new_tokens=context.limit, do_sample=False)[0, len(ids) :]
            text = loaded.tokenizer.decode(made)
            assert one[turn] == text.strip().split("\n")[0].strip()


def test_a_packed_prompt_reads_what_it_would_token_by_token(loaded: Any, context: Context) -> None:
    """Chunks end where rows are packed, so that a question sees no row exactly that decoding would see packed."""
    kv = parse_spec("iso3")
    found = ask(loaded, Cloze(), context, kv)
    question = context.questions[0]
    tail = loaded.tokenizer.encode(Cloze().tail(question.turns[:1], []), add_special_tokens=False)
    with enabled(loaded.model, kv) as state, torch.inference_mode():
        cache = state.new_cache()
        with cache.prefill():
            loaded.model(context.ids[None], cache=cache, logits_to_keep=1)
        before, made = cache.counters, []
        for token in tail:
            logits = loaded.model(torch.tensor([[token]]), cache=cache).logits
        while "\n" not in loaded.tokenizer.decode(made).lstrip() and len(made) < context.limit:
            made.append(int(logits[0, -1].argmax()))
            reads = cache.counters.since(before).packed_reads
            logits = loaded.model(torch.tensor([[made[-1]]]), cache=cache).logits
    assert found.said[0].answers[0] == loaded.tokenizer.decode(made).strip().split("\n")[0].strip()
    only = Context(context.ids, [Question("row", question.turns[:1], question.wanted[:1])], 4, 5, context.limit)
    assert ask(loaded, Cloze(), only, kv).said[0].packed_reads == reads


@pytest.mark.parametrize("distinct", [False, True])
def test_an_answer_may_be_kept_from_beginning_as_an_earlier_one(
    loaded: Any, context: Context, distinct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int | None] = []
    real = answers.complete

    def complete(*args: Any) -> Any:
        done = real(*args)
        begun.extend(one.begun for one in done)
        return done

    monkeypatch.setattr(answers, "complete", complete)
    same = (Turn("", "the very same"), Turn("", "the very same"))
    question = Question("row", same * 2, ("1",) * 4, ordered=False, distinct=distinct)
    ask(loaded, Cloze(), Context(context.ids, [question], 4, 5, context.limit), parse_spec("iso3"))
    assert None not in begun
    assert len(begun) == 4
    assert (len(set(begun)) == 4) is distinct


def test_what_is_asked_must_be_packed(loaded: Any, filler: Filler) -> None:
    _, context = drawn(loaded, filler, "cloze", needles([0, 100], 1), length=1500)
    assert min(one.packed_reads for one in ask(loaded, Cloze(), context, parse_spec("iso3")).said) > 0
    with pytest.raises(PathError, match="what is asked stands at"):
        ask(loaded, Cloze(), context, parse_spec("iso3,tail=200"))
    with pytest.raises(PathError, match="what is asked stands at"):
        ask(loaded, Cloze(), context, parse_spec("iso3,sinks=60"))


def test_a_cache_without_packed_rows_is_caught(loaded: Any, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotaryquant.kv.packed.packed_end", lambda config, seq_len, fresh: 0)
    with pytest.raises(PathError, match=r"has packed positions 4\.\.-1"):
        ask(loaded, Cloze(), context, parse_spec("iso3"))


def test_a_copy_that_drops_its_packed_rows_is_caught(
    loaded: Any, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(cache: Any) -> Any:
        cache.reset()
        return cache

    monkeypatch.setattr(answers, "copy", SimpleNamespace(deepcopy=forget))
    with pytest.raises(PathError, match="read 0 packed rows, wanted"):
        ask(loaded, Cloze(), context, parse_spec("iso3"))


def test_answers_to_a_context_that_is_too_short_to_be_packed_are_refused(loaded: Any) -> None:
    ids = torch.arange(5, 105)
    short = Context(ids, [Question("row", turns("a"), ("1",))], 0, 0, 8)
    with pytest.raises(PathError, match="read no packed row"):
        ask(loaded, Cloze(), short, parse_spec("iso3,sinks=0"))


def test_the_share_that_is_done_rises_over_contexts_tasks_and_lengths(loaded: Any, filler: Filler) -> None:
    told = Told()
    specs = {"iso3": parse_spec("iso3")}
    tasks = {name: TASKS[name] for name in ("single", "multi-query")}
    found = measure(Setting(loaded, Cloze(), filler, specs, batch=4), tasks, (1024, 1100), 5, told)
    assert told.advanced()
    assert [(*place, len(cell.exact)) for place, cell in found.cells.items()] == [
        ("single", 1024, 5), ("multi-query", 1024, 8), ("single", 1100, 5), ("multi-query", 1100, 8),
    ]  # fmt: skip
    assert told.messages[0] == "single at 1,024, fp16: context 1 of 5"
    assert told.messages[-1] == "multi-query at 1,100, iso3: context 2 of 2"
