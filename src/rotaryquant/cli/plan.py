"""`rotaryquant plan`: whether a model fits, what it costs, and what to change, from headers alone."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotaryquant.cli import common
from rotaryquant.cli.plan_screen import print_plan
from rotaryquant.cli.screen import print_json
from rotaryquant.cli.sizes import parse_size

if TYPE_CHECKING:
    from rotaryquant.planning.checkpoint import Checkpoint
    from rotaryquant.planning.plan import Plan

_DOES_NOT_FIT = 1
_CONTEXT = 4096


def _speed(text: str) -> int:
    """Bytes a second of 7GB or 7GB/s."""
    return parse_size(text.strip().removesuffix("/s"))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    from rotaryquant.planning.weights import AS_IS
    from rotaryquant.weights.recipes import RECIPES

    made = common.parser(
        "plan",
        "Whether a model fits, what it costs, and what to change. Reads config.json and the headers of weight files, "
        "nothing else, also of a model on the hub. Ends with 0 where it fits, 1 where it does not.",
    )
    common.add_model(made, required=True)
    made.add_argument(
        "--memory", type=parse_size, required=True, metavar="SIZE", help="what the process may take, such as 16GB"
    )
    made.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens of a client, answer included (default {_CONTEXT}, or all that the model has positions for)",
    )
    made.add_argument("--clients", type=int, default=1, metavar="N", help="sequences at once (default 1)")
    made.add_argument(
        "--recipe", default=AS_IS, metavar="NAME", help=f"{', '.join((AS_IS, *RECIPES))} (default {AS_IS})"
    )
    made.add_argument(
        "--disk", type=_speed, default="3GB", metavar="SPEED", help="reads of single experts, a second (default 3GB/s)"
    )
    made.add_argument(
        "--link", type=_speed, default="24GB", metavar="SPEED",
        help="from memory to an accelerator, a second (default 24GB/s: PCIe 4.0 x16)",
    )  # fmt: skip
    made.add_argument(
        "--profile", metavar="FILE", help="rates of this machine, by which the share of attention is foretold: what "
        "`rotaryquant eval rates --json` prints",
    )  # fmt: skip
    return made.parse_args(words)


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    args = _parse(words)
    from rotaryquant.planning.plan import Request, make_plan
    from rotaryquant.planning.speed import Rates

    rates = Rates.from_file(Path(args.profile)) if args.profile else None
    checkpoint = _checkpoint(args.model)
    context = args.context if args.context is not None else min(_CONTEXT, checkpoint.decoder.limit or _CONTEXT)
    request = Request(args.memory, context, args.clients, args.kv, args.recipe, args.disk, args.link, rates)
    plan = make_plan(checkpoint, request)
    if args.json:
        print_json(as_json(plan))
    else:
        print_plan(plan)
    return 0 if plan.fits else _DOES_NOT_FIT


def _checkpoint(model: str) -> "Checkpoint":
    """What MODEL names: a folder, a GGUF file, a model with a name, or one on the hub."""
    from rotaryquant.integrations.sources import find_source
    from rotaryquant.planning.checkpoint import read_checkpoint

    source = find_source(model)
    if isinstance(source, Path):
        return read_checkpoint(source, source.resolve().stem if source.is_file() else source.resolve().name)
    from rotaryquant.integrations.hub import hub_checkpoint

    return hub_checkpoint(source)


def as_json(plan: "Plan") -> dict[str, Any]:
    """The plan as plain values; bytes throughout, shares from 0 to 1, speeds in bytes a second."""
    request, weights, decoder = plan.request, plan.weights, plan.checkpoint.decoder
    roles = [
        {
            "role": role.role.value, "parameters": role.parameters, "as_is": role.as_is,
            "at_bits": {str(bits): nbytes for bits, nbytes in role.at_bits.items()}, "planned": role.planned,
        }
        for role in weights.roles
    ]  # fmt: skip
    rates = None if request.rates is None else request.rates.as_dict()
    return {
        "model": plan.checkpoint.name,
        "family": decoder.family,
        "fits": plan.fits,
        "needed_bytes": plan.memory.needed,
        "peak_bytes": plan.memory.peak,
        "memory": asdict(plan.memory),
        "asked": {**asdict(request), "rates": rates},
        "parameters": weights.parameters,
        "roles": roles,
        "weights": {
            name: getattr(weights, name)
            for name in ("total", "resident", "routed", "expert", "cycle", "read", "moe_layers", "experts", "per_token")
        },
        "bytes_not_loaded": plan.checkpoint.left,
        "layers": [asdict(layer) for layer in decoder.layers],
        "max_context": decoder.limit or None,
        "kv_per_sequence": asdict(plan.sequence),
        "paging": None if plan.paging is None else asdict(plan.paging),
        "fits_with_experts_on_disk": plan.fits_paged,
        "attention_share": {str(tokens): share for tokens, share in plan.shares.items()},
        "changes": [asdict(change) for change in plan.changes],
    }
