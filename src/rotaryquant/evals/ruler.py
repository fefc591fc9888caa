"""Tasks after RULER (arXiv 2404.06654) on a packed context: several keys, values, queries, chains, common words.

The context is packed first, the same questions go through 16 bits, and only exact values count.
"""

import argparse

from rotaryquant.errors import ConfigError
from rotaryquant.evals.retrieval.measure import add_grid_arguments, run_grid
from rotaryquant.evals.retrieval.tasks import TASKS, Task
from rotaryquant.measuring import Outcome, Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant eval ruler`."""
    add_grid_arguments(parser)
    parser.add_argument("--tasks", metavar="LIST", default=",".join(TASKS), help=f"default {','.join(TASKS)}")


def tasks(args: argparse.Namespace) -> dict[str, Task]:
    """What the options ask. Raises ConfigError for a task that is not there."""
    wanted = list(dict.fromkeys(part.strip() for part in args.tasks.split(",")))
    if unknown := [name for name in wanted if name not in TASKS]:
        raise ConfigError(f"--tasks {unknown[0]!r} is unknown; valid: {', '.join(TASKS)}")
    return {name: TASKS[name] for name in wanted}


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Ask as the options say, through 16 bits and each packed cache; progress is told what is under way.

    Raises RotaryQuantError with one clear line for a wrong input.
    """
    return run_grid(args, progress, tasks(args), "task")
