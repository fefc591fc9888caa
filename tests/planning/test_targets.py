"""The four target models: parameters by role, experts, keys and values, ceilings, against a table made independently.

The table counts from public configurations and another code's layers; here shapes are those of transformers' own
classes, without weights. Where the two differ by more than 1%, the test says who is right.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import pytest

from rotaryquant.config import parse_kv
from rotaryquant.kv.footprint import Footprint
from rotaryquant.models.roles import Role
from rotaryquant.planning.checkpoint import Checkpoint
from rotaryquant.planning.paging import ceiling, page
from rotaryquant.planning.plan import Request, make_plan, per_sequence
from rotaryquant.planning.weights import Weights, read_weights
from support.headers import target

QWEN3, QWEN36 = "qwen3-30b-a3b", "qwen3.6-35b-a3b"
GEMMA, SUPER = "gemma-4-26b-a4b", "nemotron-3-super-120b-a12b"
TARGETS = (QWEN3, QWEN36, GEMMA, SUPER)

checkpoint_of = cache(target)


@cache
def weights_of(name: str, recipe: str = "as-is") -> Weights:
    return read_weights(checkpoint_of(name), recipe)


def parameters(weights: Weights, *roles: Role) -> int:
    return sum(row.parameters for row in weights.roles if row.role in roles)


#: Billions of parameters by role.
ROLES: Mapping[str, Mapping[Role, float]] = MappingProxyType({
    QWEN3: {Role.ROUTED_EXPERT: 28.991, Role.ATTENTION: 0.906, Role.ROUTER: 0.013, Role.EMBEDDING: 0.311, Role.HEAD:
    0.311}, QWEN36: {Role.ROUTED_EXPERT: 32.212, Role.SHARED_EXPERT: 0.126, Role.ATTENTION: 0.273, Role.STATE_SPACE:
    1.012,
             Role.ROUTER: 0.021, Role.EMBEDDING: 0.509, Role.HEAD: 0.509},
    GEMMA: {Role.ROUTED_EXPERT: 22.838, Role.SHARED_EXPERT: 0.535, Role.ATTENTION: 1.110, Role.ROUTER: 0.011,
            Role.EMBEDDING: 0.738},
    SUPER: {Role.ROUTED_EXPERT: 112.743, Role.SHARED_EXPERT: 1.762, Role.ATTENTION: 0.285, Role.STATE_SPACE: 4.385,
            Role.LATENT_PROJECTION: 0.336, Role.ROUTER: 0.084, Role.EMBEDDING: 0.537, Role.HEAD: 0.537},
})  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_parameters_by_role(name: str) -> None:
    for role, billions in ROLES[name].items():
        assert parameters(weights_of(name), role) / 1e9 == pytest.approx(billions, rel=0.01, abs=0.0006), role


TOTALS = {QWEN3: 30.53, QWEN36: 34.66, GEMMA: 25.23, SUPER: 120.67}
ACTIVE = {QWEN3: 3.04, QWEN36: 2.95, GEMMA: 3.82, SUPER: 12.23}


@pytest.mark.parametrize("name", TARGETS)
def test_total_and_what_one_token_reads(name: str) -> None:
    weights = weights_of(name)
    assert weights.parameters / 1e9 == pytest.approx(TOTALS[name], rel=0.01)
    assert weights.read / 2 / 1e9 == pytest.approx(ACTIVE[name], rel=0.01)


#: Layers with experts, experts in each, of a token, parameters of one in millions.
EXPERTS = {
    QWEN3: (48, 128, 8, 4.719),
    QWEN36: (40, 256, 8, 3.146),
    GEMMA: (30, 128, 8, 5.947),
    SUPER: (40, 512, 22, 5.505),
}
#: One token cycle in GB at 2.25 bits.
CYCLES = {QWEN3: 0.510, QWEN36: 0.283, GEMMA: 0.401, SUPER: 1.36}


@pytest.mark.parametrize("name", TARGETS)
def test_experts_and_one_token_cycle(name: str) -> None:
    weights, (layers, experts, per_token, millions) = weights_of(name), EXPERTS[name]
    assert (weights.moe_layers, weights.experts, weights.per_token) == (layers, experts, per_token)
    assert weights.expert / 2 / 1e6 == pytest.approx(millions, rel=0.001)
    assert weights.cycle * 2.25 / 16 / 1e9 == pytest.approx(CYCLES[name], rel=0.01)


#: GB in all and of what every token needs: 4.25 bits dense, 8.5 shared, 2.25 routed, router and the rest in 16.
MIXES = {QWEN3: (8.99, 0.84), QWEN36: (10.46, 1.40), GEMMA: (8.00, 1.57), SUPER: (36.98, 5.27)}


@pytest.mark.parametrize("name", TARGETS)
def test_the_mix_of_four_two_and_eight_bits(name: str) -> None:
    weights = weights_of(name)
    routed, shared = (parameters(weights, role) for role in (Role.ROUTED_EXPERT, Role.SHARED_EXPERT))
    kept = parameters(weights, Role.ROUTER, Role.SHARED_GATE, Role.STATE, Role.NORM, Role.BIAS)
    dense = weights.parameters - routed - shared - kept
    resident = (4.25 * dense + 8.5 * shared + 16 * kept) / 8e9
    assert resident == pytest.approx(MIXES[name][1], rel=0.02)
    assert resident + 2.25 * routed / 8e9 == pytest.approx(MIXES[name][0], rel=0.01)


@pytest.mark.parametrize("name", TARGETS)
def test_the_recipe_takes_a_little_less_than_that_mix(name: str) -> None:
    """Its scales are one bf16 for 128 weights, an eighth of a bit, the table's a quarter (scale and zero)."""
    weights = weights_of(name, "role-4-2-8")
    assert 0.93 < weights.total / 1e9 / MIXES[name][0] < 1.0
    for row in weights.roles:
        bits = {Role.ROUTED_EXPERT: 2.125, Role.SHARED_EXPERT: 8.5}.get(row.role, 4.125)
        if row.at_bits[4] != row.as_is and row.role is not Role.STATE:
            assert 8 * row.planned / row.parameters == pytest.approx(bits, rel=0.06), row.role


