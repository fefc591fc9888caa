"""What benchmarks are told on the command line, read strictly: a typing error must not become another measurement."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rotaryquant.config import KVCacheConfig, parse_kv
from rotaryquant.errors import ConfigError

DEVICES = ("cpu",)


@dataclass(frozen=True)
class Shape:
    """Heads of an attention layer."""

    num_heads: int
    num_kv_heads: int
    width: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}/{self.width}"


def add_common(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    """Options of benchmarks on random data."""
    add_device(parser)
    parser.add_argument(
        "--shapes",
        metavar="LIST",
        default="32/4/128,16/2/256,9/3/64",
        help="num_heads/num_kv_heads/width, comma-separated (default 32/4/128,16/2/256,9/3/64)",
    )
    parser.add_argument("--kv", metavar="SPEC", default="iso3", help="bits, rotation and scales (default iso3)")
    parser.add_argument(
        "--threads", metavar="LIST", default="1", help="numbers of threads, comma-separated (default 1)"
    )
    parser.add_argument(
        "--repeats", type=int, metavar="N", default=repeats, help=f"interleaved rounds (default {repeats})"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`."""
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu (default), the only one with kernels so far"
    )


def check_device(device: str, valid: Sequence[str] = DEVICES) -> None:
    """Raise ConfigError for a device that a benchmark does not run on."""
    if device not in valid:
        raise ConfigError(f"device={device!r} cannot be measured; valid: {', '.join(valid)}")


def parse_numbers(option: str, text: str, least: int = 1) -> list[int]:
    """Numbers of a comma-separated list, ascending, each once. Raises ConfigError naming the option and the number."""
    found = set()
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < least:
            raise ConfigError(f"{option} {text!r}: {part.strip()!r} must be a whole number, at least {least}")
        found.add(int(part))
    return sorted(found)


def parse_shapes(text: str) -> list[Shape]:
    """Shapes of a comma-separated list. Raises ConfigError naming the one that is none."""
    shapes = []
    for part in text.split(","):
        numbers = part.strip().split("/")
        if len(numbers) != 3 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise ConfigError(f"--shapes: {part.strip()!r} must be num_heads/num_kv_heads/width, such as 32/4/128")
        shape = Shape(*map(int, numbers))
        if shape.num_heads % shape.num_kv_heads:
            raise ConfigError(f"--shapes: {shape} has {shape.num_heads} heads, no multiple of {shape.num_kv_heads}")
        shapes.append(shape)
    return shapes


def parse_names(option: str, text: str, valid: Sequence[str]) -> list[str]:
    """Names of a comma-separated list, in its order. Raises ConfigError naming the one that is not valid."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in valid:
            raise ConfigError(f"{option}: {name!r} is unknown; valid: {', '.join(valid)}")
    return names


def parse_packed(spec: str) -> KVCacheConfig:
    """The configuration of `--kv`. Raises ConfigError where it is unknown or packs nothing."""
    kv = parse_kv(spec)
    if kv is None:
        raise ConfigError(f"kv={spec!r} packs nothing, so there is nothing to measure; valid: iso3, iso3-strict, ...")
    return kv


def at_least(option: str, value: int, least: int) -> int:
    """The value. Raises ConfigError where it is less than `least`."""
    if value < least:
        raise ConfigError(f"{option}={value} must be at least {least}")
    return value
