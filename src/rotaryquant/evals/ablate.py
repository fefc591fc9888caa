"""What each part of the packed cache is worth: the same text with one part taken out or replaced at a time.

With a calibration text two more things are told: the error that the codes of each change are expected to make, and what
SO(4) blocks are worth that are learned instead of random.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rotaryquant.config import KVCacheConfig, parse_kv, spec_name
from rotaryquant.errors import ConfigError
from rotaryquant.evals import fidelity
from rotaryquant.evals.facts import CALIBRATION_TOKENS, collect
from rotaryquant.evals.learned_rotation import LearnedRotations, code_errors, learn, require_learnable
from rotaryquant.evals.plots import ablation_picture
from rotaryquant.evals.statistics import mean_interval
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.geometry import read_geometry, text_config
from rotaryquant.integrations.transformers.rope import slow_coordinates
from rotaryquant.measuring import Outcome, Progress, read_text

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

#: The row of learned blocks.
LEARNED = "so4-learned"

#: Seeds over which the errors with and without random blocks are compared; signs of a seed are the same in both.
_SEEDS = range(8)


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
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help=f"text, not the one that is scored: adds expected errors of codes and the row {LEARNED}",
    )


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure as the options say; progress is told what is under way.

    Raises RotaryQuantError with one clear line for a wrong input.
    """
    parts = [part.strip() for part in args.parts.split(",")] if args.parts else None
    configs, base = specs_of(args.kv, parts), spec_name(args.kv)
    told: dict[str, Any] = {}
    errors: dict[str, dict[str, float]] = {}
    prepare = None
    if args.calibration is not None:
        require_learnable(configs[base])
        text = read_text(Path(args.calibration))
        if text == read_text(Path(args.text)):
            raise ConfigError(f"--calibration {args.calibration}: is the text that is scored; use another")
        told = {"calibration": Path(args.calibration).name, "calibration_tokens": CALIBRATION_TOKENS}

        def prepare(loaded: Loaded) -> dict[str, LearnedRotations]:
            learned, found, random = _calibrated(loaded, text, configs, base, progress)
            errors.update(found)
            told.update(random)
            return {learned.config.name: learned}

    measured = fidelity.measure_text(args, configs, progress, prepare=prepare)
    rows = []
    for spec in measured.scores:
        row = measured.result(spec) | {"against_base": measured.against(spec, base)}
        row["kld_of_base"], row["kld_of_base_low"], row["kld_of_base_high"] = measured.divergence_of(spec, base)
        rows.append(row | errors.get(spec, {}))
    return _outcome({**measured.about, "base": base, **told, "results": rows})


def _calibrated(
    loaded: Loaded, text: str, configs: Mapping[str, KVCacheConfig], base: str, progress: Progress
) -> tuple[LearnedRotations, dict[str, dict[str, float]], dict[str, Any]]:
    """Learned blocks for the base; the expected errors of its codes, of each change and of those blocks; and what
    random blocks do to them over several seeds.
    """
    progress(f"calibration on {CALIBRATION_TOKENS:,} tokens")
    facts, kept = collect(loaded, text, CALIBRATION_TOKENS), configs[base]
    slow = slow_coordinates(loaded.model, read_geometry(text_config(loaded.model)), kept.mean_period)
    progress("learning SO(4) blocks")
    learned = learn(kept, f"{base},{LEARNED}", facts, slow)
    progress("errors of codes")
    errors = {spec: code_errors(config, facts, slow) for spec, config in configs.items()}
    errors[learned.config.name] = code_errors(learned.config, facts, slow, learned.rotations)
    by_kind = [
        [code_errors(dataclasses.replace(kept, rotation=kind, seed=seed), facts, slow) for seed in _SEEDS]
        for kind in ("isoquant", "hadamard")
    ]
    random = {}
    for key in ("key_error", "value_error"):
        first, second = (np.array([one[key] for one in ones]) for ones in by_kind)
        random[f"random_blocks_{key}"] = dict(zip(("ratio", "low", "high"), mean_interval(first, second), strict=True))
    return learned, errors, random


def _outcome(data: dict[str, Any]) -> Outcome:
    headers = ["change", "ppl against base", "95% interval", "kld_mean", "of base", "95% interval", "kld_p999", "top1"]
    base, with_errors = data["results"][0], "key_error" in data["results"][0]
    headers += ["bits", *(["key error", "value error"] if with_errors else [])]
    rows = []
    for row in data["results"]:
        against = row["against_base"]
        cells = [
            row["kv"].removeprefix(f"{data['base']},"),
            f"{against['ratio']:.4f}",
            f"{against['low']:.4f}..{against['high']:.4f}",
            f"{row['kld_mean']:.4f}",
            f"{row['kld_of_base']:.2f}",
            f"{row['kld_of_base_low']:.2f}..{row['kld_of_base_high']:.2f}",
            f"{row['kld_p999']:.3f}",
            f"{row['top1']:.4f}",
            f"{row['bits_per_value']:.3f}",
        ]
        if with_errors:
            cells += [f"{row[key] / base[key]:.3f}" for key in ("key_error", "value_error")]
        rows.append(cells)
    lines = [
        f"{data['model']}: {base['tokens']:,} scored positions in {data['windows']} windows of {data['context']} "
        f"tokens of {data['text']}, ppl_ref {data['ppl_ref']:.3f}",
        f"base: {base['in_force']}, ppl_ratio {base['ppl_ratio']:.4f}",
    ]
    if with_errors:
        lines.append(
            f"errors of codes over the base's ({base['key_error']:.4f} of logits, {base['value_error']:.4f} of values) "
            f"on windows of {data['calibration']} that nothing was learned from"
        )
        each = [
            f"{share['ratio']:.4f} (95% {share['low']:.4f}..{share['high']:.4f})"
            for share in (data["random_blocks_key_error"], data["random_blocks_value_error"])
        ]
        lines.append(
            f"random SO(4) blocks after Hadamard and signs, over {len(_SEEDS)} seeds: error of logits {each[0]}, of "
            f"values {each[1]} of that without"
        )
    named = {row["kv"]: row for row in data["results"]}
    for spec, what in (
        (f"{data['base']},rotation=hadamard", "without random SO(4) blocks after Hadamard and signs"),
        (f"{data['base']},{LEARNED}", "with learned SO(4) blocks in place of random ones"),
    ):
        if spec in named:
            lines.append(f"{what}: {_verdict(named[spec])}")
    return Outcome(data, headers, rows, lines, picture=ablation_picture(data))


def _verdict(row: dict[str, Any]) -> str:
    """Whether a change makes a difference to the divergence, paired by window."""
    low, high = row["kld_of_base_low"], row["kld_of_base_high"]
    share = f"kld {row['kld_of_base']:.3f} (95% {low:.3f}..{high:.3f}) of the base's"
    if low <= 1.0 <= high:
        return f"{share}, no difference within the interval"
    return f"{share}, {'better' if high < 1.0 else 'worse'}"
