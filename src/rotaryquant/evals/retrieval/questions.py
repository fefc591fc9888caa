"""What is hidden in a text and asked about it, before either has become tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Stands in a turn for what the model answered to the turn before.
LAST = "{answer}"


@dataclass(frozen=True)
class Turn:
    """One thing that is asked. question: as a chat asks it. start: of the answer, which the model completes."""

    question: str
    start: str

    def after(self, answers: Sequence[str]) -> "Turn":
        """The same with what was answered last in its place, without the punctuation behind it."""
        last = plain(answers[-1]) if answers else ""
        return Turn(self.question.replace(LAST, last), self.start.replace(LAST, last))


@dataclass(frozen=True)
class Question:
    """A question of one or more turns, each answered by the model before the next is asked.

    row: of the grid it belongs to. wanted: one value a turn. ordered: whether the value of a turn is wanted in that
    turn, or all of them in any order. distinct: whether an answer may not begin as an earlier one did, so that a model
    that knows several values can name more than the likeliest.
    """

    row: str
    turns: tuple[Turn, ...]
    wanted: tuple[str, ...]
    ordered: bool = True
    distinct: bool = False


@dataclass(frozen=True)
class Fact:
    """A sentence on a line of its own. depth: where it stands among the filler, 0 to 1."""

    text: str
    depth: float


@dataclass(frozen=True)
class Draft:
    """What one context is to hold. facts: by depth. unique: phrases that no filler may have, keys and values."""

    facts: list[Fact]
    questions: list[Question]
    unique: frozenset[str]


class Score(NamedTuple):
    """share: of the wanted values, those that were given. exact: whether all were, and nothing else."""

    share: float
    exact: bool


def plain(answer: str) -> str:
    """An answer without white space and closing punctuation around it."""
    return answer.strip().rstrip(".!,;:").strip()


def is_value(answer: str, value: str, start: str = "") -> bool:
    """Whether an answer is the value, or the sentence that begins with `start` and ends with it, and nothing else.

    A longer number that contains it, a second value behind it or words before it make it wrong.
    """
    said = plain(answer).casefold()
    return said in (value.casefold(), f"{start} {value}".casefold())


def score(question: Question, answers: Sequence[str]) -> Score:
    """How many of the wanted values the answers name, each value counted once. answers: one for each turn."""
    said = [turn.after(answers[:number]).start for number, turn in enumerate(question.turns)]
    if question.ordered:
        hits = sum(map(is_value, answers, question.wanted, said))
    else:
        hits = sum(any(map(is_value, answers, [value] * len(answers), said)) for value in question.wanted)
    return Score(hits / len(question.wanted), hits == len(question.wanted))
