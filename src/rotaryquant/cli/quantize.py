"""`rotaryquant quantize`: a checkpoint to one with packed weights."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotaryquant.cli import common
from rotaryquant.cli.screen import Waiting, print_json, print_table
from rotaryquant.cli.sizes import parse_size, show_bytes
from rotaryquant.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from rotaryquant.integrations.transformers.checkpoints import Loaded
    from rotaryquant.integrations.transformers.input_moments import InputMoments
    from rotaryquant.models.roles import Role
    from rotaryquant.weights.packed_config import PackedConfig
    from rotaryquant.weights.recipes import Recipe

#: Of a calibration: tokens read, and tokens of a window.
_TOKENS, _WINDOW = 24_000, 2_048


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    args = _parsed(words)
    from rotaryquant.integrations.transformers.checkpoints import model_folder, read_config
    from rotaryquant.measuring import read_text, text_fingerprint
    from rotaryquant.models.roles import roles_of
    from rotaryquant.weights.conversion import convert
    from rotaryquant.weights.headers import read_folder
    from rotaryquant.weights.packed_config import PackedConfig
    from rotaryquant.weights.recipes import AUTO, parse_recipe

    recipe = None if args.recipe == AUTO else parse_recipe(args.recipe)
    _check_method(args, recipe is None)
    text = read_text(Path(args.calibration)) if args.calibration is not None else ""
    seed = None if args.no_rotation else 0
    read = (text_fingerprint(text), args.tokens) if args.calibration is not None else ("", 0)
    base = PackedConfig(args.grid, args.group, seed, args.method, *read)
    folder = model_folder(args.model)
    read_config(folder)
    tensors = read_folder(folder)
    begun = time.perf_counter()
    starved: dict[str, int] = {}
    with Waiting() as waiting:
        reading = _Reading(folder, args, text) if text else None
        if recipe is None:
            assert reading is not None
            recipe = _chosen(reading, args, base, waiting)
        if args.method != "rtn":
            assert reading is not None
            moments = reading.moments(roles_of(tensor.name for tensor in tensors), waiting)
            log = convert(folder, Path(args.output), recipe, base, moments, waiting, moments.heard)
            starved = moments.starved
        else:
            log = convert(folder, Path(args.output), recipe, base, _nothing, waiting)
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


def _parsed(words: Sequence[str]) -> Any:
    """The command's options."""
    from rotaryquant.formats.weight import GRIDS, GROUPS
    from rotaryquant.weights.recipes import AUTO, RECIPES

    made = common.parser(
        "quantize",
        "Write a checkpoint with packed weights: each tensor gets the bits of its role. Reads and writes tensor by "
        "tensor; a run that was stopped goes on where it was when it is started again.",
    )
    common.add_model(made, required=True)
    made.add_argument("-o", "--output", required=True, metavar="DIR", help="folder of the new checkpoint")
    made.add_argument(
        "--recipe", default="role-4-2-8", metavar="NAME",
        help=f"{', '.join(RECIPES)}, or {AUTO}: bits where they help, measured, under --size (default role-4-2-8)",
    )  # fmt: skip
    made.add_argument(
        "--size", type=parse_size, metavar="BYTES", help=f"of the weights' files with {AUTO}, as 32MB (10⁶) or 30MiB"
    )
    made.add_argument(
        "--sensitivity", metavar="FILE",
        help=f"where {AUTO} keeps what it measured, and finds it again for another size (default: in DIR)",
    )  # fmt: skip
    made.add_argument("--grid", default="trellis", metavar="NAME", help=f"{', '.join(GRIDS)} (default trellis)")
    made.add_argument("--group", type=int, default=128, metavar="N", help=f"columns of a scale: {GROUPS} (default 128)")
    made.add_argument("--no-rotation", action="store_true", help="take inputs as they are, without a Hadamard rotation")
    made.add_argument("--method", default="rtn", metavar="NAME", help="rtn: to the nearest level; gptq: so that errors "
                      "cancel in what the model computes; awq: inputs multiplied so that errors are small where they "
                      "are large; both want --calibration (default rtn)")  # fmt: skip
    made.add_argument("--calibration", metavar="FILE", help=f"text that the model reads for these and {AUTO}, UTF-8")
    made.add_argument("--tokens", type=int, default=_TOKENS, metavar="N", help=f"of it (default {_TOKENS})")
    return made.parse_args(words)


