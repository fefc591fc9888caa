"""The share of a decode step that attention takes: foretold by `rotaryquant plan`, and measured by `eval profile`.

    rotaryquant eval rates --threads 1 --json > rates.json
    rotaryquant eval profile MODEL --context N --threads 1 --json > profile-MODEL-N.json    (as many as wanted)
    python benchmarks/plan_share.py rates.json profile-*.json --models FOLDER …

Prints one JSON object: the rates, and a row for each profile, with what bytes alone would say.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def foretold(model: str, tokens: int, rates: list[str]) -> float:
    """Share that a plan tells."""
    words = ["plan", model, "--memory", "1TB", "--context", str(tokens), *rates, "--json"]
    done = subprocess.run(  # noqa: S603 - this very package
        [sys.executable, "-m", "rotaryquant.cli.main", *words], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout)["attention_share"][str(tokens)])


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rates", type=Path)
    parser.add_argument("profiles", nargs="+", type=Path)
    parser.add_argument("--models", nargs="+", required=True, metavar="FOLDER")
    args = parser.parse_args()
    machine: dict[str, Any] = json.loads(args.rates.read_text())
    folders = {Path(folder).resolve().name: folder for folder in args.models}
    rows = []
    for path in args.profiles:
        profile = json.loads(path.read_text())
        model, tokens = profile["model"], int(profile["context"])
        by_rates = foretold(folders[model], tokens, ["--profile", str(args.rates)])
        rows.append(
            {
                "model": model, "tokens": tokens, "measured": profile["attention_share"], "foretold": by_rates,
                "points": 100 * (by_rates - profile["attention_share"]),
                "bytes_alone": foretold(folders[model], tokens, []), "command": profile["command"],
            }
        )  # fmt: skip
    rows.sort(key=lambda row: (row["model"], row["tokens"]))
    print(json.dumps({**machine, "rows": rows, "within_points": max(abs(row["points"]) for row in rows)}, indent=1))


if __name__ == "__main__":
    main()
