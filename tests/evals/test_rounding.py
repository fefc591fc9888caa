"""What rounding queries and probabilities to bytes costs on a real model, next to what 3 bits cost anyway."""

from pathlib import Path

import pytest
import torch

from rotaryquant.config import parse_kv
from rotaryquant.evals import fidelity
from rotaryquant.evals.inputs import load_model, read_text
from rotaryquant.evals.windows import windows_of
from support.assets import asset
from support.kernels import force_kernel

MODEL, TEXT = "models/glm4moe-70m", "data/wikitext-2/test.txt"


@pytest.mark.assets(MODEL, TEXT)
def test_rounding_adds_at_most_two_percent_to_the_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same codes, read with fp32 queries and probabilities and as the kernels of this machine round them.

    Every token is packed, so that every product is rounded.
    """
    spec = "iso3-strict"
    loaded = load_model(str(asset(MODEL)), "float32", None)
    windows, _ = windows_of(loaded, read_text(Path(asset(TEXT))), 1024, 8000)
    mean = {}
    for kernel in ("reference", "auto"):
        force_kernel(monkeypatch, kernel)
        _, scores = fidelity.measure(loaded, {spec: parse_kv(spec)}, windows)
        mean[kernel] = float(torch.cat(scores[spec].divergence).double().mean())
    assert mean["auto"] != mean["reference"]
    assert mean["auto"] <= 1.02 * mean["reference"]
