"""`rotaryquant plan`: what fits into a memory budget, what it costs, and what to change. Reads headers alone."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rotaryquant.cli import common, plan_screen
from rotaryquant.cli.screen import print_json
from rotaryquant.cli.sizes import parse_size, parse_speed


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status: 0 where it fits, 1 where it does not."""
    args = _parse(words)
    from rotaryquant.integrations.hub_headers import model_headers
    from rotaryquant.planning.plan import Model, Request, make_plan

    request = Request(args.memory, args.context, args.clients, args.kv, args.recipe)  # refused before files are read
    plan = make_plan(Model(*model_headers(args.model)), request)
    path = Path(args.model).expanduser()
    name = path.resolve().name if path.exists() else args.model
    speeds = {"disk": args.disk, "link": args.link}
    if args.json:
        print_json(plan_screen.as_json(plan, name, speeds))
    else:
        plan_screen.show(plan, name, speeds)
    return 0 if plan.fits else 1


def _parse(words: Sequence[str]) -> argparse.Namespace:
    made = common.parser(
        "plan",
        "What a model needs, whether that fits into a memory budget, and what to change where it does not. Reads "
        "config.json and safetensors headers alone, of a hub id too.",
    )
    common.add_model(made, required=True)
    made.add_argument("--memory", type=parse_size, required=True, metavar="SIZE", help="the budget, such as 16GB")
    made.add_argument(
        "--context", type=int, metavar="N", help="tokens of a sequence (default 4096, or what the model has)"
    )
    made.add_argument("--clients", type=int, default=1, metavar="N", help="sequences at a time (default 1)")
    made.add_argument("--recipe", default="as-is", metavar="NAME", help="of `quantize`, or as-is (default)")
    made.add_argument(
        "--disk", type=parse_speed, default=3e9, metavar="SPEED", help="experts are read at (default 3GB/s)"
    )
    made.add_argument(
        "--link", type=parse_speed, default=24e9, metavar="SPEED", help="experts come from host memory at (24GB/s)"
    )
    return made.parse_args(words)
