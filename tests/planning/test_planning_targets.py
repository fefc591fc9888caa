"""The four target models against public figures: parameters by role, experts, cache, states, one token cycle, ceilings.

The figures were derived from loaders of other projects, at 2.25, 4.25 and 8 bits a weight. Where ours differ by design
the test says why: our groups of 128 have one scale and no zero (2.125 bits in place of 2.25), a row of keys has one
scale whatever its width (3.0625 bits at width 256 in place of 3.125), and states count the short convolution too. An
expert of Gemma 4 is 704 wide, which groups of 128 do not divide: a third of it has groups of 64 (2.25 bits).
"""

import dataclasses

import pytest

from rotaryquant.config import parse_kv
from rotaryquant.kv.footprint import Footprint
from rotaryquant.models.geometry import Kind
from rotaryquant.models.roles import Role
from rotaryquant.planning.plan import Request, make_plan
from rotaryquant.planning.speed import paging
from rotaryquant.planning.weights import ExpertLayer, Weights, recipe_named, weigh
from support.targets import NAMES, target

B, M = 1e9, 1e6
QWEN3, QWEN36, GEMMA4, NEMOTRON = NAMES


def weights_of(name: str, recipe: str = "as-is") -> Weights:
    model = target(name)
    return weigh(model.tensors, len(model.geometry.layers), recipe_named(recipe), None)


def at_bits(weights: Weights, bits: float) -> Weights:
    """Experts at so many bits a weight, from 16."""
    layers = tuple(ExpertLayer(layer.experts, round(layer.nbytes * bits / 16)) for layer in weights.experts)
    return dataclasses.replace(weights, experts=layers)


