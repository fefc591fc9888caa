"""A layer of routed experts, all of them in memory: packed weights against torch's products with exact ones.

Every call has tokens and experts of its own, so that it finds its weights in memory rather than in a cache. Bytes are
those of the experts that tokens go to, each read once.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rotaryquant.bench import devices
from rotaryquant.bench.checks import kernel_of, require_close
from rotaryquant.bench.matmul import add_common, form_of, outcome_of, parse_common, random_weight, row_of
from rotaryquant.bench.table import plural
from rotaryquant.bench.timing import torch_threads
from rotaryquant.measuring import Outcome, Progress
from rotaryquant.ops.expert_matmul import Gate, expert_matmul
from rotaryquant.ops.weights import PackedWeight

#: Calls with tokens and experts of their own.
_ROUTINGS = 12

_OURS = "ours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant bench experts`."""
    shapes = "128x768x2048/8"
    parser.add_argument(
        "--shapes",
        metavar="LIST",
        default=shapes,
        help=f"experts x inner width x width / experts of a token (default {shapes})",
    )
    parser.add_argument("--batch", metavar="LIST", default="1,8,32", help="tokens, comma-separated (default 1,8,32)")
    add_common(parser)


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure as the options say; progress is told what is under way.

    Raises ConfigError for a wrong option, and CheckError, before a row is timed, where its kernel is wrong.
    """
    shapes, bits, batches, threads, rounds = parse_common(args, 4, "128x768x2048/8")
    rows, top = [], {}
    for number in threads:
        with torch_threads(number or torch.get_num_threads()):
            progress("roof of this machine")
            top[number] = devices.measure_roof(args.device, number)
            for (experts, inner, width, k), wide in product(shapes, bits):
                progress(f"{experts} experts of {inner} x {width} at {wide} bits")
                torch.manual_seed(0)
                first = random_weight(form_of(args, width, wide), (experts, 2 * inner), args.device)
                second = random_weight(form_of(args, inner, wide), (experts, width), args.device)
                for batch in batches:
                    rows.append(_measure(first, second, batch, k, args.device, number, rounds, top[number]))
    return outcome_of(devices.data_of(args.device, top, rows, rounds), args.device, "layers of routed experts")


def _silu_gate(up: Tensor) -> Tensor:
    gate, rest = up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * rest


def _measure(
    first: PackedWeight,
    second: PackedWeight,
    batch: int,
    k: int,
    device: str,
    threads: int,
    rounds: int,
    roof: float | None,
) -> dict[str, Any]:
    experts, width, inner = first.shape[0], first.shape[-1], second.shape[-1]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    gate = Gate(_silu_gate, "silu")
    routings = [
        (
            torch.randn(batch, width, device=device).to(dtype),
            torch.stack([torch.randperm(experts, device=device)[:k] for _ in range(batch)]),
            torch.rand(batch, k, device=device).to(dtype),
        )
        for _ in range(_ROUTINGS)
    ]
    x, chosen, shares = routings[0]
    error = require_close(
        f"expert_matmul, {first.codec.format.bits} bits, {plural(batch, 'token')}",
        expert_matmul(x, chosen, shares, first, second, gate),
        expert_matmul(x, chosen, shares, first, second, gate, kernel="reference"),
    )
    hit = sum(len(torch.unique(each)) for _, each, _ in routings) / _ROUTINGS
    whole = sum(part.nbytes for weight in (first, second) for part in (weight.codes, weight.scales))
    calls: dict[str, list[Callable[[], object]]] = {
        _OURS: [partial(expert_matmul, a, b, c, first, second, gate) for a, b, c in routings]
    }
    exact = [torch.randn(weight.shape, device=device).to(torch.bfloat16) / 50 for weight in (first, second)]
    for name, form in _PEERS[device].items():
        given = [(a.to(torch.bfloat16), b, c.to(torch.bfloat16)) for a, b, c in routings]
        calls[f"torch bf16 {name}"] = [partial(form, *each, *exact) for each in given]
    return row_of(
        calls, rounds, device, threads, round(whole / experts * hit), roof, op="expert_matmul",
        kernel=kernel_of("expert_matmul", calls[_OURS][0]), shape=f"{experts}x{inner}x{width}/{k}", batch=batch,
        tokens=batch, bits=first.codec.format.bits, grid=first.codec.format.grid, group=first.codec.format.group,
        residency="memory", experts_hit=hit, check_error=error,
    )  # fmt: skip


def _gathered(x: Tensor, chosen: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Every token with its own copy of its experts."""
    flat = chosen.view(-1)
    up = torch.bmm(first[flat], x.repeat_interleave(chosen.shape[1], 0)[:, :, None])[..., 0]
    down = torch.bmm(second[flat], _silu_gate(up)[:, :, None])[..., 0]
    return (down.view(*chosen.shape, -1) * weights[..., None]).sum(1)


def _grouped(x: Tensor, chosen: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Tokens by expert, and one product for all experts."""
    ordered, order = torch.sort(chosen.view(-1), stable=True)
    numbers = torch.arange(len(first), device=x.device)
    ends = torch.searchsorted(ordered, numbers, right=True).to(torch.int32)
    up = torch._grouped_mm(x[order // chosen.shape[1]], first.mT, offs=ends)
    down = torch._grouped_mm(_silu_gate(up), second.mT, offs=ends)
    parts = torch.empty_like(down)
    parts[order] = down
    return (parts.view(*chosen.shape, -1) * weights[..., None]).sum(1)


def _looped(x: Tensor, chosen: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Expert after expert that any token goes to."""
    out = torch.zeros_like(x)
    for expert in torch.unique(chosen).tolist():
        token, place = torch.where(chosen == expert)
        inner = _silu_gate(torch.nn.functional.linear(x[token], first[expert]))
        down = torch.nn.functional.linear(inner, second[expert])
        out.index_add_(0, token, down * weights[token, place, None])
    return out


_PEERS = {"cuda": {"gathered": _gathered, "grouped": _grouped}, "cpu": {"looped": _looped}}
