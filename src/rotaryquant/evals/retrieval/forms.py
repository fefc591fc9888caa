"""How a context and its questions are put to a model: as a chat through its template, or as text that it continues.

Either way the beginning of the answer is given, so that what is missing is the value alone: a few tokens instead of a
sentence, and the same for models that were never taught to answer.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rotaryquant.errors import ConfigError
from rotaryquant.evals.retrieval.questions import Turn
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.tokens import chat_prompt

FORMS = ("auto", "chat", "cloze")

_COLORS = ("amber", "azure", "coral", "crimson", "emerald", "golden", "indigo", "ivory", "jade", "lilac")
_ANIMALS = ("badger", "condor", "falcon", "gecko", "heron", "ibis", "jackal", "kestrel", "lynx", "marten")
_CITIES = (
    "Athens", "Baghdad", "Bangkok", "Berlin", "Boston", "Budapest", "Cairo", "Chicago", "Dakar", "Dallas", "Delhi",
    "Denver", "Dublin", "Florence", "Geneva", "Hamburg", "Havana", "Houston", "Istanbul", "Lagos", "Lima", "Lisbon",
    "Madrid", "Manila", "Melbourne", "Milan", "Montreal", "Moscow", "Mumbai", "Munich", "Nairobi", "Naples", "Oslo",
    "Paris", "Prague", "Quito", "Rome", "Seattle", "Seoul", "Shanghai", "Sofia", "Sydney", "Tehran", "Tokyo", "Toronto",
    "Venice", "Vienna", "Warsaw",
)  # fmt: skip


class Pattern(NamedTuple):
    """A kind of fact. {key} and {value} stand for what it says; question and start ask for the value of a key."""

    fact: str
    question: str
    start: str


class Wording(NamedTuple):
    """Names of things that have codes, and how codes and copies of a value are stated."""

    names: tuple[str, ...]
    code: Pattern
    copy: Pattern


class Form(Protocol):
    """One way to put contexts and questions."""

    name: str
    wording: Wording

    def head(self, body: str) -> str:
        """The text that holds `body` and is read first."""

    def tail(self, turns: Sequence[Turn], answers: Sequence[str]) -> str:
        """What follows the head up to where the next answer is completed.

        turns: those asked so far and the next. answers: to all but the last.
        """


class Chat:
    """The context as a message that is acknowledged, each turn as a message that gets an answer."""

    name = "chat"
    wording = Wording(
        tuple(f"{color} {animal}" for color in _COLORS for animal in _ANIMALS),
        Pattern(
            "The secret code of the {key} is {value}.",
            "What is the secret code of the {key}?",
            "The secret code of the {key} is",
        ),
        Pattern(
            "The value of {key} was copied to {value}.",
            "Where was the value of {key} copied to?",
            "The value of {key} was copied to",
        ),
    )

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._short = self.head("x")

    def head(self, body: str) -> str:
        """Up to where the first question begins: what two conversations have in common."""
        one, other = (self._render(body, [question]) for question in ("A", "B"))
        return one[: next(at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])]

    def tail(self, turns: Sequence[Turn], answers: Sequence[str]) -> str:
        """Raises ConfigError for a template that changes what came before."""
        before = zip(turns[:-1], answers, strict=True)
        talk = [text for turn, answer in before for text in (turn.question, f"{turn.start} {answer}")]
        whole = self._render("x", [*talk, turns[-1].question])
        if not whole.startswith(self._short):
            raise ConfigError("the model's chat template rewrites earlier messages; use --form cloze")
        return whole[len(self._short) :] + turns[-1].start

    def _render(self, body: str, talk: list[str]) -> str:
        contents = [body, "I have read it.", *talk]
        messages = [
            {"role": "assistant" if number % 2 else "user", "content": content}
            for number, content in enumerate(contents)
        ]
        return chat_prompt(self._loaded.tokenizer, self._loaded.model.config, messages).text


class Cloze:
    """Plain text whose next line repeats the beginning of a fact. The key stands right before its value there, which
    is what small models can look up.
    """

    name = "cloze"
    wording = Wording(
        _CITIES,
        Pattern("The secret code is {key} {value}.", "", "The secret code is {key}"),
        Pattern("The value moves {key} {value}.", "", "The value moves {key}"),
    )

    def head(self, body: str) -> str:
        """The body as it is."""
        return f"{body}\n"

    def tail(self, turns: Sequence[Turn], answers: Sequence[str]) -> str:
        """Lines of what was answered, then the beginning of the next."""
        lines = [f"{turn.start} {answer}\n" for turn, answer in zip(turns[:-1], answers, strict=True)]
        return "".join(lines) + turns[-1].start


def form_of(name: str, loaded: Loaded) -> Form:
    """The form that `--form` names; auto: a chat where the model has a template.

    Raises ConfigError for an unknown name, and for a chat without a template.
    """
    if name not in FORMS:
        raise ConfigError(f"--form {name!r} is unknown; valid: {', '.join(FORMS)}")
    if name == "cloze" or (name == "auto" and not loaded.tokenizer.chat_template):
        return Cloze()
    return Chat(loaded)
