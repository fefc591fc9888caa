"""One real mixture-of-experts model on real text, where it is at hand."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rotaryquant import KVCacheConfig, enabled
from support.assets import asset, missing_asset
from support.drive import teacher_forced
from support.models import LOSSLESS, relative_error

MODEL, TEXT = "models/glm4moe-70m", "data/wikitext-2/test.txt"
PREFIX, SCORED = 600, 200

needs_assets = pytest.mark.assets(MODEL, TEXT)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(asset(MODEL), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(asset(MODEL))
    text = asset(TEXT).read_text()[:8000]
    found: Tensor = tokenizer(text, return_tensors="pt").input_ids[:, : PREFIX + SCORED]
    return found


@pytest.fixture(scope="module")
def exact(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits[:, PREFIX:]


def packed(model: PreTrainedModel, ids: Tensor, kv: str | KVCacheConfig, scored: int = SCORED) -> Tensor:
    """Logits of the first `scored` positions after the prefix, read through packed rows in steps of 8."""
    mask = torch.ones_like(ids)
    with enabled(model, kv) as state:
        assert state is not None
        cache = state.new_cache()
        with cache.prefill():
            teacher_forced(model, ids, mask, cache, [PREFIX])
        logits = teacher_forced(model, ids, mask, cache, [8] * (scored // 8), start=PREFIX)
        assert cache.counters.packed_reads > 0
    return logits


def divergence(exact: Tensor, got: Tensor) -> float:
    """Mean KL of the next-token distributions, nats."""
    p, q = exact.log_softmax(-1), got.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@needs_assets
def test_lossless_codes_change_nothing(model: PreTrainedModel, ids: Tensor, exact: Tensor) -> None:
    assert relative_error(packed(model, ids, LOSSLESS, 16), exact[:, :16]) < 1e-4


@needs_assets
def test_three_bits_cost_little_and_switches_are_felt(model: PreTrainedModel, ids: Tensor, exact: Tensor) -> None:
    """A metric that does not get much worse without the inverse rotation would measure nothing."""
    default = divergence(exact, packed(model, ids, "iso3"))
    assert default < 0.05
    assert divergence(exact, packed(model, ids, "iso4")) < default < divergence(exact, packed(model, ids, "iso2"))
    assert divergence(exact, packed(model, ids, "iso3,inverse=off")) > 10 * default


def test_assets_that_are_absent_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RQ_ASSETS", str(tmp_path / "nowhere"))
    assert "is not there (set RQ_ASSETS)" in str(missing_asset(MODEL))
    monkeypatch.setenv("RQ_ASSETS", str(tmp_path))
    assert f"lacks {MODEL}" in str(missing_asset(MODEL))
    with pytest.raises(FileNotFoundError, match="lacks"):
        asset(MODEL)
