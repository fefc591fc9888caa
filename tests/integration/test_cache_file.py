"""A cache in a file: what it means travels with it, and a reader that expects otherwise is refused."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache

from rotaryquant import KVCacheConfig, enabled, parse_kv
from rotaryquant.errors import CacheFileError
from rotaryquant.formats.kv import VERSION
from rotaryquant.integrations.transformers import cache_file
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.cache_file import load_cache, save_cache
from rotaryquant.integrations.transformers.fingerprint import model_fingerprint
from rotaryquant.integrations.transformers.geometry import text_config
from support.elsewhere import ELSEWHERE, elsewhere
from support.kernels import force_kernel
from support.models import random_tokens, tiny
from support.zoo import build, sharpen

Path = pathlib.Path


def written(model: PreTrainedModel, path: Path, kv: str | KVCacheConfig, columns: int = 150, batch: int = 1) -> Tensor:
    """Save a cache of `columns` tokens; returns them."""
    ids = random_tokens(batch, columns, vocab=256)
    with enabled(model, kv) as state, torch.no_grad():
        assert state is not None
        cache = state.new_cache()
        with cache.prefill():
            model(ids, cache=cache)
        save_cache(path, model, cache, ids)
    return ids


def empty(model: PreTrainedModel, kv: str | KVCacheConfig) -> PackedCache:
    config = parse_kv(kv)
    assert config is not None
    return PackedCache(text_config(model), config)


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    """Change a file's header or tensors."""
    with safe_open(str(path), "pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    header = json.loads(metadata["header"])
    change(header, tensors)
    save_file(tensors, str(path), {**metadata, "header": json.dumps(header)})


@pytest.mark.parametrize(
    "family", ["tiny", "tiny-96", "gemma4_moe", "granitemoehybrid", "qwen3_next", "gemma4_kvshared"]
)
@pytest.mark.parametrize("kv", ["iso3", "iso3-strict"])
def test_a_loaded_cache_says_the_same(family: str, kv: str, tmp_path: Path) -> None:
    model = {"tiny": tiny, "tiny-96": lambda: tiny(head_dim=96)}.get(family, lambda: build(family))()
    ids = random_tokens(1, 212, vocab=256)  # with a tail, 128 + 32 of them are packed
    path = tmp_path / "cache.safetensors"
    with enabled(model, kv) as state, torch.no_grad():
        assert state is not None
        cache = state.new_cache()
        first = model.generate(ids, max_new_tokens=5, do_sample=False, cache=cache)
        save_cache(path, model, cache, first[:, :-1])
        mask = torch.ones_like(first)  # a random model may say its pad token
        want = model.generate(first, attention_mask=mask, max_new_tokens=110, do_sample=False, cache=cache)
        loaded = state.new_cache()
        tokens = load_cache(path, model, loaded)
        assert torch.equal(tokens, first[:, :-1])
        assert loaded.get_seq_length() == 216
        got = model.generate(first, attention_mask=mask, max_new_tokens=110, do_sample=False, cache=loaded)
    assert torch.equal(got, want)
    assert loaded.counters.packed_reads > 0


def test_a_batch_with_pads_says_the_same(tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    ids = random_tokens(3, 212)
    mask = torch.ones_like(ids)
    mask[1, :60], mask[2, :211] = 0, 0  # 160, 96 and 0 tokens are packed
    with enabled(model, "iso3") as state, torch.no_grad():
        assert state is not None
        cache = state.new_cache()
        with cache.prefill():
            model(ids, attention_mask=mask, cache=cache)
        save_cache(path, model, cache, ids)
        loaded = state.new_cache()
        load_cache(path, model, loaded)
        for _ in range(3):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
            token = random_tokens(3, 1, seed=9)
            want = model(token, attention_mask=mask, cache=cache).logits
            assert torch.equal(model(token, attention_mask=mask, cache=loaded).logits, want)


@pytest.mark.parametrize("family", ["tiny", "gemma4_kvshared"])
def test_a_cache_is_loaded_to_where_the_model_is(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force_kernel(monkeypatch, "reference")
    model, path = tiny() if family == "tiny" else build(family), tmp_path / "cache.safetensors"
    written(model, path, "iso3", columns=212)
    token = random_tokens(1, 3, seed=9, vocab=256)

    def said(place: torch.device) -> Tensor:
        model.to(place)  # type: ignore[arg-type]
        model.tie_weights()
        with enabled(model, "iso3") as state, torch.no_grad():
            assert state is not None
            cache = state.new_cache()
            assert load_cache(path, model, cache).device.type == "cpu"
            logits = model(token.to(place), cache=cache).logits.cpu()
            assert cache.counters.packed_reads > 0
        return torch.as_tensor(logits)

    wanted = said(torch.device("cpu"))
    with elsewhere():
        torch.testing.assert_close(said(ELSEWHERE), wanted, rtol=1e-4, atol=1e-4)


def test_an_empty_cache_can_be_saved_and_loaded(tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    save_cache(path, model, empty(model, "iso3"), torch.zeros(1, 0, dtype=torch.long))
    loaded = empty(model, "iso3")
    assert load_cache(path, model, loaded).shape == (1, 0)
    assert loaded.get_seq_length() == 0


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ("iso3-strict,seed=1", r"layer 0 key: the file has seed=0, this cache uses 1"),
        ("iso3-strict,key_bits=4", r"layer 0 key: the file has bits=3, this cache uses 4"),
        ("iso3-strict,value_bits=2", r"layer 0 value: the file has bits=3, this cache uses 2"),
        ("iso3-strict,rotation=hadamard", r"the file has rotation='isoquant', this cache uses 'hadamard'"),
    ],
)
def test_rows_coded_otherwise_are_refused(kv: str, message: str, tmp_path: Path) -> None:
    model, path = tiny(head_dim=96), tmp_path / "cache.safetensors"
    written(model, path, "iso3-strict")
    cache = empty(model, kv)
    with pytest.raises(CacheFileError, match=message):
        load_cache(path, model, cache)
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0


def test_exact_rows_kept_by_another_rule_are_refused_or_read_right(tmp_path: Path) -> None:
    """Four sinks in the file, none in the cache: the slots of exact rows would shift."""
    model, path = tiny(), tmp_path / "cache.safetensors"
    written(model, path, "iso3")
    cache = empty(model, "iso3,sinks=0")
    with pytest.raises(CacheFileError, match=r"sinks"):
        load_cache(path, model, cache)


def test_another_model_of_equal_shape_is_refused(tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    written(model, path, "iso3")
    other = sharpen(tiny(), seed=2)
    ours, theirs = model_fingerprint(other), model_fingerprint(model)
    assert ours != theirs
    with pytest.raises(CacheFileError, match=rf"model is '{theirs}' in the file, '{ours}' here"):
        load_cache(path, other, empty(other, "iso3"))
    assert model_fingerprint(tiny()) == theirs  # the same weights are the same model, wherever they were loaded


def test_another_shape_is_refused(tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    written(model, path, "iso3")
    other = tiny(num_hidden_layers=3)
    with pytest.raises(CacheFileError, match="model is"):
        load_cache(path, other, empty(other, "iso3"))


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    written(model, path, "iso3")
    fingerprint = model_fingerprint(model)
    other = tiny().to(torch.bfloat16)
    rewritten(path, lambda header, _: header.update(model=model_fingerprint(other)))
    assert model_fingerprint(other) != fingerprint
    with pytest.raises(CacheFileError, match=r"dtype is 'torch.float32' in the file, 'torch.bfloat16' here"):
        load_cache(path, other, empty(other, "iso3"))


@pytest.mark.parametrize("other", [VERSION - 1, VERSION + 1])
def test_another_version_is_refused(other: int, tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    written(model, path, "iso3")
    rewritten(path, lambda header, _: header.update(version=other))
    with pytest.raises(CacheFileError, match=rf"version is {other} in the file, {VERSION} here"):
        load_cache(path, model, empty(model, "iso3"))


def test_a_rotation_that_this_version_draws_otherwise_is_refused(tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    written(model, path, "iso3")

    def change(header: dict[str, Any], _: dict[str, Tensor]) -> None:
        header["layers"][1]["fingerprints"][1] = "f" * 16

    rewritten(path, change)
    cache = empty(model, "iso3")
    with pytest.raises(CacheFileError, match=r"layer 1 value: .*fingerprint f{16}, this version computes"):
        load_cache(path, model, cache)
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)  # layer 0, which fitted, was given back


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 0.5, -1])
def test_a_cut_file_is_refused(keep: float, tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    written(model, path, "iso3")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if 0 < keep < 1 else int(keep)])
    cache = empty(model, "iso3")
    with pytest.raises(CacheFileError, match=r"cache\.safetensors: not a readable cache file"):
        load_cache(path, model, cache)
    assert cache.get_seq_length() == 0


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model = tiny()
    with pytest.raises(CacheFileError, match=r"absent\.safetensors: not a readable cache file"):
        load_cache(tmp_path / "absent.safetensors", model, empty(model, "iso3"))


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(2, 2)}, str(path))
    with pytest.raises(CacheFileError, match=r"format is None, wanted 'rotaryquant-kv'"):
        load_cache(path, model, empty(model, "iso3"))
    path.write_text("not a tensor in sight")
    with pytest.raises(CacheFileError, match="not a readable cache file"):
        load_cache(path, model, empty(model, "iso3"))


