"""Peers run through our cache: what they store, what they lose, and that nothing else differs."""

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rotaryquant import enabled, parse_kv
from rotaryquant.allocation import allocate
from rotaryquant.errors import ConfigError, NonFiniteError
from rotaryquant.evals import facts as facts_of_text
from rotaryquant.evals import fidelity
from rotaryquant.evals.facts import CONTEXT, before_rope, calibrated, collect, gradients_at
from rotaryquant.evals.peers import kvarn, kvquant, oscar, parse_spec, peers, spinquant, trellis, vllm
from rotaryquant.evals.peers.rounding import nearest, ranged, unit_rows
from rotaryquant.evals.simulated import Facts, Peer, Place, Simulation
from rotaryquant.evals.teacher_forcing import packed_chunks, stock_chunks
from rotaryquant.evals.windows import windows_of
from rotaryquant.formats.calibration import (
    Calibration,
    LayerSensitivity,
    StreamCost,
    read_calibration,
    write_calibration,
)
from rotaryquant.formats.codebook import lloyd_max
from rotaryquant.formats.fit import Fit
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.fingerprint import checkpoint_fingerprint
from rotaryquant.integrations.transformers.geometry import read_geometry
from rotaryquant.integrations.transformers.undo_rope import key_ropes
from support.models import random_tokens, tiny
from support.progress import Told
from support.tiny_llm import byte_tokenizer

#: Stored bits of a key and a value at width 64, by hand from each description.
BITS = {
    "int2": (2.5, 2.5),
    "int3": (3.5, 3.5),
    "int4": (4.5, 4.5),
    "int8": (8.5, 8.5),
    "kivi2": (3.0, 3.0),
    "kivi4": (5.0, 5.0),
    "quarot3": (3.5, 3.5),
    "quarot4": (4.5, 4.5),
    "turbo3-qjl": (3.5, 3.25),
    "vllm3": (3.25, 3.5),
    "kvarn-k4v2": (4.875, 2.875),
    "oscar2": (2.5, 2.5),
    "vq3": (3.25, 3.25),
    "tcq3": (3.25, 3.25),
    # 128 keys of a token with 1% outliers expected and a pointer to them; one outlier at either end of its values
    "kvquant3": (3 + 0.01 * 32 + 32 / 128, 3 + 2 * 32 / 128 + 32 / 128),
    "spinquant3": (3.5, 3.5),
}


def _facts(width: int) -> Facts:
    """Of layers whose queries and values favor some directions."""
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(2, width, width, generator=generator) * torch.logspace(0, -2, width)[:, None]
    moment = mixed.transpose(-1, -2) @ mixed
    return Facts(normal_rows(256, width), normal_rows(256, width), moment, moment)


def place(width: int = 64) -> Place:
    return Place(index=5, count=12, num_kv_heads=2, width=width, facts=_facts(width))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny(max_position_embeddings=2048, num_hidden_layers=6)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return random_tokens(1, 700)[0]


