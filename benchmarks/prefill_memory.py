"""Peak memory of reading a long prompt, deferred against streaming, each in a process of its own.

    python benchmarks/prefill_memory.py MODEL_FOLDER --text FILE --tokens 16384

Prints, for each mode, the peak resident size minus that after loading and a 256-token warm-up, beside the size of the
packed cache. Only the logits of the last token are asked for.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

_WARM_UP = 256
_SAMPLE_S = 0.002


def resident_bytes() -> int:
    """Resident memory of this process that no file backs, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("VmRSS is not in /proc/self/status; this benchmark needs Linux")


class Peak(threading.Thread):
    """Samples resident memory until the `with` block ends."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.base = self.largest = resident_bytes()
        self._running = True

    def run(self) -> None:
        """Sample."""
        while self._running:
            self.largest = max(self.largest, resident_bytes())
            time.sleep(_SAMPLE_S)

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._running = False
        self.join()


def measure(model: str, text: Path, tokens: int, mode: str, chunk: int) -> dict[str, float]:
    """Read one prompt in this process."""
    import torch

    import rotaryquant
    from rotaryquant.evals.inputs import load_model, read_text
    from rotaryquant.integrations.transformers.tokens import encode_text

    loaded = load_model(model, "auto")
    ids = torch.tensor(encode_text(loaded.tokenizer, read_text(text))[:tokens])[None]
    if ids.shape[1] < tokens:
        raise SystemExit(f"{text}: {ids.shape[1]} tokens, wanted {tokens}")
    state = rotaryquant.enable(loaded.model, f"iso3,prefill={mode}")
    assert state is not None

    def read(part: torch.Tensor) -> int:
        cache = state.new_cache()
        with torch.inference_mode(), cache.prefill():
            for begin in range(0, part.shape[1], chunk):
                loaded.model(part[:, begin : begin + chunk], cache=cache, logits_to_keep=1)
        return cache.nbytes

    read(ids[:, :_WARM_UP])
    with Peak() as peak:
        nbytes = read(ids)
    return {"peak_bytes": peak.largest - peak.base, "cache_bytes": nbytes}


def main() -> None:
    """Run both modes and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--mode", choices=("deferred", "streaming"), help="measure one mode in this process")
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(measure(args.model, args.text, args.tokens, args.mode, args.chunk)))
        return
    found = {}
    for mode in ("deferred", "streaming"):
        done = subprocess.run(  # noqa: S603 - this very script
            [sys.executable, __file__, *sys.argv[1:], "--mode", mode], capture_output=True, text=True, check=True
        )
        found[mode] = json.loads(done.stdout.splitlines()[-1])
    streaming, packed = found["streaming"]["peak_bytes"], found["streaming"]["cache_bytes"]
    print(
        json.dumps(
            {
                **found,
                "streaming_over_deferred": streaming / found["deferred"]["peak_bytes"],
                "streaming_bound_bytes": 1.3 * packed + 64 * 2**20,
                "streaming_within_bound": streaming <= 1.3 * packed + 64 * 2**20,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
