import math

import pytest
import torch

from rotaryquant.errors import ConfigError, NonFiniteError
from rotaryquant.sampling import Sampler, SamplingOptions

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0])


def draws(options: SamplingOptions, count: int = 200) -> list[int]:
    sampler = Sampler(options)
    return [sampler.choose(LOGITS) for _ in range(count)]


def test_greedy_takes_the_largest() -> None:
    assert Sampler(SamplingOptions()).choose(LOGITS.bfloat16()) == 1


def test_same_seed_same_tokens_and_another_seed_others() -> None:
    first = draws(SamplingOptions(temperature=2.0, seed=5))
    assert first == draws(SamplingOptions(temperature=2.0, seed=5))
    assert first != draws(SamplingOptions(temperature=2.0, seed=6))


def test_an_open_seed_is_reported_and_repeats() -> None:
    sampler = Sampler(SamplingOptions(temperature=2.0))
    tokens = [sampler.choose(LOGITS) for _ in range(50)]
    assert tokens == draws(SamplingOptions(temperature=2.0, seed=sampler.seed), 50)


def test_top_k_keeps_k() -> None:
    assert set(draws(SamplingOptions(temperature=5.0, top_k=2, seed=0))) == {1, 3}


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    share = float(LOGITS.softmax(-1)[1])
    assert set(draws(SamplingOptions(temperature=1.0, top_p=share * 0.9, seed=0))) == {1}
    assert set(draws(SamplingOptions(temperature=1.0, top_p=share * 1.01, seed=0))) == {1, 3}


def test_frequencies_follow_the_softmax() -> None:
    found = torch.bincount(torch.tensor(draws(SamplingOptions(temperature=1.0, seed=0), 4000)), minlength=4) / 4000
    assert torch.allclose(found, LOGITS.softmax(-1), atol=0.03)


def test_forbidden_tokens_are_never_drawn_even_at_high_temperature() -> None:
    sampler = Sampler(SamplingOptions(temperature=100.0, seed=0))
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 0.0])
    assert {sampler.choose(logits) for _ in range(50)} == {1, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(NonFiniteError, match="float32"):
        Sampler(SamplingOptions(temperature=temperature)).choose(torch.tensor([0.0, bad, 1.0]))


def test_all_forbidden_is_an_error() -> None:
    with pytest.raises(NonFiniteError, match="-inf"):
        Sampler(SamplingOptions()).choose(torch.full((3,), -math.inf))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": 1.1},
        {"top_p": math.nan}, {"top_k": -1}, {"seed": -1}, {"seed": 2**63},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SamplingOptions(**options)  # type: ignore[arg-type]