def scores(model: Any, ids: Tensor, simulation: Any) -> dict[str, Any]:
    loaded = Loaded("tiny", Path(), model, byte_tokenizer())
    exact, found = fidelity.measure(loaded, {"it": simulation}, [ids])
    return fidelity.result_of(found["it"], exact, [len(ids) - 1 - len(ids) // 2])


def normal_rows(rows: int = 256, width: int = 64, heads: int = 2) -> Tensor:
    return torch.randn(heads, rows, width, generator=torch.Generator().manual_seed(7))


def relative(rebuilt: Tensor, rows: Tensor) -> float:
    return float((rebuilt - rows).square().mean() / rows.square().mean())


class _Exact:
    key_bits = value_bits = 16.0

    def keys(self, rows: Tensor) -> Tensor:
        return rows

    values = keys


class _Nothing(_Exact):
    def keys(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows)

    values = keys


class _Broken(_Exact):
    def values(self, rows: Tensor) -> Tensor:
        return rows / 0.0


def simulation(codec: Any, **config: int) -> Simulation:
    made = parse_spec("int8," + ",".join(f"{key}={value}" for key, value in config.items()))
    assert isinstance(made, Simulation)
    return Simulation(Peer("test", "nowhere", "a test", lambda place: codec()), made.config)


@pytest.mark.parametrize("name", list(BITS))
def test_stored_bits_are_those_of_the_description(name: str) -> None:
    codec = peers()[name].make(place())
    assert (codec.key_bits, codec.value_bits) == BITS[name]


def test_every_peer_is_checked_here() -> None:
    assert set(peers()) == set(BITS)


@pytest.mark.parametrize("config", [{"sinks": 4, "tail": 48}, {"sinks": 0, "tail": 0}, {"sinks": 4, "tail": 0}])
def test_a_codec_that_loses_nothing_changes_nothing(model: Any, ids: Tensor, config: dict[str, int]) -> None:
    row = scores(model, ids, simulation(_Exact, **config))
    assert row["kld_mean"] < 1e-7
    assert row["packed_reads"] > 0  # and their number was checked at every position
    assert row["bits_per_value"] >= 16.0


def test_a_codec_that_loses_everything_is_seen(model: Any, ids: Tensor) -> None:
    lost = scores(model, ids, simulation(_Nothing, sinks=0, tail=0))
    kept = scores(model, ids, parse_spec("int8"))
    assert lost["kld_mean"] > 100 * kept["kld_mean"]
    assert kept["bits_per_value"] == pytest.approx(8.5)


def test_rows_that_are_not_numbers_are_refused(model: Any, ids: Tensor) -> None:
    with pytest.raises(NonFiniteError, match=r"test rebuilds values as NaN"):
        scores(model, ids, simulation(_Broken, sinks=4, tail=48))


@pytest.mark.parametrize("name", ["int4", "kivi2", "quarot3", "turbo3-qjl", "kvarn-k4v2", "vq3"])
def test_every_peer_goes_through_the_cache(model: Any, ids: Tensor, name: str) -> None:
    row = scores(model, ids, parse_spec(f"{name},sinks=4,tail=48"))
    lost = scores(model, ids, simulation(_Nothing, sinks=4, tail=48))
    assert 1e-6 < row["kld_mean"] < 0.5 * lost["kld_mean"]
    assert row["in_force"].startswith(f"kv={name},sinks=4,tail=48: 6 layers as ")
    key, value = BITS[name]
    exact = 48 + 16.5
    mean = ((key + value) / 2 * (700 - exact) + peers()[name].exact_bits * (exact + 4)) / 700
    assert row["bits_per_value"] == pytest.approx(mean, rel=1e-9)


def test_sinks_and_tail_stay_as_they_are(model: Any, ids: Tensor) -> None:
    """Only what ours would have packed is replaced; what is read is what was measured."""
    wanted = simulation(_Nothing, sinks=4, tail=48)
    with enabled(model, wanted.config) as state:
        assert state is not None
        cache = wanted.new_cache(state)
        for _ in packed_chunks(model, cache, ids[:420], 300):
            pass
        for layer in cache.packed_layers():
            packed = layer.rows[0].packed_len
            assert packed == (418 - 48) // 32 * 32
            for rows in layer.dense.staged():
                zero = (rows[0] == 0).all(-1).all(0)
                assert zero[4:packed].all()
                assert not zero[:4].any()
                assert not zero[packed:].any()


def test_nothing_but_the_codec_differs(model: Any, ids: Tensor) -> None:
    """The logits of a lossless codec are those of transformers' own cache."""
    wanted = simulation(_Exact, sinks=4, tail=48)
    with enabled(model, wanted.config) as state:
        assert state is not None
        ours = torch.cat([chunk.logits for chunk in packed_chunks(model, wanted.new_cache(state), ids, 350)])
    stock = torch.cat([chunk.logits for chunk in stock_chunks(model, ids, 350)])
    assert float((ours - stock).abs().max()) < 1e-4 * float(stock.abs().max())


# ---- what each does ----------------------------------------------------------------------------------------------


def test_errors_on_normal_rows_are_those_of_their_codes() -> None:
    """Lloyd-Max at 3 bits errs by .0345 of the energy; pairs and trellises are what their papers promise beside it."""
    rows = normal_rows(512, 128)
    error = {name: relative(peers()[name].make(place(128)).values(rows), rows) for name in BITS}
    assert error["turbo3-qjl"] == pytest.approx(0.0335, rel=0.05)
    assert error["vq3"] == pytest.approx(0.0335 * 0.87, rel=0.06)
    assert error["tcq3"] < 0.0335 * 0.66
    assert error["int8"] < 1e-4 < error["int4"] < error["int3"] < error["int2"]
    assert error["quarot4"] < error["quarot3"]
    assert error["kivi4"] < error["kivi2"]


def test_keys_per_channel_survive_a_channel_that_dominates() -> None:
    rows = normal_rows()
    rows[..., 3] += 500.0
    small = torch.arange(64) != 3
    error = {}
    for name in ("kivi2", "int2"):
        rebuilt = peers()[name].make(place()).keys(rows)
        error[name] = relative(rebuilt[..., small], rows[..., small])
    assert error["kivi2"] < 0.2 < error["int2"]


def test_products_with_a_signed_residual_are_unbiased() -> None:
    rows, queries = normal_rows(4000), normal_rows(1)
    wanted = (rows @ queries.transpose(-1, -2)).flatten()
    rebuilt = peers()["turbo3-qjl"].make(place()).keys(rows)
    got = (rebuilt @ queries.transpose(-1, -2)).flatten()
    slope = float((got * wanted).sum() / wanted.square().sum())
    plain, scale = unit_rows(rows)
    plain = nearest(plain, torch.tensor(lloyd_max(64, 2)).float()) * scale
    shrunk = float(((plain @ queries.transpose(-1, -2)).flatten() * wanted).sum() / wanted.square().sum())
    assert abs(slope - 1) < 0.02 < abs(shrunk - 1)


def test_first_and_last_layers_are_left_alone() -> None:
    kinds = [type(peers()["vllm3"].make(Place(index, 6, 2, 64))) for index in range(6)]
    assert [kind is vllm._Exact for kind in kinds] == [True, True, False, False, True, True]


def test_the_encoder_finds_the_best_path() -> None:
    """Against every path there is: windows of three bits, one new bit a coordinate."""
    generator = torch.Generator().manual_seed(1)
    values, rows = torch.randn(8, generator=generator), torch.randn(20, 7, generator=generator)
    states = trellis.best_path(rows, values, 1)
    assert bool((states[:, 1:] >> 1 == states[:, :-1] & 3).all())
    assert bool((states[:, 0] < 2).all())
    found = (values[states] - rows).square().sum(1)
    best = torch.full((20,), math.inf)
    for symbols in itertools.product((0, 1), repeat=7):
        state, total = 0, torch.zeros(20)
        for column, symbol in enumerate(symbols):
            state = (state << 1 | symbol) & 7
            total = total + (rows[:, column] - values[state]).square()
        best = torch.minimum(best, total)
    assert torch.allclose(found, best, rtol=1e-5)


def test_rows_are_encoded_alike_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held at a time decides how many rows and coordinates go together, and nothing else."""
    rows, values = normal_rows(40)[0], trellis.trellis_values(3)
    together = trellis.best_path(rows, values, 3)
    for held in (1, 3 * len(values), 40 * 5 * len(values)):
        monkeypatch.setattr(trellis, "_HELD_ON_CPU", held)
        assert torch.equal(trellis.best_path(rows, values, 3), together)
    assert trellis.best_path(rows[:0], values, 3).shape == (0, 64)


def test_a_balanced_tile_varies_alike_along_both_axes() -> None:
    tile = normal_rows(128) * torch.logspace(-2, 2, 64) * torch.logspace(-1, 1, 128)[:, None]
    rows, columns = kvarn.balance(tile)
    for dim in (-1, -2):
        sizes = (tile / (rows * columns)).square().mean(dim).sqrt()
        assert float((sizes - 1).abs().max()) < 0.02


def test_uniform_codes_err_by_half_a_step() -> None:
    rows = normal_rows()
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    assert bool(((ranged(rows, 4, 64) - rows).abs() <= (high - low) / 15 * 0.52).all())
    constant = torch.full((1, 2, 64), 3.0)
    assert torch.equal(ranged(constant, 2, 64), constant)


def test_calibrated_rotations_save_what_queries_ask_for() -> None:
    """Errors land where no query looks: products err less than with a rotation that knows nothing."""
    here = place()
    assert here.facts is not None
    for turn in (oscar.rotation_of(here.facts.query_moment), oscar.rotation_of(here.facts.value_moment)):
        assert torch.allclose(turn @ turn.transpose(-1, -2), torch.eye(64).expand(2, -1, -1), atol=1e-5)
    rows = normal_rows() * torch.logspace(0, 1, 64)
    error = {name: peers()[name].make(here).keys(rows) - rows for name in ("oscar2", "quarot3")}
    assert oscar.bit_reversed(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    moment = here.facts.query_moment
    felt = {name: float(((e @ moment) * e).sum()) for name, e in error.items()}
    plain = ranged(rows, 2, 64) - rows
    assert felt["oscar2"] < 0.8 * float(((plain @ moment) * plain).sum())


def test_facts_are_what_a_cache_and_its_queries_see(model: Any) -> None:
    """Against transformers' own cache and attention, from a model that gives its weights away."""
    loaded = Loaded("tiny", Path(), model, byte_tokenizer())
    text = "The quick brown fox jumps over the lazy dog, again and again. " * 60
    facts = collect(loaded, text, 1024)
    windows, _ = windows_of(loaded, text, 1024, 511)
    cache = DynamicCache(config=model.config)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = model(windows[0][None], cache=cache, output_attentions=True)
    model.set_attn_implementation(before)
    assert set(facts) == set(range(6))
    for layer in (0, 3):
        held, found = cache.layers[layer], facts[layer]
        assert torch.allclose(found.keys, held.keys[0], atol=1e-4)
        assert torch.allclose(found.values, held.values[0], atol=1e-4)
        weights = out.attentions[layer][0].view(2, 2, 1024, 1024).square().sum((1, 2))
        wanted = torch.einsum("ht,hti,htj->hij", weights, held.values[0], held.values[0]) / 1024
        assert torch.allclose(found.value_moment, wanted, rtol=1e-3, atol=1e-5)
        assert torch.allclose(found.query_moment, found.query_moment.transpose(-1, -2), rtol=1e-4)
        assert bool((torch.linalg.eigvalsh(found.query_moment) > -1e-4).all())


# ---- keys before RoPE, gradients, learned rotations ---------------------------------------------------------------


TEXT = "The quick brown fox jumps over the lazy dog, again and again. "


def test_a_codec_of_keys_before_rope_gets_and_gives_those(model: Any, ids: Tensor, monkeypatch: Any) -> None:
    """What the model turned by RoPE is what the codec sees, at every position; turned again, nothing is lost."""
    seen: dict[int, list[Tensor]] = {}

    class Listening(_Exact):
        def __init__(self, layer: int) -> None:
            self.layer = layer

        def keys(self, rows: Tensor) -> Tensor:
            seen.setdefault(self.layer, []).append(rows.clone())
            return rows

    ropes = key_ropes(model, read_geometry(model.config))
    peer = Peer("test", "nowhere", "a test", lambda place: Listening(place.index), calibrated=True, before_rope=True)
    wanted = Simulation(peer, simulation(_Exact, sinks=4, tail=48).config, facts={}, ropes=ropes)
    assert scores(model, ids, wanted)["kld_mean"] < 1e-7

    module, plain = sys.modules[type(model).__module__], []
    turn = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *rest: (plain.append(k[0]), turn(q, k, *rest))[1])
    with torch.inference_mode():
        model(ids[None])
    for layer, parts in seen.items():
        rows = torch.cat(parts, 1)
        assert rows.shape[1] > 600
        assert torch.allclose(rows, plain[layer][:, : rows.shape[1]], atol=1e-4)
    assert not torch.allclose(seen[2][0], wanted.ropes[2].redo(seen[2][0], torch.arange(seen[2][0].shape[1])), atol=0.1)


def test_gradients_are_those_of_the_loss(model: Any) -> None:
    """Against the change of the loss that comes with a change of one key, or of one value."""
    loaded = Loaded("tiny", Path(), model, byte_tokenizer())
    found = gradients_at(loaded, TEXT * 60, CONTEXT)
    window = windows_of(loaded, TEXT * 60, CONTEXT, 511)[0][0]
    assert set(found) == set(range(6))
    for layer, which in ((1, 0), (4, 1)):
        gradient = found[layer][which]
        assert gradient.shape == (2, CONTEXT, 64)
        head, token, column = (int(i) for i in torch.unravel_index(gradient.abs().argmax(), gradient.shape))
        losses = []
        for step in (3e-3, -3e-3):
            cache = DynamicCache(config=model.config)
            cache.layers[layer] = _nudged(which, head, token, column, step)
            with torch.inference_mode():
                logits = model(window[None, :-1], cache=cache).logits[0].double()
            losses.append(float(torch.nn.functional.cross_entropy(logits, window[1:])))
        assert float(gradient[head, token, column]) == pytest.approx((losses[0] - losses[1]) / 6e-3, rel=0.03)


def _nudged(which: int, head: int, token: int, column: int, step: float) -> DynamicLayer:
    """A layer one of whose keys (0) or values (1) comes back larger by `step`."""

    class Nudged(DynamicLayer):
        def update(self, *rows: Tensor, **kwargs: Any) -> Any:
            held = super().update(*rows, **kwargs)
            held[which][0, head, token, column] += step
            return held

    return Nudged()


def test_facts_before_rope_lack_the_tokens_that_stay_exact(model: Any) -> None:
    loaded = Loaded("tiny", Path(), model, byte_tokenizer())
    ropes = key_ropes(model, read_geometry(model.config))
    facts = collect(loaded, TEXT * 60, 2 * CONTEXT)[3]
    slopes = gradients_at(loaded, TEXT * 60, CONTEXT)[3]
    early = before_rope(facts, slopes, ropes[3], 2)
    assert early.keys.shape == early.values.shape == (2, 2 * (CONTEXT - 2), 64)
    assert early.value_weights is not None
    assert early.value_weights.shape == (2, 2 * (CONTEXT - 2))
    positions = torch.arange(2, CONTEXT)
    again = ropes[3].redo(early.keys[:, CONTEXT - 2 :], positions)
    assert torch.allclose(again, facts.keys[:, CONTEXT + 2 :], atol=1e-4)
    assert torch.equal(early.values[:, : CONTEXT - 2], facts.values[:, 2:CONTEXT])
    assert early.key_sensitivity is not None
    assert early.value_sensitivity is not None
    # a rotation leaves the gradient's length
    assert torch.allclose(early.key_sensitivity.sum(-1), slopes[0][:, 2:].square().sum(-1), rtol=1e-3)
    assert torch.equal(early.value_sensitivity, slopes[1][:, 2:].square())


@pytest.mark.parametrize("name", ["kvquant3", "spinquant3"])
def test_a_calibrated_peer_goes_from_a_text_through_the_cache(
    model: Any, ids: Tensor, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts_of_text, "CALIBRATION_TOKENS", 2 * CONTEXT)
    monkeypatch.setattr(facts_of_text, "SENSITIVE_TOKENS", CONTEXT)
    (tmp_path / "text.txt").write_text(TEXT * 60)
    loaded, said = Loaded("tiny", Path(), model, byte_tokenizer()), Told()
    spec = parse_spec(f"{name},sinks=4,tail=48")
    told = calibrated(loaded, {"it": spec, "fp16": None}, str(tmp_path / "text.txt"), "another", said)
    assert told["fp16"] is None
    assert said.messages[0] == "calibration on 2,048 tokens of text.txt"
    row, lost = scores(model, ids, told["it"]), scores(model, ids, simulation(_Nothing, sinks=4, tail=48))
    assert 1e-6 < row["kld_mean"] < 0.2 * lost["kld_mean"]
    with pytest.raises(ConfigError, match=r"is calibrated on a text: use `eval fidelity --calibration FILE`"):
        scores(model, ids, spec)


def test_outliers_stay_and_are_counted_as_they_come() -> None:
    codec = peers()["kvquant3"].make(place())
    assert isinstance(codec, kvquant._Kvquant)
    rows = normal_rows()
    rows[1, 40, 7] = 500.0
    rows[0, 41, 9] = -500.0
    for code in (codec.keys, codec.values):
        rebuilt = code(rows)
        assert float(rebuilt[1, 40, 7]) == 500.0
        assert float(rebuilt[0, 41, 9]) == -500.0
        assert relative(rebuilt[:, :40], rows[:, :40]) < 0.06
    flat = rows.transpose(0, 1).flatten(1)
    middle, reach = codec._channels.middle, codec._channels.reach
    count = int(((flat - middle).abs() > reach).sum())
    assert codec.key_bits == pytest.approx(3 + 32 * count / flat.numel() + 32 / 128)
    assert count > 2
    same = codec.values(rows) == rows.half().float()
    assert bool((same.transpose(0, 1).flatten(1).sum(1) >= 2).all())  # one at either end of every token


def test_levels_fit_what_counts() -> None:
    """Every level is the weighted mean of what is nearest to it; weights of none are not seen."""
    generator = torch.Generator().manual_seed(5)
    values, weights = torch.randn(4000, generator=generator), torch.rand(4000, generator=generator)
    weights[values > 1.5] = 0.0
    levels = kvquant.fitted_levels(values, weights, 3)
    assert float(levels[-1]) < 1.5
    which = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)
    for number, level in enumerate(levels):
        own = which == number
        assert float((values * weights)[own].sum() / weights[own].sum()) == pytest.approx(float(level), abs=2e-3)
    exact = kvquant.fitted_levels(torch.tensor([-3.0, -3.0, 0.5, 2.0, 2.0, 7.0]), torch.ones(6), 2)
    assert exact.tolist() == [-3.0, 0.5, 2.0, 7.0]


