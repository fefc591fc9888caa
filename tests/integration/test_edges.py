"""Off-by-one at chunk, block and tail edges; nothing rebuilt; every switch that must be felt."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from rotaryquant import KVCacheConfig, enabled
from rotaryquant.kv.packed import PackedLayer
from support.drive import ROUNDED, feed, round_queries, seen_rows, teacher_forced
from support.kernels import force_kernel
from support.models import LOSSLESS, LOSSLESS_STRICT, random_tokens, relative_error, tiny


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny()


# ---- chunks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 127, 128, 129])
@pytest.mark.parametrize("kv", ["lossless-strict", "iso3", "iso3-strict"])
def test_a_prompt_in_chunks_of_8_says_the_same(model: PreTrainedModel, kv: str, length: int) -> None:
    """A prompt of 9 or 17 leaves one token for the last chunk, which is still prompt."""
    spec: str | KVCacheConfig = LOSSLESS_STRICT if kv == "lossless-strict" else kv
    ids = random_tokens(1, length, seed=length)
    with enabled(model, spec) as state:
        whole = model.generate(ids, max_new_tokens=12, do_sample=False)
        chunked = model.generate(ids, max_new_tokens=12, do_sample=False, prefill_chunk_size=8)
        assert state is not None
        assert state.cache is not None
        assert state.cache.get_seq_length() == length + 11
    assert torch.equal(chunked, whole)


@pytest.mark.parametrize("length", [9, 17, 129, 257])
def test_deferred_chunks_pack_the_same_codes_as_one_shot(model: PreTrainedModel, length: int) -> None:
    ids = random_tokens(1, length)
    with enabled(model, "iso3-strict") as state, torch.no_grad():
        assert state is not None
        stored = []
        for chunks in ([length], [8] * (length // 8) + [1]):
            cache = state.new_cache()
            with cache.prefill():
                teacher_forced(model, ids, torch.ones_like(ids), cache, chunks)
            stored.append([seen_rows(layer, 0) for layer in cache.packed_layers()])
    for one, other in zip(*stored, strict=True):
        for a, b in zip(one, other, strict=True):
            # the model's own products may round otherwise in another shape: a code may turn where they do
            assert relative_error(a, b) < 2e-2


@pytest.mark.parametrize("chunk", [4, 64, 512, 1100])
def test_loss_per_position_shows_no_step(chunk: int) -> None:
    """1,100 random tokens: with lossless codes every position's loss is the stock one at any chunk size."""
    model = tiny(num_hidden_layers=1, num_key_value_heads=1, head_dim=16)
    ids = random_tokens(1, 1100)
    mask = torch.ones_like(ids)
    chunks = [chunk] * (1100 // chunk) + [1100 % chunk] * bool(1100 % chunk)
    with torch.no_grad():
        want = _losses(model(ids, use_cache=False).logits, ids)
    with enabled(model, LOSSLESS) as state:
        assert state is not None
        cache = state.new_cache()
        got = _losses(teacher_forced(model, ids, mask, cache, chunks), ids)
    assert (got - want).abs().max() < 1e-3
    if chunk < 1100:
        assert cache.counters.packed_reads > 0


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")


@pytest.mark.parametrize("kv", ["iso3", "iso3-strict"])
def test_every_length_around_512_agrees_with_the_reference(
    model: PreTrainedModel, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_tokens(1, 530)
    mask = torch.ones_like(ids)
    found = []
    round_queries(monkeypatch)
    for kernel in ("reference", None):
        force_kernel(monkeypatch, kernel)
        with enabled(model, kv) as state:
            assert state is not None
            cache = state.new_cache()
            with cache.prefill():
                teacher_forced(model, ids, mask, cache, [500])
            found.append(teacher_forced(model, ids, mask, cache, [1] * 30, start=500))
    for offset in range(30):
        assert relative_error(found[1][:, offset], found[0][:, offset]) < ROUNDED, 500 + offset


@pytest.mark.parametrize("prefill", ["deferred", "streaming"])
def test_streaming_and_deferred_prompts_both_decode(model: PreTrainedModel, prefill: str) -> None:
    ids = random_tokens(1, 300)
    want = model.generate(ids, max_new_tokens=8, do_sample=False)
    config = KVCacheConfig("both", key_bits=32, value_bits=32, prefill=prefill)
    with enabled(model, config) as state:
        got = model.generate(ids, max_new_tokens=8, do_sample=False, prefill_chunk_size=50)
        assert state is not None
        assert state.cache is not None
        layer = state.cache.packed_layers()[0]
    assert torch.equal(got, want)
    assert layer.rows[0].packed_len == 256


# ---- very small inputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", [LOSSLESS, LOSSLESS_STRICT], ids=lambda kv: kv.name)
def test_a_prompt_of_one_token(model: PreTrainedModel, kv: KVCacheConfig) -> None:
    ids = random_tokens(1, 1)
    want = model.generate(ids, max_new_tokens=20, do_sample=False)
    with enabled(model, kv):
        assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), want)


