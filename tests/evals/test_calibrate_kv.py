"""Sensitivities point at the layer that hurts, and what is enabled with them keeps each layer as they say."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rotaryquant import KVCacheConfig, enabled
from rotaryquant.config import parse_kv
from rotaryquant.errors import CacheFileError, CalibrationError, ConfigError, UnsupportedModelError
from rotaryquant.evals import calibrate_kv, fit_rows
from rotaryquant.evals.inputs import load_model
from rotaryquant.evals.windows import windows_of
from rotaryquant.formats.calibration import Calibration, read_calibration, write_calibration
from rotaryquant.formats.fit import balanced
from rotaryquant.integrations.transformers.cache_file import load_cache, save_cache
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.output_projection import output_projection
from rotaryquant.integrations.transformers.report import layer_bits
from rotaryquant.integrations.transformers.rope import even_positions
from rotaryquant.kv.accounting import bits_per_value
from rotaryquant.kv.footprint import Footprint
from support.commands import Run
from support.models import random_tokens, relative_error
from support.progress import Told
from support.tiny_llm import save_tiny
from support.zoo import PACKABLE, build

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 30
IDS = random_tokens(1, 300, vocab=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load_model(str(folder), "float32", 1)


def measured(loaded: Loaded, kv: str = "iso3,mean=off", context: int = 600) -> Calibration:
    config = parse_kv(kv)
    assert config is not None
    return calibrate_kv.measure(
        loaded,
        config,
        TEXT,
        context=context,
        tokens=200,
        command="test",
        any_baseline=True,
        progress=lambda *_: None,
    )


@pytest.fixture(scope="module")
def side(loaded: Loaded, folder: Path) -> Path:
    write_calibration(folder / "side.safetensors", measured(loaded))
    return folder / "side.safetensors"


def config_of(side: Path, options: str = "") -> KVCacheConfig:
    config = parse_kv(f"iso3,calibration={side}{options}")
    assert config is not None
    return config


def test_each_stream_is_measured_alone(loaded: Loaded) -> None:
    """A layer whose output is nothing costs nothing; the others cost something, and values are not keys."""
    model = copy.deepcopy(loaded.model)
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    found = measured(Loaded(loaded.name, loaded.folder, model, loaded.tokenizer))
    assert [layer.index for layer in found.layers] == list(range(len(model.model.layers)))
    first, *others = [
        [*layer.keys.plain, *layer.keys.fitted, *layer.values.plain, *layer.values.fitted] for layer in found.layers
    ]
    assert 0.0 <= min(first) <= max(first) < 1e-7
    for costs in others:
        assert min(costs) > 1e-7
        assert len(set(costs)) == 8  # keys and values, plain and fitted, 2 and 3 bits
        assert all(three < two for two, three in zip(costs[::2], costs[1::2], strict=True))
    assert found.tokens == 299
    assert found.probe_bits == (2, 3)


def test_keys_that_no_query_reads_cost_nothing_and_their_values_do(loaded: Loaded) -> None:
    """Queries of zero weigh all keys alike, whatever these are: a swap of the two streams would be seen."""
    model = copy.deepcopy(loaded.model)
    model.model.layers[0].self_attn.q_proj.weight.data.zero_()
    found = measured(Loaded(loaded.name, loaded.folder, model, loaded.tokenizer), "iso3,mean=off,correct=0")
    assert found.layers[0].values.plain[0] > 10 * found.layers[0].keys.plain[0]


def test_a_prefix_that_packs_nothing_is_refused(loaded: Loaded) -> None:
    with pytest.raises(ConfigError, match="context=510: its first half must hold 256"):
        measured(loaded, context=510)


def test_layers_are_kept_as_the_file_says(loaded: Loaded, side: Path) -> None:
    config = config_of(side, ",budget=2.75")
    assert config.allocation is not None
    assert len({width for x in config.allocation.layers for width in (x.key_bits, x.value_bits)}) > 1
    with enabled(loaded.model, config) as state, torch.inference_mode():
        assert state is not None
        before = state.report()
        cache = state.new_cache()
        with cache.prefill():
            loaded.model(IDS, cache=cache)
        for widths, layer, told in zip(config.allocation.layers, cache.packed_layers(), before.packed, strict=True):
            assert layer.keys is not None
            assert layer.values is not None
            assert (layer.keys.format.bits, layer.values.format.bits) == (widths.key_bits, widths.value_bits)
            assert (told.key_bits, told.value_bits) == (widths.key_bits, widths.value_bits)
        counted = bits_per_value(layer_bits(cache), 100_000)
    width = state.geometry[0].head_dim
    assert counted == pytest.approx(config.allocation.mean_bits + 16 / width, abs=0.03)
    stored = Footprint(state.geometry, config).stored_bytes(100_000)
    values = sum(2 * layer.num_kv_heads * layer.head_dim for layer in state.geometry) * 100_000
    assert 8 * stored / values == pytest.approx(counted, abs=1e-3)


def test_without_a_budget_it_costs_what_the_preset_costs(side: Path) -> None:
    made, more = config_of(side), config_of(side, ",key_bits=4")
    assert made.allocation is not None
    assert more.allocation is not None
    assert 2.9 <= made.allocation.mean_bits <= 3.0
    assert 3.3 <= more.allocation.mean_bits <= 3.5


def test_a_report_does_not_name_folders(side: Path) -> None:
    assert config_of(side).name == "iso3,calibration=side.safetensors"


def test_another_checkpoint_is_refused_and_another_dtype_is_not(loaded: Loaded, folder: Path, side: Path) -> None:
    with enabled(load_model(str(folder), "bfloat16", 1).model, config_of(side)) as state:
        assert state is not None
    other = copy.deepcopy(loaded.model)
    other.model.layers[1].self_attn.k_proj.weight.data.mul_(2.0)
    with (
        pytest.raises(CalibrationError, match="calibrated for a checkpoint with fingerprint"),
        enabled(other, config_of(side)),
    ):
        pass


def test_a_saved_cache_comes_back(loaded: Loaded, side: Path, tmp_path: Path) -> None:
    config = config_of(side, ",budget=2.5")
    with enabled(loaded.model, config) as state, torch.inference_mode():
        assert state is not None
        cache = state.new_cache()
        with cache.prefill():
            loaded.model(IDS[:, :-1], cache=cache)
        save_cache(tmp_path / "kv", loaded.model, cache, IDS[:, :-1])
        again = state.new_cache()
        load_cache(tmp_path / "kv", loaded.model, again)
        want, got = (loaded.model(IDS[:, -1:], cache=c).logits for c in (cache, again))
    assert torch.equal(got, want)
    with enabled(loaded.model, config_of(side, ",budget=2.5,fit=off")) as state:
        assert state is not None
        with pytest.raises(CacheFileError, match="enable the model with the file's --kv"):
            load_cache(tmp_path / "kv", loaded.model, state.new_cache())


def test_a_cache_says_that_its_rows_are_fitted(loaded: Loaded, side: Path) -> None:
    for options, said in (("", "(isoquant, fitted)"), (",fit=off", "(isoquant)")):
        with enabled(loaded.model, config_of(side, options)) as state:
            assert state is not None
            assert state.report().summary().endswith(said)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (",budget=9", "between 2 and 8"),
        (",budget=three", "wanted bits a value"),
        (",fit=maybe", "wanted on or off"),
        (",calibration=b", "given twice"),
    ],
)
def test_wrong_options_are_named(options: str, says: str, side: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        config_of(side, options)


def test_bits_by_layer_belong_to_a_model(side: Path, run: Run) -> None:
    with pytest.raises(ConfigError, match="every layer has bits of its own"):
        config_of(side).stream_formats(64, 64)
    assert config_of(side).of_layer(0).allocation is None
    with pytest.raises(ConfigError, match="layer 7 was not calibrated"):
        config_of(side).of_layer(7)
    status, _, err = run("bench", "attention", "--kv", f"iso3,calibration={side}", "--lengths", "512")
    assert status == 2
    assert "this needs a whole model" in err


def test_the_text_it_was_calibrated_on_is_not_scored(folder: Path, side: Path, run: Run) -> None:
    (folder / "other.txt").write_text(TEXT + "Another end.")
    words = ["--kv", f"iso3,calibration={side}", "--context", "600", "--tokens", "200", "--any-baseline"]
    status, _, err = run("eval", "fidelity", str(folder), "--text", str(folder / "text.txt"), *words)
    assert status == 2
    assert "calibrated on the text that is scored" in err
    assert run("eval", "fidelity", str(folder), "--text", str(folder / "other.txt"), *words)[0] == 0


@pytest.mark.parametrize("option", ["budget=3", "fit=on"])
def test_what_a_calibration_does_needs_a_file(option: str) -> None:
    with pytest.raises(ConfigError, match="add calibration=FILE"):
        parse_kv(f"iso3,{option}")


def gathered(model: Any, index: int, ids: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries [heads, rows, width], keys and values that a layer sees of a window, fp64; four first rows left out."""
    seen: list[torch.Tensor] = []
    with enabled(model, KVCacheConfig(tail=1 << 20, protect=False)) as state, torch.inference_mode():
        assert state is not None
        cache = state.new_cache()
        layer = cache.packed_layer(index)
        assert layer is not None
        layer.observe = lambda queries, scale: seen.append(queries)  # type: ignore[method-assign]
        model(ids[None], cache=cache, position_ids=places[None])
        keys, values = layer.dense.staged()
    queries = seen[0][0].double().unflatten(0, (keys.shape[1], -1)).flatten(1, 2)
    return queries, keys[0, :, 4:].double(), values[0, :, 4:].double()