def test_fitted_levels_err_as_lloyd_max_of_what_is_no_outlier() -> None:
    """Normal keys without 1% of them: the least error of eight levels for a normal distribution cut at 2.576."""
    grid = torch.linspace(-2.5758, 2.5758, 200_001, dtype=torch.float64)
    density = torch.exp(-grid.square() / 2)
    levels = torch.linspace(-2, 2, 8, dtype=torch.float64)
    for _ in range(500):
        which = torch.bucketize(grid, (levels[1:] + levels[:-1]) / 2)
        mass = torch.zeros(8, dtype=torch.float64).index_add_(0, which, density)
        levels = torch.zeros(8, dtype=torch.float64).index_add_(0, which, density * grid) / mass
    which = torch.bucketize(grid, (levels[1:] + levels[:-1]) / 2)
    expected = 0.99 * float(((grid - levels[which]).square() * density).sum() / density.sum())
    assert expected == pytest.approx(0.02625, rel=1e-3)  # .0345 with the tails
    rows = normal_rows(8192, 64)
    facts = Facts(rows[:, :4096], rows[:, :4096], torch.eye(64).expand(2, -1, -1), torch.eye(64).expand(2, -1, -1))
    codec = peers()["kvquant3"].make(Place(0, 1, 2, 64, facts))
    assert relative(codec.keys(rows[:, 4096:]), rows[:, 4096:]) == pytest.approx(expected, rel=0.03)