#: Billions of parameters: routed, shared, attention, state space, latent projection, router, embedding, head, all.
PARAMETERS = {
    QWEN3: (28.991, 0, 0.906, 0, 0, 0.013, 0.311, 0.311, 30.53),
    QWEN36: (32.212, 0.126, 0.273, 1.012, 0, 0.021, 0.509, 0.509, 34.66),
    GEMMA4: (22.838, 0.535, 1.110, 0, 0, 0.011, 0.738, 0, 25.23),
    NEMOTRON: (112.743, 1.762, 0.285, 4.385, 0.336, 0.084, 0.537, 0.537, 120.67),
}
_ROLES = (
    Role.ROUTED_EXPERT, Role.SHARED_EXPERT, Role.ATTENTION, Role.STATE_SPACE, Role.LATENT_PROJECTION, Role.ROUTER,
    Role.EMBEDDING, Role.HEAD,
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_parameters_by_role(name: str) -> None:
    weights = weights_of(name)
    found = {role.role: role.parameters / B for role in weights.roles}
    for role, wanted in zip(_ROLES, PARAMETERS[name], strict=False):
        assert found.get(role, 0) == pytest.approx(wanted, rel=0.01, abs=0.0006), role
    assert weights.parameters / B == pytest.approx(PARAMETERS[name][-1], rel=0.002)


@pytest.mark.parametrize(
    ("name", "experts", "layers", "each", "cycle"),
    [
        (QWEN3, 128, 48, 4.719, (1.81, 0.96, 0.510)),
        (QWEN36, 256, 40, 3.146, (1.01, 0.535, 0.283)),
        (GEMMA4, 128, 30, 5.947, (1.43, 0.758, 0.401)),
        (NEMOTRON, 512, 40, 5.505, (4.84, 2.57, 1.36)),
    ],
)
def test_experts_and_one_token_cycle(
    name: str, experts: int, layers: int, each: float, cycle: tuple[float, ...]
) -> None:
    weights, per_token = weights_of(name), target(name).geometry.experts_per_token
    assert [layer.experts for layer in weights.experts] == [experts] * layers
    assert weights.largest_expert / 2 / M == pytest.approx(each, rel=0.001)
    for bits, wanted in zip((8, 4.25, 2.25), cycle, strict=True):
        assert at_bits(weights, bits).cycle(per_token) / B == pytest.approx(wanted, rel=0.01)
    ours = weights_of(name, "role-4-2-8")
    assert ours.cycle(per_token) / B == pytest.approx(cycle[-1] * ROUTED_BITS[name] / 2.25, rel=0.01)


#: Bits of a routed weight at 2 bits, scales counted.
ROUTED_BITS = {QWEN3: 2.125, QWEN36: 2.125, GEMMA4: (2 * 2.125 + 2.25) / 3, NEMOTRON: 2.125}


@pytest.mark.parametrize(
    ("name", "total", "resident"),
    [(QWEN3, 8.99, 0.84), (QWEN36, 10.46, 1.40), (GEMMA4, 8.00, 1.57), (NEMOTRON, 36.98, 5.27)],
)
def test_planned_bytes_of_the_mix(name: str, total: float, resident: float) -> None:
    """The public mix has 4.25 bits dense and 2.25 routed: ours has an eighth of a bit less."""
    weights = weights_of(name, "role-4-2-8")
    routed = PARAMETERS[name][0]
    others = 0.125 / 8 * (PARAMETERS[name][-1] - routed)
    assert weights.always / B == pytest.approx(resident - others, rel=0.02)
    assert weights.total / B == pytest.approx(total - others - (2.25 - ROUTED_BITS[name]) / 8 * routed, rel=0.01)


@pytest.mark.parametrize(
    ("name", "exact", "packed", "window", "state"),
    [
        (QWEN3, 98304, 19200, 0, 0),
        (QWEN36, 20480, 4000 * 3.0625 / 3.125, 0, 63 + 30 * 8192 * 4 * 2 / M),
        (GEMMA4, 20480, 4000 * 3.03125 / 3.125, 210, 0),
        (NEMOTRON, 8192, 1600, 0, 168 + 40 * (8192 + 2 * 8 * 128) * 4 * 2 / M),
    ],
)
def test_cache_and_states(name: str, exact: int, packed: float, window: float, state: float) -> None:
    layers = target(name).geometry.layers
    footprint = Footprint(layers, parse_kv("iso3-strict"))
    assert footprint.exact_per_token() == exact
    assert footprint.packed_per_token() == packed
    held = sum(2 * layer.values_per_token * layer.window for layer in layers if layer.kind is Kind.SLIDING)
    assert held / M == pytest.approx(window, rel=0.01)
    assert sum(layer.state_bytes(2) for layer in layers) / M == pytest.approx(state, rel=0.01)


#: Tokens per second that reading alone allows at 2.25 bits an expert weight, with 0, 50, 75 and 90% resident.
CEILINGS = {
    3e9: {
        QWEN3: (5.9, 11.8, 23.5, 59), QWEN36: (10.6, 21, 42, 106),
        GEMMA4: (7.5, 15, 30, 75), NEMOTRON: (2.2, 4.4, 8.8, 22),
    },
    7e9: {
        QWEN3: (13.7, 27, 55, 137), QWEN36: (24.7, 49, 99, 247),
        GEMMA4: (17, 35, 70, 174), NEMOTRON: (5.1, 10, 21, 51),
    },
    24e9: {
        QWEN3: (47, 94, 188, 471), QWEN36: (85, 170, 339, 848),
        GEMMA4: (60, 120, 239, 598), NEMOTRON: (18, 35, 71, 176),
    },
    50e9: {
        QWEN3: (98, 196, 393, 981), QWEN36: (177, 353, 706, 1766),
        GEMMA4: (125, 249, 498, 1246), NEMOTRON: (37, 73, 147, 367),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("speed", CEILINGS)
def test_ceilings_of_paging(name: str, speed: float) -> None:
    weights, per_token = at_bits(weights_of(name), 2.25), target(name).geometry.experts_per_token
    for share, wanted in zip((0, 0.5, 0.75, 0.9), CEILINGS[speed][name], strict=True):
        found = paging(weights, per_token, 1, round(share * weights.routed)).ceiling(speed)
        assert found == pytest.approx(wanted, rel=0.03)  # the table has two digits


@pytest.mark.parametrize(("name", "touched"), [(QWEN3, 51.6), (QWEN36, 57.4), (NEMOTRON, 152)])
def test_eight_clients_touch_other_experts(name: str, touched: float) -> None:
    weights, model = weights_of(name), target(name)
    layer = weights.experts[0]
    found = weights.cycle(model.geometry.experts_per_token, 8) / weights.routed * layer.experts
    assert found == pytest.approx(touched, rel=0.005)


def test_what_fits_into_16_gb() -> None:
    """Three of the four at 4, 2 and 8 bits; the fourth has room for 27 to 30% of its experts."""
    for name in (QWEN3, QWEN36, GEMMA4):
        plan = make_plan(target(name), Request(16 * 10**9, 32768, 1, "iso3,prefill=streaming", "role-4-2-8"))
        assert plan.fits
        assert plan.paged.resident == plan.paged.experts
    plan = make_plan(target(NEMOTRON), Request(16 * 10**9, 32768, 1, "iso3", "role-4-2-8"))
    assert not plan.fits_whole
    assert plan.fits_paged
    assert 0.26 < plan.paged.hit < 0.32
    assert not plan.changes
