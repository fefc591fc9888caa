"""Decode steps of a packed checkpoint beside those of another in bf16, in one process and in turns.

    rotaryquant quantize MODEL -o PACKED --recipe uniform-4
    python benchmarks/packed_decode.py MODEL PACKED

Processor time of one thread, a transformers forward a token, 64 tokens of context; each pair of runs gives a ratio.
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import rotaryquant  # noqa: F401 - transformers learns to read packed weights

CONTEXT, STEPS = 64, 24


@torch.inference_mode()
def step_seconds(model: PreTrainedModel) -> float:
    """Seconds a token."""
    ids = torch.randint(100, 1000, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    token = model(ids, cache=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    begun = time.process_time()
    for _ in range(STEPS):
        token = model(token, cache=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    return (time.process_time() - begun) / STEPS


def main() -> None:
    """Print the medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("whole", help="folder of the checkpoint that was packed")
    parser.add_argument("packed", help="folder of the packed one")
    parser.add_argument("--pairs", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval() for path in (args.whole, args.packed)
    ]
    for model in models:
        step_seconds(model)
    pairs = [[step_seconds(model) for model in models] for _ in range(args.pairs)]
    whole, packed = (1e3 * statistics.median(pair[place] for pair in pairs) for place in (0, 1))
    ratios = statistics.quantiles([pair[0] / pair[1] for pair in pairs], n=4)
    spread = f"{ratios[1]:.2f} (quartiles {ratios[0]:.2f}..{ratios[2]:.2f})"
    print(f"bf16 {whole:.1f} ms, packed {packed:.1f} ms a token, ratio {spread}")


if __name__ == "__main__":
    main()