def test_an_empty_prompt_means_the_first_token_alone(model: PreTrainedModel) -> None:
    """As transformers has it: no ids at all begin with BOS."""
    want = model.generate(max_new_tokens=5, do_sample=False)
    with enabled(model, LOSSLESS_STRICT):
        assert torch.equal(model.generate(max_new_tokens=5, do_sample=False), want)


def test_a_prefill_of_nothing_leaves_the_cache_usable(model: PreTrainedModel) -> None:
    ids = random_tokens(1, 6)
    with enabled(model, LOSSLESS_STRICT) as state, torch.no_grad():
        assert state is not None
        cache = state.new_cache()
        with cache.prefill():
            pass
        assert cache.get_seq_length() == 0
        out = model(ids, cache=cache)
    with torch.no_grad():
        assert relative_error(out.logits, model(ids, use_cache=False).logits) < 1e-5


# ---- nothing is rebuilt ----------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns while this is active."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.where = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.numel() * tensor.element_size() > self.nbytes:
                self.nbytes, self.where = tensor.numel() * tensor.element_size(), f"{func} {tuple(tensor.shape)}"
        return out


@contextmanager
def _largest() -> Iterator[LargestTensor]:
    with LargestTensor() as mode:
        yield mode


TOKENS, HEADS, WIDTH = 2050, 2, 128


@pytest.fixture(scope="module")
def long_cache() -> Iterator[tuple[PreTrainedModel, Any]]:
    """A model small in everything but its context, with 2,050 tokens in its cache."""
    model = tiny(num_hidden_layers=1, hidden_size=32, intermediate_size=32, head_dim=WIDTH, num_key_value_heads=HEADS)
    with enabled(model, "iso3") as state, torch.no_grad():
        assert state is not None
        cache = state.new_cache()
        with cache.prefill():
            model(random_tokens(1, TOKENS), cache=cache, logits_to_keep=1)
        yield model, cache


def test_decode_rebuilds_no_keys_or_values(long_cache: tuple[PreTrainedModel, Any]) -> None:
    """Not in one piece (no tensor of half their 16-bit size), and never through the decoder of rows."""
    model, cache = long_cache
    with torch.no_grad(), _largest() as largest:
        for token in range(5, 8):
            model(torch.tensor([[token]]), cache=cache)
    assert cache.counters.packed_calls >= 3
    assert all(layer.decompress_calls == 0 for layer in cache.packed_layers())
    one_head = TOKENS * WIDTH * 2
    assert 0 < largest.nbytes < one_head, largest.where


def test_the_measure_sees_a_rebuilt_cache(long_cache: tuple[PreTrainedModel, Any]) -> None:
    _, cache = long_cache
    with _largest() as largest:
        cache.packed_layers()[0].decode_keys(0)
    assert largest.nbytes >= HEADS * (TOKENS - 128) * WIDTH * 2
    assert cache.packed_layers()[0].decompress_calls > 0
    cache.packed_layers()[0].decompress_calls = 0


# ---- switches that must be felt --------------------------------------------------------------------------------


