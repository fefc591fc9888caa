"""What putting tokens into a packed cache takes of decoding: its share of a step, and the step that packs a strip.

    python benchmarks/append_share.py MODEL_FOLDER --depth 300 --steps 320

Every layer's `update` is timed in a plain decoding loop: staging the exact row, and every 32nd token also packing the
oldest 32 exact rows into a sealed strip, keys and values. Times are those of the process on the CPU, one thread.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch


def measure(folder: str, depth: int, steps: int, kv: str) -> dict[str, Any]:
    """Decode `steps` tokens after a random prompt of `depth` tokens."""
    import rotaryquant
    from rotaryquant.integrations.transformers.checkpoints import load_folder
    from rotaryquant.integrations.transformers.session import Session
    from rotaryquant.kv.packed import PackedLayer

    torch.set_num_threads(1)
    loaded = load_folder(Path(folder), folder, dtype="bfloat16")
    spent = 0.0
    update = PackedLayer.update

    def timed(layer: PackedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        nonlocal spent
        start = time.process_time()
        update(layer, keys, values)
        spent += time.process_time() - start

    PackedLayer.update = timed  # type: ignore[method-assign]
    whole, appends, packing = [], [], []
    with rotaryquant.enabled(loaded.model, kv) as state:
        session = Session(loaded.model, state)
        ids = torch.randint(loaded.model.config.vocab_size, (depth,), generator=torch.Generator().manual_seed(0))
        logits = session.read(ids.tolist())
        assert logits is not None
        for _ in range(steps):
            assert state is not None
            assert state.cache is not None
            before = state.cache.packed_layers()[0].rows[0].packed_len
            spent, start = 0.0, time.process_time()
            logits = session.step(int(logits.argmax()))
            whole.append(time.process_time() - start)
            appends.append(spent)
            packing.append(state.cache.packed_layers()[0].rows[0].packed_len > before)
    PackedLayer.update = update  # type: ignore[method-assign]
    step = statistics.median(whole)
    sealing = [spent for spent, packs in zip(appends, packing, strict=True) if packs]
    return {
        "model": Path(folder).name,
        "kv": kv,
        "depth": depth,
        "steps": steps,
        "step_ms": 1e3 * step,
        "append_share": sum(appends) / sum(whole),
        "packing_steps": len(sealing),
        "worst_append_steps": max(appends) / step,
        "worst_packing_ms": 1e3 * max(sealing, default=0.0),
    }


def main() -> None:
    """Print what was measured, and write it where --out says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--depth", type=int, default=300, help="prompt tokens (default 300)")
    parser.add_argument("--steps", type=int, default=320, help="tokens decoded (default 320)")
    parser.add_argument("--kv", default="iso3", help="the packed cache (default iso3)")
    parser.add_argument("--out", type=Path, help="also write JSON to this file")
    args = parser.parse_args()
    from rotaryquant.measuring import provenance

    found = {**provenance(), **measure(args.model, args.depth, args.steps, args.kv)}
    print(
        f"{found['model']}, {found['kv']}: appending takes {found['append_share']:.1%} of {found['steps']} steps of "
        f"{found['step_ms']:.1f} ms; the worst one, of {found['packing_steps']} that pack, takes "
        f"{found['worst_append_steps']:.2f} steps ({found['worst_packing_ms']:.1f} ms)"
    )
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
