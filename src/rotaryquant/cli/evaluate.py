"""`rotaryquant eval NAME …`: hands over to the measurement's own module."""

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rotaryquant.cli import common
from rotaryquant.cli.screen import note, print_json, print_table
from rotaryquant.errors import ConfigError

if TYPE_CHECKING:
    from rotaryquant.measuring import Outcome

#: Measurement (a module of `rotaryquant.evals`) → line for the help.
EVALS = {
    "fidelity": "perplexity, KL divergence and agreement on real text, packed against 16 bits",
    "needle": "facts retrieved from a packed context",
}


def usage() -> str:
    """The help of `eval` itself."""
    lines = "\n".join(f"  {name:<10}{text}" for name, text in EVALS.items())
    return f"usage: rotaryquant eval NAME [OPTIONS]\n\nmeasurements:\n{lines}\n\n`eval NAME --help` explains one."


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises ConfigError for an unknown measurement."""
    if not words or words[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    name = words[0]
    if name not in EVALS:
        raise ConfigError(f"unknown measurement {name!r}; valid: {', '.join(EVALS)}")
    module = importlib.import_module(f"rotaryquant.evals.{name}")
    made = common.parser(f"eval {name}", EVALS[name])
    module.add_arguments(made)
    args = made.parse_args(list(words[1:]))
    outcome: Outcome = module.run(args, note)
    if args.json:
        print_json(outcome.data)
        return 0
    for line in outcome.lines:
        print(line)
    print_table(outcome.rows, outcome.headers, right=range(1, len(outcome.headers)))
    return 0