def test_fits_are_of_rows_and_queries_at_all_positions(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against moments gathered by hand; of values, the metric is that of the output projection."""
    monkeypatch.setattr(fit_rows, "_READINGS", 3)
    found = measured(loaded).layers[1]
    heads, width = found.num_kv_heads, found.width
    ids, _ = windows_of(loaded, TEXT, 600, 200)
    parts = [gathered(loaded.model, 1, ids[0], torch.arange(600) + place) for place in (0, 212, 424)]
    queries, keys, values = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    projected = loaded.model.model.layers[1].self_attn.o_proj.weight.detach().double().unflatten(1, (heads, -1, width))
    for stream, metric_of in (
        (found.keys, queries),
        (found.values, projected.permute(1, 0, 2, 3).flatten(1, 2)),
    ):
        moment = metric_of.mT @ metric_of
        moment /= moment.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
        metric = torch.from_numpy(stream.fit.metric).double()
        assert torch.allclose(metric, moment, atol=2e-3 * float(moment.abs().max()))
    assert torch.allclose(torch.from_numpy(found.keys.fit.mean).double(), keys.mean(1), atol=1e-5)
    assert not found.values.fit.mean.any()
    around = keys - keys.mean(1, keepdim=True)
    for stream, rows in ((found.keys, around), (found.values, values)):
        moment = (rows.mT @ rows / rows.shape[1]).numpy()
        assert np.allclose(stream.fit.balance, balanced(stream.fit.metric, moment), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", PACKABLE)
def test_every_family_is_heard_at_late_positions(name: str) -> None:
    """And reads there what it reads at the first ones: a fit is of keys as a long context has them."""
    model, ids = build(name), random_tokens(1, 40, vocab=200)
    places, last = torch.arange(40)[None], even_positions(model) - 40
    assert last > 400
    with torch.inference_mode():
        first, late = (model(ids, position_ids=places + begin).logits for begin in (0, last))
    assert relative_error(late, first) < 2e-3
    still = KVCacheConfig(tail=1 << 20, protect=False)
    with enabled(model, still) as state:
        assert state is not None
        layers = [layer for layer in state.geometry if layer.packable]
        heard = fit_rows._listen(Loaded(name, Path(), model, None), still, [ids[0]], Told())
    assert sorted(heard) == [layer.index for layer in layers]
    for layer in layers:
        mean, around = heard[layer.index].keys.around_mean()
        assert mean.shape == (layer.num_kv_heads, layer.head_dim)
        assert float(around.diagonal(dim1=1, dim2=2).min()) >= 0.0


def test_rows_are_coded_as_fits_them_where_that_helps(loaded: Loaded, side: Path, tmp_path: Path) -> None:
    """Keys of the first layer cost less with their fit, its values without: they are coded so."""
    made = read_calibration(side)
    cheap, dear = (1e-3, 1e-4), (2e-3, 2e-4)
    first = dataclasses.replace(
        made.layers[0],
        keys=dataclasses.replace(made.layers[0].keys, plain=dear, fitted=cheap),
        values=dataclasses.replace(made.layers[0].values, plain=cheap, fitted=dear),
    )
    write_calibration(tmp_path / "side", dataclasses.replace(made, layers=(first, *made.layers[1:])))
    on, off = config_of(tmp_path / "side"), config_of(tmp_path / "side", ",fit=off")
    assert on != off
    assert on == config_of(tmp_path / "side")
    codes = []
    for config in (on, off):
        with enabled(loaded.model, config) as state, torch.inference_mode():
            assert state is not None
            cache = state.new_cache()
            with cache.prefill():
                loaded.model(IDS, cache=cache)
            layer = cache.packed_layer(0)
            assert layer is not None
            assert layer.keys is not None
            assert layer.values is not None
            assert (layer.keys.packed.codec.feedback is not None) == (config is on)
            assert (layer.keys.reading is not layer.keys.rotation) == (config is on)
            assert layer.values.reading is layer.values.rotation
            assert (layer.keys.error_gain < 1.0) == (config is on)
            assert layer.values.packed.codec.feedback is None
            codes.append(layer.keys.packed.codes[0].clone())
    assert not torch.equal(*codes)


def test_a_layer_without_a_known_projection_is_refused(loaded: Loaded) -> None:
    model = copy.deepcopy(loaded.model)
    attention = model.model.layers[1].self_attn
    attention.unknown, attention.o_proj = attention.o_proj, torch.nn.Identity()
    with pytest.raises(UnsupportedModelError, match="layer 1: its attention ends in no linear layer"):
        output_projection(model, 1)
    assert output_projection(loaded.model, 1) is loaded.model.model.layers[1].self_attn.o_proj.weight


def test_the_command_writes_a_file_that_works(folder: Path, run: Run, tmp_path: Path) -> None:
    target = tmp_path / "side.safetensors"
    words = ["calibrate", str(folder), "--text", str(folder / "text.txt"), "--context", "600", "--tokens", "200"]
    assert run(*words, "-o", str(target))[0] == 2  # random weights: the text cannot fit them
    assert not target.exists()
    words.append("--any-baseline")
    status, out, err = run(*words, "--threads", "1", "-o", str(target), "--json")
    assert status == 0, err
    data = json.loads(out)
    assert [row["budget"] for row in data["allocations"]] == [2.5, 3.0, 4.0]
    assert "about 0 s left" in err
    made = read_calibration(target)
    assert str(tmp_path) not in made.command
    assert made.command.startswith(f"rotaryquant calibrate {folder.name}")
    status, out, err = run(*words, "--threads", "1", "-o", str(target))
    assert status == 0, err
    assert f"--kv iso3,calibration={target}" in out
    status, out, err = run(
        "generate", str(folder), "--prompt", "The quick", "--max-tokens", "5", "--kv", f"iso3,calibration={target}"
    )
    assert status == 0, err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--kv", "fp16"], "wanted a packed cache"),
        (["--tokens", "0"], "--tokens=0"),
        (["-o", "/nowhere/at/all"], "in a folder that exists"),
        (["--text", "/nowhere"], "cannot be read"),
    ],
)
def test_wrong_words_are_one_line(folder: Path, run: Run, tmp_path: Path, more: list[str], says: str) -> None:
    words = ["calibrate", str(folder), "--text", str(folder / "text.txt"), "-o", str(tmp_path / "side")]
    status, _, err = run(*words, *more)
    assert status == 2
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "side").exists()


def test_fits_alone_give_every_layer_the_bits_of_the_preset(folder: Path, run: Run, tmp_path: Path) -> None:
    """A file without probes: as good for every preset, and clear about what it cannot do."""
    target = tmp_path / "fits.safetensors"
    words = ["calibrate", str(folder), "--text", str(folder / "text.txt"), "--context", "600", "--tokens", "200"]
    words.append("--any-baseline")
    status, out, err = run(*words, "--threads", "1", "--fits-only", "-o", str(target))
    assert status == 0, err
    assert "no layer was probed" in out
    assert "probes, about" not in err
    made = read_calibration(target)
    assert (made.probe_bits, made.tokens) == ((), 0)
    assert made.layers[1].keys.fit.mean.any()
    for options, fitted in (("", True), (",fit=off", False)):
        allocation = config_of(target, f",key_bits=4{options}").allocation
        assert allocation is not None
        assert (allocation.mean_bits, allocation.expected) == (3.5, None)
        for layer in allocation.layers:
            assert (layer.key_bits, layer.value_bits) == (4, 3)
            assert (layer.key_fit is not None) is (layer.value_fit is not None) is fitted
    eight = config_of(target, ",key_bits=8").allocation
    assert eight is not None
    assert eight.layers[0].key_fit is None
    with pytest.raises(ConfigError, match="budget=3: the calibration has fits alone"):
        config_of(target, ",budget=3")
    loaded = load_model(str(folder), "float32", 1)
    with enabled(loaded.model, config_of(target)) as state, torch.inference_mode():
        assert state is not None
        cache = state.new_cache()
        with cache.prefill():
            loaded.model(IDS, cache=cache)
        first = cache.packed_layer(0)
        assert first is not None
        assert first.keys is not None
        assert first.keys.format.mean == "model"
    status, out, err = run(*words, "--threads", "1", "--fits-only", "-o", str(target), "--json")
    assert status == 0, err
    assert json.loads(out)["allocations"] == []


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "default"}, 1024),
        ({"rope_type": "dynamic", "original_max_position_embeddings": 256}, 256),
        ({"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 512}}, 512),
        ({"rope_type": "dynamic"}, 1024),
    ],
)
def test_positions_where_angles_would_change_are_left_out(loaded: Loaded, rope: dict[str, Any], positions: int) -> None:
    model = copy.deepcopy(loaded.model)
    model.config.rope_parameters = rope
    assert even_positions(model) == positions
