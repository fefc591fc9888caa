"""`rotaryquant quantize`: a checkpoint to one with packed weights."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rotaryquant.cli import common
from rotaryquant.cli.screen import Waiting, print_json, print_table
from rotaryquant.cli.sizes import show_bytes


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    from rotaryquant.formats.weight import GRIDS, GROUPS
    from rotaryquant.weights.recipes import RECIPES

    made = common.parser(
        "quantize",
        "Write a checkpoint with packed weights: each tensor gets the bits of its role. Reads and writes tensor by "
        "tensor; a run that was stopped goes on where it was when it is started again.",
    )
    common.add_model(made, required=True)
    made.add_argument("-o", "--output", required=True, metavar="DIR", help="folder of the new checkpoint")
    made.add_argument(
        "--recipe", default="role-4-2-8", metavar="NAME", help=f"{', '.join(RECIPES)} (default role-4-2-8)"
    )
    made.add_argument("--grid", default="trellis", metavar="NAME", help=f"{', '.join(GRIDS)} (default trellis)")
    made.add_argument("--group", type=int, default=128, metavar="N", help=f"columns of a scale: {GROUPS} (default 128)")
    made.add_argument("--no-rotation", action="store_true", help="take inputs as they are, without a Hadamard rotation")
    args = made.parse_args(words)
    from rotaryquant.integrations.transformers.checkpoints import model_folder, read_config
    from rotaryquant.weights.conversion import convert
    from rotaryquant.weights.packed_config import PackedConfig
    from rotaryquant.weights.recipes import parse_recipe

    recipe = parse_recipe(args.recipe)
    base = PackedConfig(args.grid, args.group, None if args.no_rotation else 0)
    folder = model_folder(args.model)
    read_config(folder)
    begun = time.perf_counter()
    with Waiting() as waiting:
        log = convert(folder, Path(args.output), recipe, base, lambda name: None, waiting)
    seconds = time.perf_counter() - begun
    rows = _by_role(log)
    data = {
        "model": args.model, "output": args.output, "recipe": recipe.name, "method": "rtn", "grid": args.grid,
        "group": args.group, "seconds": seconds, "roles": rows,
        "bytes": sum(row["nbytes"] for row in rows), "parameters": sum(row["parameters"] for row in rows),
    }  # fmt: skip
    if args.json:
        print_json(data)
        return 0
    print_table(
        [
            (row["role"], f"{row['parameters']:,}", show_bytes(row["nbytes"]), f"{row['bits']:.2f}", _error(row))
            for row in rows
        ],
        ("role", "parameters", "bytes", "bits each", "error"),
        right=(1, 2, 3, 4),
    )
    print(f"\n{show_bytes(data['bytes'])}, {8 * data['bytes'] / data['parameters']:.2f} bits a weight, {seconds:.0f} s")
    print(f"Use it as MODEL: {args.output}")
    return 0


def _error(row: dict[str, Any]) -> str:
    return f"{row['relative_error']:.4f}" if row["relative_error"] else "-"


def _by_role(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameters, bytes, bits and squared error (of the weights' own) by role, errors weighted by elements."""
    rows: dict[str, dict[str, Any]] = {}
    for said in log:
        row = rows.setdefault(said["role"], {"role": said["role"], "parameters": 0, "nbytes": 0, "relative_error": 0.0})
        row["parameters"] += said["elements"]
        row["nbytes"] += said["nbytes"]
        row["relative_error"] += said["relative_error"] * said["elements"]
    for row in rows.values():
        row["bits"] = 8 * row["nbytes"] / row["parameters"]
        row["relative_error"] /= row["parameters"]
    return list(rows.values())
