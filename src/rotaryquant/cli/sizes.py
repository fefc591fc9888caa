"""Sizes as people write them: read strictly, printed briefly."""

import argparse
import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|B)")
_UNITS: dict[str, int] = {"B": 1} | {
    f"{letter}{middle}B": base**power
    for power, letter in enumerate("KMGT", 1)
    for middle, base in (("", 1000), ("i", 1024))
}


def parse_size(text: str) -> int:
    """Bytes of a size such as 16GB, 1.5GiB or 800MB (1 GB = 10⁹ bytes, 1 GiB = 2³⁰).

    Raises argparse.ArgumentTypeError for anything else, a bare number included: its unit would be a guess.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"size {text!r} must be a number above 0 with a unit: B, KB, MB, GB, GiB, ...")
    return round(float(match[1]) * _UNITS[match[2]])


def parse_speed(text: str) -> float:
    """Bytes per second of a speed such as 3GB/s. Raises argparse.ArgumentTypeError for anything else."""
    size, per, second = text.strip().partition("/")
    if (per, second) != ("/", "s"):
        raise argparse.ArgumentTypeError(f"speed {text!r} must be a size per second, such as 3GB/s")
    return float(parse_size(size))


def show_bytes(count: float) -> str:
    """A byte count with a decimal unit, three digits or more: 22.9 KB, 1.21 GB."""
    units = ["B", "KB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    unit = units[0]
    digits = 0 if unit == "B" or count >= 100 else 1 if count >= 10 else 2
    return f"{count:.{digits}f} {unit}"
