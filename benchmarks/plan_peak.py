"""The peak that `rotaryquant plan` foretells beside what `rotaryquant generate` takes, each run a process of its own.

    python benchmarks/plan_peak.py MODEL_FOLDER ... --text FILE --context 512 4096 --kv iso3 fp16 -o RESULT.json

A prompt of the text is read and 16 tokens are generated. `program` is what the peak leaves once everything else that
the plan names is taken off: the constant `PROCESS_BYTES` should be near it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rotaryquant.measuring import model_name, provenance

_ANSWER = 16
_CLI = (sys.executable, "-m", "rotaryquant.cli.main")


def prompt_of(model: Path, text: str, tokens: int) -> str:
    """The text's first tokens, as text: about so many once they are read again."""
    from rotaryquant.integrations.transformers.checkpoints import load_tokenizer

    tokenizer = load_tokenizer(model)
    ids: list[int] = tokenizer(text[: 8 * tokens + 100], add_special_tokens=False)["input_ids"]
    found: str = tokenizer.decode(ids[:tokens])
    return found


def _json(words: list[str], given: str = "") -> dict[str, Any]:
    done = subprocess.run([*_CLI, *words, "--json"], input=given, capture_output=True, text=True, check=False)  # noqa: S603
    if not done.stdout:
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def compare(model: Path, text: str, tokens: int, kv: str) -> dict[str, Any]:
    """One run and its plan. Bytes."""
    prompt = prompt_of(model, text, tokens - _ANSWER)
    options = [
        "generate",
        str(model),
        "--raw",
        "--prompt",
        "-",
        "--kv",
        kv,
        "--max-tokens",
        str(_ANSWER),
        "--threads",
        "1",
    ]
    ran = _json(options, prompt)
    context = ran["usage"]["prompt_tokens"] + _ANSWER
    planned = _json(["plan", str(model), "--memory", "64GB", "--context", str(context), "--kv", kv])["peak"]
    measured = ran["figures"]["peak_bytes"]
    return {
        "model": model_name(str(model)),
        "kv": kv,
        "context": context,
        "measured_bytes": measured,
        "planned_bytes": planned["peak"],
        "error": planned["peak"] / measured - 1,
        "program_bytes": measured - (planned["peak"] - planned["process"]),
        "planned": planned,
    }


def main() -> None:
    """Run all, print a line each, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--kv", nargs="+", default=["iso3", "fp16"])
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    text, rows = args.text.read_text(encoding="utf-8"), []
    for model in args.models:
        for context in args.context:
            for kv in args.kv:
                row = compare(model, text, context, kv)
                rows.append(row)
                print(
                    f"{row['model']} {row['kv']} {row['context']}: measured {row['measured_bytes'] / 1e6:.0f} MB, "
                    f"planned {row['planned_bytes'] / 1e6:.0f} MB ({row['error']:+.1%}); "
                    f"program {row['program_bytes'] / 1e6:.0f} MB",
                    flush=True,
                )
    names = " ".join(model_name(str(model)) for model in args.models)
    contexts, specs = " ".join(map(str, args.context)), " ".join(args.kv)
    command = f"python benchmarks/plan_peak.py {names} --text {args.text.name} --context {contexts} --kv {specs}"
    if args.out is not None:
        args.out.write_text(json.dumps({**provenance(), "command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
