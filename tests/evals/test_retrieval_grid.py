"""Which cells count, when a packed cache passes, and what a report of it says."""

from typing import Any

import pytest

from rotaryquant.evals.retrieval import grid
from rotaryquant.evals.retrieval.grid import Cell, fails, judged, passes, verdict_line
from rotaryquant.evals.retrieval.questions import Score

RIGHT, WRONG, HALF = Score(1.0, True), Score(0.0, False), Score(0.5, False)


def cell(exact: list[Score], packed: list[Score] | None = None, contexts: int = 25) -> Cell:
    packed = exact if packed is None else packed
    return Cell([at % contexts for at in range(len(exact))], exact, {"iso3": packed}, {"iso3": [7] * len(exact)})


@pytest.mark.parametrize(
    ("exact", "contexts", "verdict"),
    [
        ([RIGHT] * 100, 25, "counts"),
        ([RIGHT] * 60 + [WRONG] * 40, 25, "counts"),
        ([RIGHT] * 59 + [WRONG] * 41, 25, "not discriminating"),
        ([HALF] * 80 + [RIGHT] * 20, 25, "counts"),  # what is wanted in parts counts in parts
        ([RIGHT] * 99, 25, "too few questions"),
        ([WRONG] * 99, 25, "too few questions"),
        ([RIGHT] * 100, 10, "counts"),
        ([RIGHT] * 100, 9, "too few questions"),
    ],
)
def test_a_cell_counts_where_16_bits_can_do_it_and_enough_was_asked(
    exact: list[Score], contexts: int, verdict: str
) -> None:
    assert cell(exact, contexts=contexts).verdict() == verdict


def test_the_numbers_of_a_cell() -> None:
    exact = [RIGHT] * 90 + [HALF] * 10
    packed = [RIGHT] * 88 + [WRONG, HALF] + [RIGHT] * 4 + [HALF] * 6
    found = cell(exact, packed).result("iso3")
    assert found["accuracy_16bit"] == pytest.approx(0.95)
    assert found["accuracy"] == pytest.approx(0.955)
    assert found["difference"] == pytest.approx(0.005)
    assert found["exact_accuracy_16bit"] == pytest.approx(0.90)
    assert found["exact_accuracy"] == pytest.approx(0.92)
    assert found["exact_difference"] == pytest.approx(0.02)
    assert found["difference_low"] < 0.005 < found["difference_high"]
    assert (found["lost"], found["won"]) == (2, 4)
    assert (found["questions"], found["contexts"], found["packed_reads_per_answer"]) == (100, 25, 7)


def row(low: float, verdict: str = "counts", name: str = "50%") -> dict[str, Any]:
    return {"row": name, "context": 4096, "verdict": verdict, "difference": low + 0.02, "difference_low": low}


@pytest.mark.parametrize(
    ("results", "passed", "said"),
    [
        ([row(-0.02), row(-0.029)], True, "passes; 2 of 2 cells count, the lowest end of an interval is -2.9 points"),
        ([row(0.0)], True, "passes; 1 of 1 cells count"),
        ([row(-0.02), row(-0.03)], False, "does not pass: 1 reach down to -3 points or further; 2 of 2 cells count"),
        ([row(-0.05), row(-0.2)], False, "does not pass: 2 reach down"),
        ([row(-0.02), row(-0.5, "not discriminating")], True, "passes; 1 of 2 cells count"),
        ([row(-0.5, "too few questions"), row(0.0)], True, "passes; 1 of 2 cells count"),
        ([row(0.1, "not discriminating")], False, "no cell of 1 counts, so that nothing is shown; this is not a pass"),
        ([row(0.0, "too few questions")] * 3, False, "no cell of 3 counts"),
        ([], False, "no cell of 0 counts"),
    ],
)
def test_all_cells_that_count_must_hold_and_one_must_count(
    results: list[dict[str, Any]], passed: bool, said: str
) -> None:
    assert passes(results) is passed
    assert said in verdict_line("iso3", results)


def test_a_cell_that_does_not_count_cannot_fail() -> None:
    assert [judged(one) for one in (row(-0.02), row(-0.03), row(-0.5, "not discriminating"))] == [
        "counts, holds", "counts, fails", "not discriminating",
    ]  # fmt: skip
    assert not fails(row(-0.5, "too few questions"))


def test_a_loss_of_many_answers_fails_and_one_of_few_does_not() -> None:
    exact = [RIGHT] * 200
    results = [
        {**cell(exact, [WRONG] * lost + [RIGHT] * (200 - lost), contexts=100).result("iso3"), "row": "a", "context": 1}
        for lost in (0, 1, 8)
    ]
    assert [passes([one]) for one in results] == [True, True, False]
    assert results[0]["difference_low"] == results[0]["difference_high"] == 0.0
    assert results[2]["difference"] == pytest.approx(-0.04)


def test_differences_are_said_in_points_with_their_sign() -> None:
    assert [grid.points(share) for share in (0.012, -0.03, 0.0, -0.0001)] == ["+1.2", "-3.0", "0.0", "0.0"]
