"""Peak memory of `rotaryquant generate`, measured, beside what `rotaryquant plan` said of it.

    python benchmarks/plan_peak.py MODEL … --text FILE --contexts 512,4096 --kv iso3:fp16 > FILE.json

Every run is a process of its own: a prompt of the context less 16 tokens, then 16 tokens; its peak is the largest
resident size that the system saw. Prints one JSON object: machine, date, versions, command, and a row for each run.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

_ANSWER = 16
_PROGRAM = [sys.executable, "-m", "rotaryquant.cli.main"]


def prompt_of(model: str, text: str, tokens: int) -> str:
    """Text that is about `tokens` tokens long for a model."""
    from rotaryquant.integrations.transformers.checkpoints import load_tokenizer

    tokenizer: Any = load_tokenizer(Path(model))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
    if len(ids) < tokens:
        raise SystemExit(f"the text has {len(ids)} tokens for {model}, wanted {tokens}")
    return str(tokenizer.decode(ids))


def command(words: list[str], stdin: str | None = None) -> dict[str, Any]:
    """What a command of the package prints with `--json`; `plan` ends with 1 where something does not fit."""
    done = subprocess.run(  # noqa: S603 - this very package
        [*_PROGRAM, *words, "--json"], input=stdin, capture_output=True, text=True, check=False
    )
    if not done.stdout.strip():
        raise SystemExit(f"rotaryquant {shlex.join(words)}: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(model: str, kv: str, context: int, text: str, threads: str) -> dict[str, Any]:
    """One run, and the plan of it."""
    prompt = prompt_of(model, text, context - _ANSWER)
    options = ["--kv", kv, "--max-tokens", str(_ANSWER), "--raw", "--threads", threads, "--prompt", "-"]
    made = command(["generate", model, *options], prompt)
    tokens = made["usage"]["prompt_tokens"] + made["usage"]["completion_tokens"]
    said = command(["plan", model, "--kv", kv, "--memory", "1TB", "--context", str(tokens), "--clients", "1"])
    measured = made["figures"]["peak_bytes"]
    found = {
        "model": Path(model).name, "kv": kv, "tokens": tokens, "measured_bytes": measured,
        "predicted_bytes": said["peak_bytes"], "ratio": said["peak_bytes"] / measured, "parts": said["memory"],
    }  # fmt: skip
    print(f"{found['model']} kv={kv} {tokens} tokens: measured {measured / 1e6:.0f} MB, planned "
          f"{said['peak_bytes'] / 1e6:.0f} MB, {found['ratio']:.3f}", file=sys.stderr, flush=True)  # fmt: skip
    return found


def main() -> None:
    """Measure and compare."""
    from rotaryquant.measuring import provenance

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="model folders")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--contexts", default="512,4096")
    parser.add_argument("--kv", default="iso3:fp16", help="SPECs, with a colon between them (default iso3:fp16)")
    parser.add_argument("--threads", default="1")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    rows = [
        row(model, kv, int(context), text, args.threads)
        for model in args.models
        for kv in args.kv.split(":")
        for context in args.contexts.split(",")
    ]
    names = [Path(model).name for model in args.models]
    options = ["--text", args.text.name, "--contexts", args.contexts, "--kv", args.kv, "--threads", args.threads]
    said = shlex.join(["python", "benchmarks/plan_peak.py", *names, *options])
    print(json.dumps({**provenance(), "command": said, "within": max(abs(one["ratio"] - 1) for one in rows),
                      "rows": rows}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
