"""Instructions of the CPU kernels, counted by valgrind: the same on a busy machine as on an idle one.

    python benchmarks/count_instructions.py --out benchmarks/results/instructions.json

Compiles the kernels with the flags of a release, runs one call of each kind under callgrind and prints instructions per
key and KV head of one decode step, and per value of 32 rows that are appended. AVX-512 and AVX-VNNI are left out:
valgrind does not know them.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[1]

#: (num_heads, num_kv_heads, head_dim): a large model's layer and a small one's.
SHAPES = ((32, 4, 128), (9, 3, 64))
TOKENS = 4096
ROWS = 32
ISAS = ("base", "v2", "v3")


@dataclass(frozen=True)
class Count:
    """Instructions of one call."""

    op: str
    isa: str
    shape: str
    instructions: int
    per: str
    instructions_per: float


def program(name: str) -> str:
    """Path of a program, those beside this interpreter first."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is not installed")
    return found


def build() -> Path:
    """The driver of tests/native with the flags of a release; what is up to date in build/driver-release is kept."""
    folder, cmake = _REPOSITORY / "build" / "driver-release", program("cmake")
    for words in (["-S", _REPOSITORY, "-B", folder, "-DRQ_DRIVER=ON"], ["--build", folder]):
        subprocess.run([cmake, *words], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own sources
    return folder / "driver"


def count(driver: Path, op: str, isa: str, numbers: tuple[int, ...]) -> int:
    """Instructions of one `rq::run_OP`, whatever it calls included."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind"
        words = [
            program("valgrind"), "--tool=callgrind", f"--callgrind-out-file={out}", "--collect-atstart=no",
            f"--toggle-collect=rq::run_{op}(*", str(driver), "bench", op, isa, *map(str, numbers),
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 - our own program
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        found = re.search(r"^(?:summary|totals): (\d+)$", out.read_text(), re.M)
    if found is None or found[1] == "0":
        raise SystemExit(f"callgrind saw no rq::run_{op}")
    return int(found[1])


def measure() -> list[Count]:
    """Every op, shape and instruction set."""
    driver, counts = build(), []
    for heads, kv_heads, width in SHAPES:
        shape = f"{heads}/{kv_heads}/{width}"
        for op, tokens, per, share in (
            ("attention", TOKENS, "key and KV head", TOKENS * kv_heads),
            ("append", ROWS, "value", ROWS * kv_heads * width),
        ):
            for isa in ISAS:
                instructions = count(driver, op, isa, (heads, kv_heads, width, tokens))
                counts.append(Count(op, isa, shape, instructions, per, round(instructions / share, 2)))
    return counts


def table(counts: list[Count]) -> str:
    """The counts as Markdown."""
    lines = ["| op | heads/KV heads/width | instructions per | " + " | ".join(ISAS) + " |"]
    lines.append("|---" * (3 + len(ISAS)) + "|")
    for first in (c for c in counts if c.isa == ISAS[0]):
        same = [c for c in counts if (c.op, c.shape) == (first.op, first.shape)]
        cells = [f"{c.instructions_per:.2f}" for c in same]
        lines.append("| " + " | ".join([first.op, first.shape, first.per, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the counts as JSON too")
    args = parser.parse_args()
    counts = measure()
    print(table(counts))
    if args.out is not None:
        compiler = subprocess.run(  # noqa: S603 - asks for its version
            [program("c++"), "--version"], capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]
        found = {"tokens": TOKENS, "rows": ROWS, "compiler": compiler, "counts": [asdict(c) for c in counts]}
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
