"""What is hidden and asked: facts at depths, and tasks after RULER (arXiv 2404.06654) in wording of our own.

RULER has retrieval with one or more keys, values and queries (section 3.1), variable tracking (3.2), and the common
words of a list (3.3). Where it asks for a list, a question here has one turn a value, which models follow that write
no lists.
"""

import random
import string
from collections.abc import Callable, Sequence
from itertools import pairwise

from rotaryquant.evals.retrieval.forms import Wording
from rotaryquant.evals.retrieval.questions import LAST, Draft, Fact, Question, Turn

_DIGITS = 7
_LETTERS = 5

#: From a seeded draw and the wording to what one context holds.
Task = Callable[[random.Random, Wording], Draft]


def needles(depths: Sequence[int], each: int) -> Task:
    """`each` facts at every depth, in percent; every one is asked."""

    def draft(rng: random.Random, wording: Wording) -> Draft:
        keys, values = rng.sample(wording.names, each * len(depths)), codes(rng, each * len(depths))
        places = [depth for depth in depths for _ in range(each)]
        questions = [
            Question(f"{depth}%", (_code_turn(wording, key),), (value,))
            for key, value, depth in zip(keys, values, places, strict=True)
        ]
        facts = [
            Fact(_code(wording, key, value), depth / 100)
            for key, value, depth in zip(keys, values, places, strict=True)
        ]
        return Draft(facts, questions, frozenset([*keys, *values]))

    return draft


def codes(rng: random.Random, count: int) -> list[str]:
    """That many different numbers of seven digits, none with a leading zero."""
    return [str(number) for number in rng.sample(range(10 ** (_DIGITS - 1), 10**_DIGITS), count)]


def _code(wording: Wording, key: str, value: str) -> str:
    return wording.code.fact.format(key=key, value=value)


def _code_turn(wording: Wording, key: str) -> Turn:
    return Turn(wording.code.question.format(key=key), wording.code.start.format(key=key))


def _copy_turn(wording: Wording, key: str) -> Turn:
    return Turn(wording.copy.question.format(key=key), wording.copy.start.format(key=key))


def _scattered(rng: random.Random, texts: Sequence[str]) -> list[Fact]:
    """Facts in the given order at random depths."""
    return [Fact(text, depth) for text, depth in zip(texts, sorted(rng.random() for _ in texts), strict=True)]


def single(rng: random.Random, wording: Wording) -> Draft:
    """One fact."""
    return _keys(rng, wording, "single", 1, 1)


def multikey(rng: random.Random, wording: Wording) -> Draft:
    """Sixteen facts, four of which are asked: the others are there to be confused with them."""
    return _keys(rng, wording, "multi-key", 16, 4)


def _keys(rng: random.Random, wording: Wording, row: str, count: int, asked: int) -> Draft:
    keys, values = rng.sample(wording.names, count), codes(rng, count)
    facts = _scattered(rng, [_code(wording, key, value) for key, value in zip(keys, values, strict=True)])
    questions = [
        Question(row, (_code_turn(wording, keys[at]),), (values[at],)) for at in rng.sample(range(count), asked)
    ]
    return Draft(facts, questions, frozenset([*keys, *values]))


def multivalue(rng: random.Random, wording: Wording) -> Draft:
    """Four keys of two values each, all of which are wanted, in any order."""
    keys = rng.sample(wording.names, 4)
    values = [_distinct(rng, 2, codes) for _ in keys]
    texts = [_code(wording, key, value) for key, of_key in zip(keys, values, strict=True) for value in of_key]
    rng.shuffle(texts)
    questions = [
        Question("multi-value", (_code_turn(wording, key),) * 2, tuple(of_key), ordered=False, distinct=True)
        for key, of_key in zip(keys, values, strict=True)
    ]
    return Draft(_scattered(rng, texts), questions, frozenset([*keys, *(value for two in values for value in two)]))


def multiquery(rng: random.Random, wording: Wording) -> Draft:
    """Twelve facts, all of which are asked: four questions for three values each."""
    keys, values = rng.sample(wording.names, 12), codes(rng, 12)
    facts = _scattered(rng, [_code(wording, key, value) for key, value in zip(keys, values, strict=True)])
    order = rng.sample(range(12), 12)
    questions = [
        Question("multi-query", tuple(_code_turn(wording, keys[at]) for at in part), tuple(values[at] for at in part))
        for part in (order[begin : begin + 3] for begin in range(0, 12, 3))
    ]
    return Draft(facts, questions, frozenset([*keys, *values]))


def tracking(rng: random.Random, wording: Wording) -> Draft:
    """Two values, each copied from name to name to name; all names that hold a value are wanted.

    The copies of both stand in between each other, each behind the one that it copies.
    """
    values, names = codes(rng, 2), _distinct(rng, 6, variables)
    chains = [[values[0], *names[:3]], [values[1], *names[3:]]]
    left = [pairwise(chain) for chain in chains]
    order = rng.sample([0, 0, 0, 1, 1, 1], 6)
    copies = [next(left[number]) for number in order]
    facts = _scattered(rng, [wording.copy.fact.format(key=key, value=value) for key, value in copies])
    questions = [
        Question(
            "tracking",
            (_copy_turn(wording, chain[0]), *[_copy_turn(wording, LAST)] * 2),
            tuple(chain[1:]),
            ordered=False,
            distinct=True,
        )
        for chain in chains
    ]
    return Draft(facts, questions, frozenset([*values, *names]))


def variables(rng: random.Random, count: int) -> list[str]:
    """Names of five capital letters."""
    return ["".join(rng.choices(string.ascii_uppercase, k=_LETTERS)) for _ in range(count)]


def _distinct(rng: random.Random, count: int, draw: Callable[[random.Random, int], list[str]]) -> list[str]:
    """What `draw` draws, until no two begin with the same character."""
    while True:
        drawn = draw(rng, count)
        if len({text[0] for text in drawn}) == count:
            return drawn


def common(rng: random.Random, wording: Wording) -> Draft:
    """Four keys with thirteen reports of a value each: one value five times, which is wanted, and eight others once."""
    keys = rng.sample(wording.names, 4)
    reports, questions, values = [], [], codes(rng, 4 * 9)
    for number, key in enumerate(keys):
        often, *once = values[9 * number : 9 * number + 9]
        reports += [_code(wording, key, value) for value in [often] * 5 + once]
        questions.append(Question("common", (_code_turn(wording, key),), (often,)))
    rng.shuffle(reports)
    return Draft(_scattered(rng, reports), questions, frozenset([*keys, *values]))


#: By the names that `--tasks` takes.
TASKS: dict[str, Task] = {
    "single": single,
    "multi-key": multikey,
    "multi-value": multivalue,
    "multi-query": multiquery,
    "tracking": tracking,
    "common": common,
}
