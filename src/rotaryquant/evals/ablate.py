"""What each part of the packed cache is worth: the same text with one part taken out or replaced at a time."""

import argparse
from collections.abc import Callable
from typing import Any

from rotaryquant.config import KVCacheConfig, parse_kv, spec_name
from rotaryquant.errors import ConfigError
from rotaryquant.evals import fidelity
from rotaryquant.measuring import Outcome

#: Part → what takes its place. Options of the base that equal a change are left out.
CHANGES: dict[str, tuple[str, ...]] = {
    "rotation": ("rotation=none", "rotation=so3", "rotation=so4", "rotation=hadamard", "rotation=dense"),
    "inverse": ("inverse=off",),
    "signs": ("signs=off",),
    "scale": ("scale=mse", "scale=norm"),
    "mean": ("mean=off",),
    "correct": ("correct=0",),
    "sinks": ("sinks=off",),
    "tail": ("tail=off",),
    "seed": ("seed=1", "seed=2"),
}


def specs_of(base: str, parts: list[str] | None = None) -> dict[str, KVCacheConfig]:
    """The base and each of its changes by the SPEC that names it; parts: those to change, None for all.

    Raises ConfigError for a part that is none, and for a base that packs nothing.
    """
    if wrong := [part for part in parts or () if part not in CHANGES]:
        raise ConfigError(f"--parts {wrong[0]!r} is unknown; valid: {', '.join(CHANGES)}")
    kept = parse_kv(base)
    if kept is None:
        raise ConfigError(f"--kv {base} packs nothing: there is nothing to take out")
    found = {spec_name(base): kept}
    for part in parts or CHANGES:
        for change in CHANGES[part]:
            spec = f"{base},{change}"
            changed = parse_kv(spec)
            assert changed is not None
            if getattr(changed, part) != getattr(kept, part):
                found[spec_name(spec)] = changed
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant eval ablate`."""
    fidelity.add_text_arguments(parser, tokens=4_000)
    parser.add_argument("--kv", metavar="SPEC", default="iso3", help="what is taken apart (default iso3)")
    parser.add_argument("--parts", metavar="LIST", help=f"comma-separated, of {', '.join(CHANGES)} (default: all)")


def run(args: argparse.Namespace, progress: Callable[[str], None]) -> Outcome:
    """Measure as the options say; progress is told what is under way.

    Raises RotaryQuantError with one clear line for a wrong input.
    """
    parts = [part.strip() for part in args.parts.split(",")] if args.parts else None
    specs, base = specs_of(args.kv, parts), spec_name(args.kv)
    measured = fidelity.measure_text(args, specs, progress)
    rows = [measured.result(spec) | {"against_base": measured.against(spec, base)} for spec in specs]
    return _outcome({**measured.about, "base": base, "results": rows})


def _outcome(data: dict[str, Any]) -> Outcome:
    headers = ["change", "ppl against base", "95% interval", "kld_mean", "of base", "kld_p999", "top1", "bits"]
    base = data["results"][0]
    rows = []
    for row in data["results"]:
        against = row["against_base"]
        rows.append(
            [
                row["kv"].removeprefix(f"{data['base']},"),
                f"{against['ratio']:.4f}",
                f"{against['low']:.4f}..{against['high']:.4f}",
                f"{row['kld_mean']:.4f}",
                f"{row['kld_mean'] / base['kld_mean']:.2f}" if base["kld_mean"] else "",
                f"{row['kld_p999']:.3f}",
                f"{row['top1']:.4f}",
                f"{row['bits_per_value']:.3f}",
            ]
        )
    lines = [
        f"{data['model']}: {base['tokens']:,} scored positions in {data['windows']} windows of {data['context']} "
        f"tokens of {data['text']}, ppl_ref {data['ppl_ref']:.3f}",
        f"base: {base['in_force']}, ppl_ratio {base['ppl_ratio']:.4f}",
    ]
    return Outcome(data, headers, rows, lines)