def test_a_step_on_the_manifold_stays_there_and_goes_down() -> None:
    generator = torch.Generator().manual_seed(2)
    start = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.float64))[0]
    target = torch.randn(16, 16, generator=generator, dtype=torch.float64)
    moved = spinquant.cayley_step(start, target, 1e-3)  # of the loss <target, rotation>
    assert torch.allclose(moved @ moved.T, torch.eye(16, dtype=torch.float64), atol=1e-12)
    skew = target @ start.T - start @ target.T
    wanted = -1e-3 * float((skew @ start * target).sum() / skew.norm())
    assert float(((moved - start) * target).sum()) == pytest.approx(wanted, rel=1e-2)
    assert wanted < 0


def test_rotations_learn_what_queries_and_attention_ask_for() -> None:
    """From a first rotation that turns what is large onto one coordinate; what does not count is not looked at."""
    start = spinquant.random_hadamard(64, torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(2, 2048, 64, generator=generator)
    rows = rows + 20 * torch.randn(2, 2048, 1, generator=generator) * start[:, 0]
    moment = torch.stack([torch.diag(torch.logspace(0, -2, 64)), torch.zeros(64, 64)])

    def felt(turn: Tensor) -> float:
        error = ranged(rows @ turn, 3, 64) @ turn.T - rows
        return float(((error @ moment) * error).sum())

    learned = spinquant.learned_rotation(rows, moment, None, 3, 7)
    assert torch.allclose(learned @ learned.T, torch.eye(64), atol=1e-4)
    assert felt(learned) < 0.7 * felt(start)
    other = torch.cat([rows[:1], torch.randn(1, 2048, 64, generator=generator)])
    assert torch.equal(learned, spinquant.learned_rotation(other, moment, None, 3, 7))
    weights = (torch.arange(2048) % 2).float().expand(2, -1)
    changed = torch.where(weights[..., None] > 0, rows, 100 * rows)
    seen = [spinquant.learned_rotation(part, None, weights, 3, 7) for part in (rows, changed)]
    assert torch.equal(*seen)
    assert not torch.equal(seen[0], start)


# ---- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kivi3", r"'kivi3' is unknown; valid: fp16, .*peers: int2, "),
        ("kivi2,mean=on", r"'mean': kivi2 is simulated and takes sinks, tail, calibration, budget alone"),
        ("kivi2,sinks=200", "sinks=200"),
        ("kivi2,tail=x", "tail='x'"),
    ],
)
def test_a_wrong_spec_is_one_clear_error(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_spec(spec)


def test_a_peer_can_be_granted_bits_for_each_layer(model: Any, ids: Tensor, tmp_path: Path) -> None:
    """Its codec at the widths of the allocation; all eight bits are plain integers where its own codes stop at four."""
    costs = [(1e-3, 1e-3)] * 4 + [(0.1, 1e-3), (10.0, 10.0)]
    flat = Fit(*[np.stack([np.eye(64)] * 2)] * 2, np.zeros((2, 64)))
    layers = [
        LayerSensitivity(index, 2, 64, *(StreamCost((cost,), (1e-4,), flat) for cost in pair))
        for index, pair in enumerate(costs)
    ]
    made = Calibration(checkpoint_fingerprint(model), "tiny", "text", 1, 1024, (2,), "made", tuple(layers))
    write_calibration(tmp_path / "side", made)
    granted = parse_spec(f"quarot3,sinks=4,tail=48,calibration={tmp_path / 'side'},budget=3")
    assert isinstance(granted, Simulation)
    assert granted.config.name == "quarot3,sinks=4,tail=48,calibration=side,budget=3"
    assert granted.config.allocation is not None
    assert granted.config.allocation == allocate(read_calibration(tmp_path / "side"), 3, fitted=False)
    assert granted.config.of_layer(0).key_bits < granted.config.of_layer(5).key_bits
    row, plain = scores(model, ids, granted), scores(model, ids, parse_spec("quarot3,sinks=4,tail=48"))
    assert granted.config.allocation.mean_bits == 3.0
    assert row["bits_per_value"] == pytest.approx(plain["bits_per_value"])
    assert row["kld_mean"] != plain["kld_mean"]


@pytest.mark.parametrize("name", list(BITS))
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_peer_has_other_widths(name: str, bits: int) -> None:
    """More bits, less error; and what is stored follows."""
    found = peers()[name].at
    assert found is not None
    codec, rows = found(place(), bits), normal_rows(64, 64)
    for stored, code in ((codec.key_bits, codec.keys), (codec.value_bits, codec.values)):
        assert bits < stored < bits + 1.5
        error = float((code(rows) - rows).square().mean() / rows.square().mean())
        assert error < {2: 0.6, 4: 0.06, 8: 1e-3}[bits]


def test_specs_say_what_is_kept_exact() -> None:
    published, granted = parse_spec("kivi2"), parse_spec("kivi2,sinks=4,tail=48")
    assert isinstance(published, Simulation)
    assert isinstance(granted, Simulation)
    assert (published.config.sinks, published.config.tail) == (0, 112)
    assert (granted.config.sinks, granted.config.tail, granted.config.name) == (4, 48, "kivi2,sinks=4,tail=48")
    assert parse_spec("fp16") is None
    assert parse_spec("iso3,sinks=0") == parse_kv("iso3,sinks=0")