#: Bytes a token at 16 bits and at 3.125; MB fixed (windows or states). GB of 32k tokens at 16 bits.
KV = {
    QWEN3: (98_304, 19_200, 3.22),
    QWEN36: (20_480, 4_000, 0.67),
    GEMMA: (20_480, 4_000, 0.67),
    SUPER: (8_192, 1_600, 0.27),
}


@pytest.mark.parametrize("name", TARGETS)
def test_keys_and_values(name: str) -> None:
    """At widths 256 and 512 the table counts a scale of 2 bytes for each 128 values; the format here has one a row."""
    exact, packed, long = KV[name]
    kept = per_sequence(checkpoint_of(name), parse_kv("iso3-strict"), 32_768)
    width = next(layer.key_width for layer in checkpoint_of(name).decoder.layers if layer.packable)
    assert kept.per_token == exact
    assert kept.packed_per_token == exact * (3 + 16 / width) / 16
    assert kept.packed_per_token == pytest.approx(packed, rel=0.04)
    assert (kept.exact - kept.window) / 1e9 == pytest.approx(long, rel=0.01)


def test_windows_and_states() -> None:
    sizes = {name: per_sequence(checkpoint_of(name), None, 32_768) for name in TARGETS}
    assert sizes[GEMMA].window / 1e6 == pytest.approx(210, rel=0.01)
    assert [sizes[name].window for name in (QWEN3, QWEN36, SUPER)] == [0, 0, 0]
    assert (sizes[QWEN3].state, sizes[GEMMA].state) == (0, 0)
    # the table has the recurrent state alone, 63 and 168 MB; the convolution's last four inputs are kept too
    assert sizes[QWEN36].state / 1e6 == pytest.approx(63 + 30 * 8192 * 4 * 2 / 1e6, rel=0.01)
    assert sizes[SUPER].state / 1e6 == pytest.approx(168 + 40 * 10240 * 4 * 2 / 1e6, rel=0.01)