def _attention_cosine(config: KVCacheConfig, keys: Tensor) -> float:
    """Cosine of packed attention to exact attention over the same keys, values being noise."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(keys.shape, generator=generator)
    queries = torch.randn(keys.shape, generator=generator)
    layer, exact = PackedLayer(config, 0), PackedLayer(LOSSLESS_STRICT, 0)
    outputs = []
    for target in (layer, exact):
        feed(target, keys[:, :, :-1], values[:, :, :-1], [keys.shape[2] - 1], prompt=1)
        outputs.append(feed(target, keys, values, [1], queries=queries, start=keys.shape[2] - 1))
    return float(torch.nn.functional.cosine_similarity(outputs[0].flatten(), outputs[1].flatten(), 0))


def _strict(**changes: Any) -> KVCacheConfig:
    return KVCacheConfig("switch", **{"sinks": 0, "tail": 0, "mean": False, "protect": False, **changes})


def test_output_needs_the_inverse_rotation() -> None:
    keys = torch.randn(1, 2, 40, 128)
    assert _attention_cosine(_strict(key_bits=8, value_bits=8), keys) > 0.999
    assert abs(_attention_cosine(_strict(key_bits=8, value_bits=8, inverse=False), keys)) < 0.5


def test_a_model_without_the_inverse_rotation_is_lost(model: PreTrainedModel) -> None:
    ids = random_tokens(1, 160)
    mask = torch.ones_like(ids)
    want = teacher_forced(model, ids, mask, DynamicCache(config=model.config), [150] + [1] * 10)[:, 150:]
    errors = {}
    for inverse in (True, False):
        with enabled(model, _strict(key_bits=8, value_bits=8, inverse=inverse)) as state:
            assert state is not None
            cache = state.new_cache()
            with cache.prefill():
                teacher_forced(model, ids, mask, cache, [150])
            errors[inverse] = relative_error(teacher_forced(model, ids, mask, cache, [1] * 10, start=150), want)
    assert errors[True] < 0.1
    assert errors[False] > 0.5


def test_keys_with_a_common_offset_need_the_signs() -> None:
    """Every channel of every key is shifted by 5: without signs the shift swamps one coordinate of the code."""
    keys = torch.randn(1, 4, 400, 128) + 5.0
    cosines = {}
    for signs in (True, False):
        layer = PackedLayer(_strict(signs=signs), 0)
        feed(layer, keys, keys, [400], prompt=1)
        stored, _ = seen_rows(layer, 0)
        cosines[signs] = float(torch.nn.functional.cosine_similarity(stored, keys[0], -1).mean())
    assert cosines[True] >= 0.98
    assert cosines[False] < 0.9


def test_logits_need_the_scale_correction() -> None:
    """Slope of q·k̂ on q·k over many rows: 1 with the unbiased scale, 3% short with the plain norm."""
    keys, queries = torch.randn(1, 2, 2000, 128), torch.randn(2, 200, 128)
    slopes = {}
    for scale in ("best", "norm"):
        layer = PackedLayer(_strict(scale=scale), 0)
        feed(layer, keys, keys, [2000], prompt=1)
        stored, _ = seen_rows(layer, 0)
        exact, got = queries @ keys[0].transpose(-1, -2), queries @ stored.transpose(-1, -2)
        slopes[scale] = float((exact * got).sum() / exact.square().sum())
    assert abs(slopes["best"] - 1) < 3e-3
    assert slopes["norm"] < 0.975


def test_values_are_rebuilt_without_a_bias() -> None:
    """Least squares is closer to each value, and makes all of them too short by what their codes lose."""
    rows = torch.randn(1, 2, 2000, 128)
    errors, lengths = {}, {}
    for scale in ("best", "mse", "norm"):
        layer = PackedLayer(_strict(scale=scale), 0)
        feed(layer, rows, rows, [2000], prompt=1)
        _, stored = seen_rows(layer, 0)
        errors[scale] = float((stored - rows[0]).square().sum() / rows.square().sum())
        lengths[scale] = float((stored * rows[0]).sum() / rows.square().sum())
    assert lengths["best"] == pytest.approx(1.0, abs=1e-3)
    assert lengths["mse"] == pytest.approx(1 - 0.0335, abs=1e-3)
    assert errors["mse"] == pytest.approx(0.0335, rel=0.01)
    assert errors["best"] == pytest.approx(0.0347, rel=0.01)
    assert errors["norm"] > errors["mse"] * 1.005


@pytest.mark.parametrize("rotation", ["isoquant", "hadamard", "dense", "so4", "so3", "none"])
def test_every_rotation_carries_ordinary_keys(rotation: str) -> None:
    keys = torch.randn(1, 2, 60, 64)
    assert _attention_cosine(_strict(rotation=rotation), keys) > 0.9


def test_one_hot_keys_need_a_rotation_that_mixes_all_channels() -> None:
    keys = 10 * torch.eye(128)[None, None].expand(1, 2, 128, 128)
    cosines = {}
    for rotation in ("isoquant", "so4", "none"):
        layer = PackedLayer(_strict(rotation=rotation), 0)
        feed(layer, keys, keys, [128], prompt=1)
        stored, _ = seen_rows(layer, 0)
        cosines[rotation] = float(torch.nn.functional.cosine_similarity(stored, keys[0], -1).mean())
    assert cosines["isoquant"] >= 0.98
    assert cosines["so4"] < 0.9
    assert cosines["none"] < 0.9
