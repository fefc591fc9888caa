"""Facts retrieved from a packed context: a grid of depths and lengths, the same questions through 16 bits.

A context is real text with facts at stated depths. It is packed first, every question comes in forwards of its own,
and an answer counts only if it is exactly the number.
"""

import argparse

from rotaryquant.errors import ConfigError
from rotaryquant.evals.retrieval.measure import add_grid_arguments, numbers_of, run_grid
from rotaryquant.evals.retrieval.tasks import Task, needles
from rotaryquant.measuring import Outcome, Progress

#: What `--depths paper` stands for: four facts in the middle.
_PAPER_DEPTHS, _PAPER_NEEDLES = "50", 4
_MOST_FACTS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant eval needle`."""
    add_grid_arguments(parser)
    parser.add_argument(
        "--depths", metavar="LIST", default="0,25,50,75,100",
        help="in percent of the context, or `paper`: four facts at 50 (default 0,25,50,75,100)",
    )  # fmt: skip
    parser.add_argument(
        "--needles", type=int, metavar="N", help="facts at each depth of one context (default 1, of `paper` 4)"
    )


def tasks(args: argparse.Namespace) -> dict[str, Task]:
    """What the options ask. Raises ConfigError where they ask for nothing that fits into a context."""
    depths, each = _asked(args)
    if not 1 <= each * len(depths) <= _MOST_FACTS:
        raise ConfigError(
            f"needles={each} at {len(depths)} depths: a context holds 1 to {_MOST_FACTS} facts; ask for other numbers"
        )
    return {"needle": needles(depths, each)}


def _asked(args: argparse.Namespace) -> tuple[list[int], int]:
    """Depths, and facts at each."""
    paper = args.depths == "paper"
    depths = numbers_of("--depths", _PAPER_DEPTHS if paper else args.depths, 0, 100)
    return depths, args.needles if args.needles is not None else _PAPER_NEEDLES if paper else 1


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Ask as the options say, through 16 bits and each packed cache; progress is told what is under way.

    Raises RotaryQuantError with one clear line for a wrong input.
    """
    outcome = run_grid(args, progress, tasks(args), "depth")
    depths, each = _asked(args)
    outcome.data["needles"] = each
    outcome.lines.insert(1, f"{each * len(depths)} facts in each context, {each} at each depth, all of them asked")
    return outcome