#: Tokens a second that a link allows, at 2.25 bits, h = 0, .5, .75, .9.
CEILINGS = {
    3e9: {QWEN3: (5.9, 11.8, 23.5, 59), QWEN36: (10.6, 21, 42, 106), GEMMA: (7.5, 15, 30, 75), SUPER: (2.2, 4.4, 8.8,
    22)}, 7e9: {QWEN3: (13.7, 27, 55, 137), QWEN36: (24.7, 49, 99, 247), GEMMA: (17, 35, 70, 174), SUPER: (5.1, 10,
    21, 51)}, 24e9: {QWEN3: (47, 94, 188, 471), QWEN36: (85, 170, 339, 848), GEMMA: (60, 120, 239, 598), SUPER: (18,
    35, 71, 176)},
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("speed", CEILINGS)
def test_ceilings(name: str, speed: float) -> None:
    cycle = round(weights_of(name).cycle * 2.25 / 16)
    for hit, rate in zip((0, 0.5, 0.75, 0.9), CEILINGS[speed][name], strict=True):
        found = ceiling(cycle, hit, int(speed))
        assert found is not None
        assert found == pytest.approx(rate, rel=0.02, abs=0.5 if rate >= 10 else 0.05)


def test_residency_of_the_largest_in_16_and_24_gb() -> None:
    weights = weights_of(SUPER, "role-4-2-8")
    for memory, share in ((24e9, 0.53), (16e9, 0.27)):
        # the table leaves 1.9 GB for a cache and the rest; its experts have 2.25 bits, these 2.125
        paging = page(weights, round(memory - 1.9e9 - weights.resident), 3_000_000_000, 24_000_000_000)
        assert paging is not None
        assert paging.hit == pytest.approx(share * 2.25 / 2.125, abs=0.02)


def test_nothing_is_paged_below_one_token_cycle() -> None:
    weights = weights_of(QWEN3, "role-4-2-8")
    below, above = (page(weights, weights.cycle + more, 10**9, 10**9) for more in (-1, 1))
    assert below is not None
    assert above is not None
    assert (below.cycle_fits, above.cycle_fits) == (False, True)
    assert below.disk == pytest.approx(1e9 / weights.cycle)
    assert above.disk == pytest.approx(1e9 / weights.cycle / (1 - above.hit))
    assert page(weights, weights.routed, 10**9, 10**9).disk is None  # type: ignore[union-attr]


def plan_of(name: str, **fields: object) -> object:
    asked = {
        "memory": 16 * 10**9, "context": 32_768, "clients": 1, "kv": "iso3", "recipe": "role-4-2-8",
        "disk": 3 * 10**9, "link": 24 * 10**9, **fields,
    }  # fmt: skip
    return make_plan(checkpoint_of(name), Request(**asked))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "fits"), [(QWEN3, True), (QWEN36, True), (GEMMA, True), (SUPER, False)])
def test_three_of_four_fit_into_16_gb(name: str, fits: bool) -> None:
    plan = plan_of(name)
    assert plan.fits is fits  # type: ignore[attr-defined]
    assert plan_of(name, memory=48 * 10**9).fits  # type: ignore[attr-defined]


def test_the_transient_of_the_paper() -> None:
    """2 · 28 · 8 · 128 · 2,048 · 2 bytes: about 235 MB, and none when a prompt is packed as it is read."""
    config = {"model_type": "llama", "num_hidden_layers": 28, "num_attention_heads": 8, "num_key_value_heads": 8,
              "head_dim": 128, "hidden_size": 1024, "vocab_size": 64}  # fmt: skip
    from rotaryquant.models.layers import read_decoder

    layers = read_decoder(config).layers
    assert Footprint(layers, parse_kv("iso3")).prompt_bytes(2_048) == 2 * 28 * 8 * 128 * 2_048 * 2
    assert round(Footprint(layers, parse_kv("iso3")).prompt_bytes(2_048) / 1e6) == 235
    assert Footprint(layers, parse_kv("iso3,prefill=streaming")).prompt_bytes(2_048) == 0


def test_heads_that_predict_ahead_stay_in_the_file() -> None:
    from rotaryquant.planning.checkpoint import checkpoint
    from rotaryquant.weights.headers import TensorInfo
    from support.headers import config_of, tensors_of

    config, file = config_of(QWEN36), checkpoint_of(QWEN36).tensors[0].file
    more = [
        TensorInfo(name, "BF16", (8, 8), 128, file) for name in ("mtp.fc.weight", "model.layers.40.mlp.gate.weight")
    ]
    made: Checkpoint = checkpoint(QWEN36, config, [*tensors_of(config), *more], "safetensors")
    assert made.left == 256
    assert made.nbytes == checkpoint_of(QWEN36).nbytes