def _check_method(args: Any, auto: bool) -> None:
    """Raise ConfigError where options do not go together."""
    from rotaryquant.weights.packed_config import METHODS

    if args.method not in METHODS:
        raise ConfigError(f"method={args.method!r} is unknown; valid: {', '.join(METHODS)}")
    if auto and (args.size is None or args.calibration is None):
        raise ConfigError(
            "--recipe role-auto wants --size BYTES and --calibration FILE: a text on which it measures where bits help"
        )
    if not auto and (args.size is not None or args.sensitivity is not None):
        name = "size" if args.size is not None else "sensitivity"
        raise ConfigError(f"--{name} is for --recipe role-auto; recipe {args.recipe!r} has the bits it has")
    if args.method != "rtn" and args.calibration is None:
        raise ConfigError(f"--method {args.method} wants --calibration FILE: a text that the model reads")
    if args.method == "rtn" and not auto and args.calibration is not None:
        raise ConfigError(
            "--calibration is for --method gptq and awq and for --recipe role-auto; rtn rounds without a text"
        )


class _Reading:
    """The model in fp32, and the text that it reads: windows that are heard, and one on which parts are measured."""

    def __init__(self, folder: Path, args: Any, text: str) -> None:
        from rotaryquant.evals.windows import windows_of
        from rotaryquant.integrations.transformers.checkpoints import load_folder

        self.loaded: Loaded = load_folder(folder, args.model, dtype="float32")
        auto = args.size is not None
        windows, _ = windows_of(self.loaded, text, _WINDOW, args.tokens + auto * (_WINDOW - 1), prefix=0)
        self.heard, self.probes = (windows[:-1], windows[-1:]) if auto else (windows, [])

    def moments(self, names: "dict[str, Role]", waiting: Waiting) -> "InputMoments":
        """What the matrices of those names, with their roles, are multiplied with."""
        from rotaryquant.integrations.transformers.input_moments import InputMoments

        return InputMoments(self.loaded.model, self.heard, names, waiting)


def _chosen(reading: _Reading, args: Any, base: "PackedConfig", waiting: Waiting) -> "Recipe":
    """The recipe that `role-auto` is for this model, method and size."""
    from rotaryquant.evals.calibrate_weights import measure_sensitivity
    from rotaryquant.integrations.transformers.fingerprint import checkpoint_fingerprint
    from rotaryquant.models.roles import roles_of
    from rotaryquant.weights.conversion import sizes_of
    from rotaryquant.weights.headers import read_folder
    from rotaryquant.weights.sensitivity import MEASURED, MeasuredFile, choose, refuse_too_small

    model = reading.loaded.model
    sizes, other = sizes_of(read_folder(reading.loaded.folder), base)
    refuse_too_small(sizes, other, args.size)
    path = Path(args.sensitivity) if args.sensitivity is not None else Path(args.output) / MEASURED
    said = {key: value for key, value in base.as_dict().items() if key not in ("recipe", "bits")}
    measured = MeasuredFile(path, {"model": checkpoint_fingerprint(model), **said})
    names = roles_of(name for name, _ in model.named_parameters())
    moments = reading.moments(names, waiting) if args.method != "rtn" else _nothing
    found = measure_sensitivity(model, reading.probes, base, moments, measured, waiting)
    return choose(found, sizes, other, args.size)


def _nothing(name: str) -> "Tensor | None":
    """Moments for a method that needs none."""
    return None


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
