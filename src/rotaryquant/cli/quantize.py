"""`rotaryquant quantize`: a checkpoint to one with packed weights."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotaryquant.cli import common
from rotaryquant.cli.screen import Waiting, print_json, print_table
from rotaryquant.cli.sizes import show_bytes
from rotaryquant.errors import ConfigError

if TYPE_CHECKING:
    from rotaryquant.integrations.transformers.input_moments import InputMoments

#: Of a calibration: tokens read, and tokens of a window.
_TOKENS, _WINDOW = 24_000, 2_048


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
    made.add_argument("--method", default="rtn", metavar="NAME", help="rtn: to the nearest level; gptq: so that errors "
                      "cancel in what the model computes; awq: inputs multiplied so that errors are small where they "
                      "are large; both want --calibration (default rtn)")  # fmt: skip
    made.add_argument("--calibration", metavar="FILE", help="text that the model reads for gptq and awq, UTF-8")
    made.add_argument("--tokens", type=int, default=_TOKENS, metavar="N", help=f"of it (default {_TOKENS})")
    args = made.parse_args(words)
    from rotaryquant.integrations.transformers.checkpoints import model_folder, read_config
    from rotaryquant.measuring import read_text, text_fingerprint
    from rotaryquant.weights.conversion import convert
    from rotaryquant.weights.packed_config import PackedConfig
    from rotaryquant.weights.recipes import parse_recipe

    recipe = parse_recipe(args.recipe)
    _check_method(args.method, args.calibration)
    text = read_text(Path(args.calibration)) if args.calibration is not None else ""
    seed = None if args.no_rotation else 0
    read = (text_fingerprint(text), args.tokens) if args.calibration is not None else ("", 0)
    base = PackedConfig(args.grid, args.group, seed, args.method, *read)
    folder = model_folder(args.model)
    read_config(folder)
    begun = time.perf_counter()
    starved: dict[str, int] = {}
    with Waiting() as waiting:
        if args.method != "rtn":
            moments = _moments(folder, args, text, waiting)
            log = convert(folder, Path(args.output), recipe, base, moments, waiting, moments.heard)
            starved = moments.starved
        else:
            log = convert(folder, Path(args.output), recipe, base, lambda name: None, waiting)
    seconds = time.perf_counter() - begun
    rows = _by_role(log)
    data = {
        "model": args.model, "output": args.output, "recipe": recipe.name, "method": args.method, "grid": args.grid,
        "group": args.group, "seconds": seconds, "roles": rows, "starved_experts": starved,
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
    if starved:
        few = min(starved, key=lambda name: starved[name])
        print(
            f"{len(starved)} experts got under {_least()} tokens ({few}: {starved[few]}) and were rounded for all "
            f"tokens at their layer"
        )
    print(f"Use it as MODEL: {args.output}")
    return 0


def _least() -> int:
    from rotaryquant.integrations.transformers.input_moments import LEAST_TOKENS

    return LEAST_TOKENS


def _check_method(method: str, calibration: str | None) -> None:
    """Raise ConfigError where the two options do not go together."""
    from rotaryquant.weights.packed_config import METHODS

    if method not in METHODS:
        raise ConfigError(f"method={method!r} is unknown; valid: {', '.join(METHODS)}")
    if (method != "rtn") != (calibration is not None):
        raise ConfigError(
            f"--method {method} wants --calibration FILE: a text that the model reads"
            if method != "rtn"
            else "--calibration is for --method gptq and awq; rtn rounds without a text"
        )


def _moments(folder: Path, args: Any, text: str, waiting: Waiting) -> "InputMoments":
    """What the model's matrices are multiplied with while it reads the text."""
    from rotaryquant.evals.windows import windows_of
    from rotaryquant.integrations.transformers.checkpoints import load_folder
    from rotaryquant.integrations.transformers.input_moments import InputMoments
    from rotaryquant.models.roles import roles_of
    from rotaryquant.weights.headers import read_folder

    loaded = load_folder(folder, args.model, dtype="float32")
    windows, _ = windows_of(loaded, text, _WINDOW, args.tokens, prefix=0)
    names = roles_of(tensor.name for tensor in read_folder(folder))
    return InputMoments(loaded.model, windows, names, waiting)


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
