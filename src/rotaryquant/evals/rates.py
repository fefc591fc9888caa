"""What the parts of a decode step cost on this machine, from three small random models: rates for `rotaryquant plan`.

Time of a part is taken as a fixed cost a call and a cost a byte: with models of other widths and three depths there are
more samples than unknowns, which are fitted so that relative errors are least. Parts are those of `eval profile`.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray

from rotaryquant.errors import ConfigError
from rotaryquant.evals.plots import profile_picture
from rotaryquant.evals.profile import measure
from rotaryquant.integrations.transformers.checkpoints import Loaded, parse_dtype
from rotaryquant.measuring import Outcome, Progress, provenance
from rotaryquant.planning.speed import Rates

_DEPTHS = (256, 1024, 4096)
_LAYERS, _EXPERTS, _VOCABULARY = 6, 16, 8192

#: Hidden size, query heads, KV heads, head width, width of an expert or of the MLP, experts of a token (0: no experts).
_MODELS = ((512, 8, 2, 128, 128, 4), (1024, 16, 4, 64, 512, 2), (512, 8, 2, 64, 1536, 0))
_Shape = tuple[int, int, int, int, int, int]


def _model(shape: _Shape, dtype: torch.dtype) -> Loaded:
    """A random model, with routed experts or without."""
    hidden, heads, kv_heads, width, inner, per_token = shape
    fields: dict[str, Any] = {
        "vocab_size": _VOCABULARY, "hidden_size": hidden, "num_hidden_layers": _LAYERS, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": width, "max_position_embeddings": 2 * max(_DEPTHS),
        "tie_word_embeddings": True,
    }  # fmt: skip
    model: Any
    if per_token:
        experts: dict[str, Any] = {
            "num_experts": _EXPERTS,
            "num_experts_per_tok": per_token,
            "moe_intermediate_size": inner,
        }
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**fields, **experts))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**fields, intermediate_size=inner))
    return Loaded(f"random {hidden}", Path(), model.to(dtype).eval(), cast("Any", None))  # nothing here reads text


def fit(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Cost a call and a byte, both at least 0, that meet samples (calls, bytes, seconds) with least relative errors."""
    table: NDArray[np.float64] = np.array(samples, dtype=np.float64)
    scaled = table[:, :2] / table[:, 2:]
    found = np.linalg.lstsq(scaled, np.ones(len(table)), rcond=None)[0]
    for place in (0, 1):
        if found[place] < 0:  # noise: all of it is the other's
            other = scaled[:, 1 - place]
            found[place], found[1 - place] = 0.0, float(other.sum() / (other * other).sum())
    return float(found[0]), float(found[1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rotaryquant eval rates`."""
    parser.add_argument("--dtype", default="bfloat16", metavar="TYPE", help="of the weights (default bfloat16)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="steps timed at each depth (default 16)")


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure as the options say. Raises ConfigError for a wrong one."""
    if args.steps < 1 or (args.threads is not None and args.threads < 1):
        raise ConfigError(f"steps={args.steps}, threads={args.threads}: need at least 1 of each")
    if args.dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"dtype={args.dtype!r}: rates are of bfloat16 or float32")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rates, rows = measured(args.steps, parse_dtype(args.dtype), progress)
    data = {
        **provenance(), "threads": torch.get_num_threads(), "dtype": args.dtype, "steps": args.steps,
        "rates": rates.as_dict(), "results": rows,
    }  # fmt: skip
    cells = [[f"{row['hidden']}", f"{row['depth']:,}", *(f"{row[name]:.2f}" for name in _NAMES)] for row in rows]
    lines = [f"{name}: {value:.3g} s" for name, value in rates.as_dict().items()]
    headers = ["hidden size", "depth", *(f"{name} ms" for name in _NAMES)]
    return Outcome(data, headers, cells, lines, picture=profile_picture(_deepest(data), _NAMES))


def _deepest(data: Mapping[str, Any]) -> dict[str, Any]:
    """Steps at the largest depth, as the picture of `eval profile` has them."""
    results = [
        {"kv": f"{row['hidden']} wide", "step_ms": row["step"], **{f"{name}_ms": row[name] for name in _NAMES}}
        for row in data["results"]
        if row["depth"] == max(_DEPTHS)
    ]
    return {"model": "random models", "context": max(_DEPTHS), "dtype": data["dtype"], "results": results}


_NAMES = ("attention", "weights", "experts", "rest")


def measured(steps: int, dtype: torch.dtype, progress: Progress) -> tuple[Rates, list[dict[str, Any]]]:
    """Rates, and the milliseconds that they are fitted to."""
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in _NAMES}
    rest: dict[bool, list[float]] = {True: [], False: []}
    rows = []
    for shape in _MODELS:
        loaded, routed = _model(shape, dtype), shape[-1] > 0
        generator = torch.Generator().manual_seed(0)
        for depth in _DEPTHS:
            ids = torch.randint(_VOCABULARY, (depth,), generator=generator).tolist()
            times = measure(loaded, ids, {"fp16": None}, steps, progress)["fp16"]
            rows.append({"hidden": shape[0], "experts_per_token": shape[-1], "depth": depth, **times})
            for name, (calls, count) in _work(shape, depth).items():
                samples[name].append((calls, count * dtype.itemsize, times[name] / 1e3))
            rest[routed].append(times["rest"] / 1e3 / _LAYERS)
    plain, chosen = (float(np.median(rest[routed])) for routed in (False, True))
    costs = *fit(samples["attention"]), *fit(samples["weights"]), *fit(samples["experts"])
    return Rates(*costs, plain, max(0.0, chosen - plain)), rows


def _work(shape: _Shape, depth: int) -> dict[str, tuple[int, int]]:
    """Calls and values read in each part of a step."""
    hidden, heads, kv_heads, width, inner, per_token = shape
    dense = _LAYERS * 2 * hidden * width * (heads + kv_heads) + hidden * _VOCABULARY
    found = {"attention": (_LAYERS, _LAYERS * heads * 2 * width * depth)}
    if per_token:
        experts = _LAYERS * per_token * 3 * hidden * inner
        return found | {"weights": (4 * _LAYERS + 1, dense), "experts": (_LAYERS, experts)}
    return found | {"weights": (7 * _LAYERS + 1, dense + _LAYERS * 3 * hidden * inner)}
