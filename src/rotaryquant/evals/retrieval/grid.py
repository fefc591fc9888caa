"""A grid of cells (depth or task × length): the same questions through 16 bits and packed, compared and judged.

A cell counts where the 16-bit cache can do what it asks and enough was asked. A packed cache passes where in every cell
that counts, all of the 95% interval of its difference stays above three points under the 16-bit cache; with no cell
that counts nothing is shown, and it does not pass.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rotaryquant.evals.retrieval.questions import Score
from rotaryquant.evals.statistics import difference_interval

#: What a 16-bit cache must reach in a cell, how many questions it must have been asked, and of how many contexts: a
#: bootstrap over fewer says little.
ACCURACY, QUESTIONS, CONTEXTS = 0.6, 100, 10
#: What a packed cache may lose, as a share.
LOSS = 0.03

COUNTS, BLIND, FEW = "counts", "not discriminating", "too few questions"
#: Stands for a number of a packed cache in a cell that the 16-bit one cannot do.
NOT_ASKED = "-"


@dataclass
class Cell:
    """Scores of the same questions through several caches, in the same order.

    groups: the context of each question. reads: packed rows read for each answer.
    """

    groups: list[int] = field(default_factory=list)
    exact: list[Score] = field(default_factory=list)
    packed: dict[str, list[Score]] = field(default_factory=dict)
    reads: dict[str, list[int]] = field(default_factory=dict)

    def verdict(self) -> str:
        """Whether a difference seen here says anything."""
        if len(self.exact) < QUESTIONS or len(set(self.groups)) < CONTEXTS:
            return FEW
        return COUNTS if float(np.mean([score.share for score in self.exact])) >= ACCURACY else BLIND

    def result(self, kv: str) -> dict[str, Any]:
        """The numbers of one packed cache, those of the 16-bit one alone where it was not asked.

        Shares are of 1; lost, won: questions that only one cache got exactly.
        """
        exact, packed = self.exact, self.packed.get(kv)
        result: dict[str, Any] = {"questions": len(exact), "contexts": len(set(self.groups)), "verdict": self.verdict()}
        for prefix, which in (("", 0), ("exact_", 1)):
            result[f"{prefix}accuracy_16bit"] = float(np.mean([score[which] for score in exact]))
        if packed is None:
            return result
        groups = np.array(self.groups)
        for prefix, which in (("", 0), ("exact_", 1)):
            first, second = (np.array([score[which] for score in one], dtype=float) for one in (packed, exact))
            difference, low, high = difference_interval(first, second, groups)
            result |= {
                f"{prefix}accuracy": float(first.mean()),
                f"{prefix}difference": difference,
                f"{prefix}difference_low": low,
                f"{prefix}difference_high": high,
            }
        pairs = Counter((ours.exact, theirs.exact) for ours, theirs in zip(packed, exact, strict=True))
        return result | {
            "lost": pairs[False, True],
            "won": pairs[True, False],
            "packed_reads_per_answer": float(np.mean(self.reads[kv])),
        }


def passes(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether what one or several packed caches did in their cells passes: some count, and all of those hold."""
    counted = [cell for cell in results if cell["verdict"] == COUNTS]
    return bool(counted) and not any(map(fails, counted))


def fails(cell: Mapping[str, Any]) -> bool:
    """Whether a cell counts and the interval of its difference does not stay above what may be lost."""
    return bool(cell["verdict"] == COUNTS and cell["difference_low"] <= -LOSS)


def verdict_line(kv: str, results: Sequence[Mapping[str, Any]]) -> str:
    """The verdict on one packed cache in a sentence."""
    counted = [cell for cell in results if cell["verdict"] == COUNTS]
    if not counted:
        return f"kv={kv}: no cell of {len(results)} counts, so that nothing is shown; this is not a pass"
    lowest = min(counted, key=lambda cell: float(cell["difference_low"]))
    below = sum(map(fails, counted))
    said = "passes" if not below else f"does not pass: {below} reach down to {-100 * LOSS:g} points or further"
    return (
        f"kv={kv}: {said}; {len(counted)} of {len(results)} cells count, the lowest end of an interval is "
        f"{100 * lowest['difference_low']:+.1f} points ({lowest['row']} at {lowest['context']:,})"
    )


def table(results: Sequence[Mapping[str, Any]], row: str) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table. row: what the grid's rows are called."""
    headers = [
        "kv", row, "context", "questions", "16-bit", "packed", "difference (95%), points", "exact 16-bit", "exact",
        "lost / won", "bits", "packed reads per answer", "verdict",
    ]  # fmt: skip

    def percent(cell: Mapping[str, Any], key: str) -> str:
        return f"{100 * cell[key]:.1f}%" if key in cell else NOT_ASKED

    def difference(cell: Mapping[str, Any]) -> str:
        return f"{points(cell['difference'])} ({points(cell['difference_low'])}..{points(cell['difference_high'])})"

    return headers, [
        [
            cell["kv"],
            cell["row"],
            f"{cell['context']:,}",
            f"{cell['questions']}",
            percent(cell, "accuracy_16bit"),
            percent(cell, "accuracy"),
            difference(cell) if "difference" in cell else NOT_ASKED,
            percent(cell, "exact_accuracy_16bit"),
            percent(cell, "exact_accuracy"),
            f"{cell['lost']} / {cell['won']}" if "lost" in cell else NOT_ASKED,
            f"{cell['bits_per_value']:.3f}" if "bits_per_value" in cell else NOT_ASKED,
            f"{cell['packed_reads_per_answer']:,.0f}" if "packed_reads_per_answer" in cell else NOT_ASKED,
            judged(cell),
        ]
        for cell in results
    ]


def points(share: float) -> str:
    """A difference of shares in points, with its sign; none for zero."""
    return f"{100 * share:+.1f}" if round(100 * share, 1) else "0.0"


def judged(cell: Mapping[str, Any]) -> str:
    """What a cell's verdict is, and whether one that counts holds."""
    if cell["verdict"] != COUNTS:
        return str(cell["verdict"])
    return "counts, fails" if fails(cell) else "counts, holds"
