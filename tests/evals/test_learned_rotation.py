"""SO(4) blocks that are learned: what they are, that they go through the packed cache, and that they err less."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rotaryquant import KVCacheConfig, parse_kv
from rotaryquant.errors import ConfigError
from rotaryquant.evals import fidelity
from rotaryquant.evals.facts import CONTEXT
from rotaryquant.evals.learned_rotation import (
    LearnedRotations,
    Rows,
    _turned_moment,
    blocks_of,
    code_errors,
    coordinate_weights,
    learn,
    learned_rotation,
    split,
    streams_of,
)
from rotaryquant.evals.simulated import Facts
from rotaryquant.formats.codebook import relative_error
from rotaryquant.formats.rotation import quaternions, so4_matrix
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.ops.rotate import build_rotation, rotate
from rotaryquant.ops.rotate.reference import dense_matrix
from support.models import random_tokens, tiny
from support.tiny_llm import byte_tokenizer

ISO3 = parse_kv("iso3")
assert isinstance(ISO3, KVCacheConfig)
KEYS, VALUES = ISO3.stream_formats(64, 64)


def facts_of(keys: Tensor, values: Tensor | None = None, weights: Tensor | None = None) -> Facts:
    heads, tokens, width = keys.shape
    eye = torch.eye(width).expand(heads, -1, -1)
    alike = torch.ones(heads, tokens) if weights is None else weights
    return Facts(keys, keys if values is None else values, eye, eye, alike)


def normal(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(seed))


def peaked(tokens: int) -> Tensor:
    """Rows that the random rotation of layer 0 turns into few large coordinates."""
    peaks = normal(tokens, 1) * torch.where(torch.arange(64) % 4 == 0, 10.0, 0.3)
    return rotate(peaks[None], build_rotation(KEYS, 0, 2), inverse=True)[0]


def test_blocks_are_those_of_their_quaternions() -> None:
    drawn = np.stack([quaternions(64, 0, *KEYS.rotation_source(3, head)) for head in range(2)])
    found = blocks_of(torch.tensor(drawn) * 7.0)  # of any length
    assert torch.allclose(found[1, 5], torch.tensor(so4_matrix(drawn[1, 5, 0], drawn[1, 5, 1])), atol=1e-12)
    built = build_rotation(KEYS, 3, 2).blocks
    assert built is not None
    assert torch.allclose(found.float(), built, atol=1e-6)


def test_learned_blocks_err_less_on_what_they_have_not_seen() -> None:
    rows, fresh = peaked(2048), peaked(4096)[:, 2048:]
    learned = learned_rotation(Rows(rows, None, None), KEYS, 0)
    assert learned.blocks is not None
    eye = learned.blocks @ learned.blocks.transpose(-1, -2)
    assert torch.allclose(eye, torch.eye(4).expand_as(eye), atol=1e-5)
    assert bool((torch.linalg.det(learned.blocks) > 0).all())
    start = build_rotation(KEYS, 0, 2)
    assert learned.signs is not None
    assert start.signs is not None
    assert torch.equal(learned.signs, start.signs)
    facts = {0: facts_of(torch.cat([rows, fresh], 1))}
    plain = dataclasses.replace(ISO3, mean=False)
    both = [code_errors(plain, facts, {}, {0: (turn, turn)})["key_error"] for turn in (learned, start)]
    assert both[0] < 0.7 * both[1]
    again = learned_rotation(Rows(rows, None, None), KEYS, 0)
    assert again.blocks is not None
    assert torch.equal(learned.blocks, again.blocks)


def test_what_does_not_count_teaches_nothing() -> None:
    """A moment that sees one head alone, and weights that see every second row."""
    moment = torch.stack([torch.eye(64), torch.zeros(64, 64)])
    rows, other = peaked(1024), peaked(1024)
    other[1] = normal(1024, 9)[1]
    seen = [learned_rotation(Rows(part, moment, None), KEYS, 0).blocks for part in (rows, other)]
    assert seen[0] is not None
    assert seen[1] is not None
    assert torch.equal(seen[0][0], seen[1][0])
    weights = (torch.arange(1024) % 2).float().expand(2, -1)
    other = torch.where(weights[..., None] > 0, rows, 50 * rows.flip(1))
    seen = [learned_rotation(Rows(part, None, weights), KEYS, 0).blocks for part in (rows, other)]
    assert seen[0] is not None
    assert seen[1] is not None
    assert torch.equal(seen[0], seen[1])


def test_a_coordinate_counts_what_its_direction_does() -> None:
    """Against whole matrices: of two heads, behind Hadamard and signs."""
    half = normal(64, 3)
    moment, rotation = half @ half.transpose(-1, -2), build_rotation(KEYS, 0, 2)
    spread = dataclasses.replace(rotation, blocks=None)
    assert rotation.blocks is not None
    found = coordinate_weights(rotation.blocks, _turned_moment(moment, spread))
    matrix = dense_matrix(rotation)
    wanted = (matrix @ moment @ matrix.transpose(-1, -2)).diagonal(dim1=1, dim2=2)
    assert torch.allclose(found.flatten(1), wanted, rtol=1e-3)


def test_errors_of_normal_rows_are_those_of_the_codebook() -> None:
    """With the norm as scale; least squares err less and unbiased scales more."""
    facts = {0: facts_of(normal(8 * CONTEXT)), 3: facts_of(normal(8 * CONTEXT, 5))}
    found = {scale: code_errors(dataclasses.replace(ISO3, scale=scale), facts, {}) for scale in ("norm", "mse", "best")}
    assert found["norm"]["value_error"] == pytest.approx(relative_error(64, 3), rel=0.01)
    assert found["norm"]["key_error"] == pytest.approx(relative_error(64, 3), rel=0.01)
    errors = [found[scale]["value_error"] for scale in ("mse", "norm", "best")]
    assert errors[0] < 0.99 * errors[1] < 0.99 * 0.995 * errors[2]
    assert found["mse"]["key_error"] == found["best"]["key_error"]


def test_keys_lack_the_mean_that_the_cache_takes_off() -> None:
    keys = normal(2 * CONTEXT) + 5.0
    keys[:, :4] += 100.0  # sinks, which stay exact
    slow = torch.arange(64) >= 16
    found, values = streams_of(facts_of(keys), ISO3, slow)
    assert found.rows.shape == (2, 2 * (CONTEXT - 4), 64)
    assert values.weights is not None
    assert values.weights.shape == (2, 2 * (CONTEXT - 4))
    assert float(found.rows[..., 16:].mean().abs()) < 0.1
    assert float(found.rows[..., :16].mean()) == pytest.approx(5.0, abs=0.1)
    kept = streams_of(facts_of(keys), dataclasses.replace(ISO3, mean=False), slow)[0]
    assert torch.equal(kept.rows[:, : CONTEXT - 4], keys[:, 4:CONTEXT])
    assert torch.equal(values.rows, kept.rows)


def test_the_last_quarter_is_held_back() -> None:
    facts = facts_of(normal(9 * CONTEXT))
    first, last = split(facts)
    assert torch.equal(first.keys, facts.keys[:, : 7 * CONTEXT])
    assert torch.equal(last.values, facts.values[:, 7 * CONTEXT :])
    with pytest.raises(ConfigError, match="at least 2 windows of 1024 tokens, not 1"):
        split(facts_of(normal(CONTEXT)))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny(max_position_embeddings=2048)


def scores(model: Any, kv: Any) -> dict[str, Any]:
    ids = random_tokens(1, 700)[0]
    exact, found = fidelity.measure(Loaded("tiny", Path(), model, byte_tokenizer()), {"it": kv}, [ids])
    return fidelity.result_of(found["it"], exact, [349])


def test_learned_blocks_go_through_the_packed_cache(model: Any) -> None:
    """With the random blocks in their place nothing changes; with none, what comes out is rotation=hadamard."""
    base, none = scores(model, ISO3), scores(model, parse_kv("iso3,rotation=hadamard"))
    random = {layer: (build_rotation(KEYS, layer, 2), build_rotation(VALUES, layer, 2)) for layer in (0, 1)}
    eye = torch.eye(4).expand(2, 16, 4, 4).contiguous()
    idle = {
        layer: (dataclasses.replace(pair[0], blocks=eye), dataclasses.replace(pair[1], blocks=eye))
        for layer, pair in random.items()
    }
    for rotations, wanted in ((random, base), (idle, none)):
        found = scores(model, LearnedRotations(ISO3, rotations))
        assert found["in_force"] == "kv=iso3: 2 layers packed, with learned SO(4) blocks after Hadamard and signs"
        assert found["kld_mean"] == pytest.approx(wanted["kld_mean"], rel=1e-3)
        assert found["bits_per_value"] == wanted["bits_per_value"]
        assert found["packed_reads"] == wanted["packed_reads"] > 0
    assert abs(base["kld_mean"] / none["kld_mean"] - 1) > 0.02


@pytest.mark.parametrize("spec", ["iso3,rotation=dense", "iso3t", "turbo3"])
def test_blocks_are_learned_where_there_are_some(spec: str) -> None:
    kept = parse_kv(spec)
    assert kept is not None
    with pytest.raises(ConfigError, match=r"blocks are learned for rotation=isoquant, quantizer=scalar"):
        learn(kept, "it", {}, {})
