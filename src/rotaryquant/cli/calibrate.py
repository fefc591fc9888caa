"""`rotaryquant calibrate`: measure which layers few bits hurt, and write it beside the model for `--kv`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotaryquant.cli import common
from rotaryquant.cli.measurements import command_line
from rotaryquant.cli.screen import Waiting, print_json, print_table
from rotaryquant.errors import ConfigError

if TYPE_CHECKING:
    from rotaryquant.allocation import Allocation
    from rotaryquant.formats.calibration import Calibration, StreamCost

#: Budgets for which the report shows what the file would give.
_BUDGETS = (2.5, 3.0, 4.0)


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    made = common.parser(
        "calibrate",
        "Measure what keys and values of few bits cost in each layer, one after another, and where their errors count; "
        "write a file by which `--kv iso3,calibration=FILE` gives every layer bits of its own at the same mean, and "
        "codes rows in a space of their own, in which errors count least.",
    )
    made.add_argument("model", metavar="MODEL", help="a model folder, a .gguf file, or org/name on the hub")
    made.add_argument(
        "--text", metavar="FILE", required=True, help="real text, UTF-8; not the one that is scored later"
    )
    made.add_argument("-o", "--output", metavar="SIDE.safetensors", required=True, help="file to write")
    made.add_argument("--kv", metavar="SPEC", default="iso3", help="how rows are coded otherwise (default iso3)")
    made.add_argument("--context", type=int, default=1024, metavar="N", help="tokens in a window (default 1024)")
    made.add_argument("--tokens", type=int, default=2048, metavar="N", help="predictions to compare (default 2048)")
    common.add_loading(made)
    made.add_argument(
        "--fits-only", action="store_true",
        help="leave out which layers bits help: a few forwards instead of eight for each layer and window",
    )  # fmt: skip
    made.add_argument("--any-baseline", action="store_true", help="go on with an implausible perplexity of the text")
    args = made.parse_args(words)
    from rotaryquant.config import parse_kv
    from rotaryquant.evals import calibrate_kv
    from rotaryquant.evals.inputs import load_model
    from rotaryquant.formats.calibration import write_calibration
    from rotaryquant.measuring import read_text

    kv = parse_kv(args.kv)
    if kv is None or kv.allocation is not None:
        raise ConfigError(f"--kv {args.kv}: wanted a packed cache without a calibration of its own")
    if args.tokens < 1:
        raise ConfigError(f"--tokens={args.tokens} must be at least 1")
    target = Path(args.output)
    if not target.absolute().parent.is_dir() or target.is_dir():
        raise ConfigError(f"--output {target}: wanted a file in a folder that exists")
    text = read_text(Path(args.text))
    with Waiting() as progress:
        calibration = calibrate_kv.measure(
            load_model(args.model, args.dtype, args.threads, args.device),
            kv,
            text,
            context=args.context,
            tokens=args.tokens,
            command=command_line("calibrate", words),
            any_baseline=args.any_baseline,
            fits_only=args.fits_only,
            progress=progress,
        )
    try:
        write_calibration(target, calibration)
    except OSError as error:
        raise ConfigError(f"--output {target}: cannot be written ({error})") from error
    _show(args.json, calibration, target)
    return 0


def _show(as_json: bool, calibration: "Calibration", target: Path) -> None:
    from rotaryquant.allocation import allocate

    found = [allocate(calibration, budget) for budget in _BUDGETS] if calibration.probe_bits else []
    if as_json:
        print_json(_as_json(calibration, found))
        return
    if not found:
        heads = sum(layer.num_kv_heads for layer in calibration.layers)
        print(
            f"Fits of {heads} KV heads in {len(calibration.layers)} layers of {calibration.name}; no layer was probed"
        )
        print(f"\nUse it with --kv iso3t,calibration={target}")
        return
    rows = []
    for number, layer in enumerate(calibration.layers):
        widths = [allocation.layers[number] for allocation in found]
        rows.append(
            [str(layer.index), _nats(layer.keys), _nats(layer.values)]
            + [f"{width.key_bits} / {width.value_bits}" for width in widths]
        )
    headers = ["layer", "keys, nats", "values, nats", *(f"K / V at {budget:g} bits" for budget in _BUDGETS)]
    print_table(rows, headers, right=range(1, len(headers)))
    print(
        f"\n{calibration.tokens:,} predictions of {calibration.name}, KL divergence with the rows of one stream at "
        f"{' and '.join(map(str, calibration.probe_bits))} bits; *: less where coded as they are. Expected of all:"
    )
    for budget, allocation in zip(_BUDGETS, found, strict=True):
        print(f"  budget={budget:g}: {allocation.expected:.5f} nats at {allocation.mean_bits:.2f} bits a value")
    print(f"\nUse it with --kv iso3,calibration={target}")


def _nats(stream: "StreamCost") -> str:
    """The lesser cost at each of the probes' bits, marked where that is without the fit."""
    return " / ".join(
        f"{min(plain, fitted):.5f}{'*' if plain <= fitted else ''}"
        for plain, fitted in zip(stream.plain, stream.fitted, strict=True)
    )


def _as_json(calibration: "Calibration", found: "list[Allocation]") -> dict[str, Any]:
    made = ("model", "name", "text", "tokens", "context", "probe_bits", "command")
    sizes = ("index", "num_kv_heads", "width")
    return {
        **{field: getattr(calibration, field) for field in made},
        "layers": [
            {field: getattr(layer, field) for field in sizes}
            | {
                name: {"plain": cost.plain, "fitted": cost.fitted}
                for name, cost in (("keys", layer.keys), ("values", layer.values))
            }
            for layer in calibration.layers
        ],
        "allocations": [
            {
                "budget": budget,
                "mean_bits": allocation.mean_bits,
                "expected": allocation.expected,
                "layers": [
                    {field: getattr(widths, field) for field in ("index", "key_bits", "value_bits")}
                    | {"key_fit": widths.key_fit is not None, "value_fit": widths.value_fit is not None}
                    for widths in allocation.layers
                ],
            }
            for budget, allocation in zip(_BUDGETS, found, strict=bool(found))
        ],
    }