@pytest.mark.parametrize("name", ["0.rows.0.key.codes", "1.rows.0.value.scales", "token_ids"])
def test_a_missing_tensor_is_refused(name: str, tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    written(model, path, "iso3")

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    rewritten(path, change)
    cache = empty(model, "iso3")
    with pytest.raises(CacheFileError, match=r"incomplete|holds"):
        load_cache(path, model, cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["0.rows.0.key.codes", "1.rows.0.value.scales"])
def test_rows_that_were_cut_are_refused(name: str, tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    written(model, path, "iso3", columns=212)

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:, :-1].contiguous()

    rewritten(path, change)
    with pytest.raises(CacheFileError, match=r"rows\.0\..*holds \(159, .*header \(160, "):
        load_cache(path, model, empty(model, "iso3"))


def test_loading_into_a_used_cache_is_refused(tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    written(model, path, "iso3")
    with enabled(model, "iso3") as state, torch.no_grad():
        assert state is not None
        cache = state.new_cache()
        model(random_tokens(1, 5), cache=cache)
        with pytest.raises((ValueError, CacheFileError), match="empty"):
            load_cache(path, model, cache)
        assert cache.get_seq_length() == 5


def test_tokens_must_match_the_cache(tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    with enabled(model, "iso3") as state, torch.no_grad():
        assert state is not None
        cache = state.new_cache()
        ids = random_tokens(1, 20)
        model(ids, cache=cache)
        with pytest.raises(ValueError, match="token_ids has 19 columns, the cache holds 20"):
            save_cache(path, model, cache, ids[:, :-1])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = tiny(), tmp_path / "cache.safetensors"
    written(model, path, "iso3")
    before = path.read_bytes()

    def disk_full(tensors: dict[str, Tensor], name: str, metadata: dict[str, str]) -> None:
        pathlib.Path(name).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(cache_file, "save_file", disk_full)
    with pytest.raises(OSError, match="no space"):
        written(model, path, "iso3", columns=140)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_layer_without_a_written_form_is_refused_before_writing(tmp_path: Path) -> None:
    model, path = build("gemma4_moe"), tmp_path / "cache.safetensors"
    cache = empty(model, "iso3")
    cache.layers[0] = StaticCache(config=model.config, max_cache_len=8).layers[0]
    with pytest.raises(CacheFileError, match=r"layer 0: a Static\w+ has no written form"):
        save_cache(path, model, cache, torch.zeros(1, 0, dtype=torch.long))
    assert list(tmp_path.iterdir()) == []


def test_saving_does_not_disturb_the_cache(tmp_path: Path) -> None:
    model = tiny()
    ids = random_tokens(1, 200)
    outputs = []
    for save in (False, True):
        with enabled(model, "iso3") as state, torch.no_grad():
            assert state is not None
            cache = state.new_cache()
            with cache.prefill():
                model(ids, cache=cache)
            if save:
                save_cache(tmp_path / "cache.safetensors", model, cache, ids)
            outputs.append(model(ids[:, :3], cache=cache).logits)
    assert torch.equal(*outputs)
