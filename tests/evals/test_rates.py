"""Rates of a machine: fitted right, measured at all, read back, and used for the share of attention."""

import json
from pathlib import Path

import pytest

from rotaryquant.cli.main import main
from rotaryquant.errors import ConfigError
from rotaryquant.evals import rates as measurement
from rotaryquant.planning.speed import Rates, attention_share, head_bytes
from rotaryquant.planning.weights import read_weights
from support.headers import target

RATES = Rates(2e-4, 5e-10, 1e-5, 2e-10, 3e-4, 1e-10, 1e-4, 2e-4)


def test_costs_of_a_call_and_a_byte_are_found_in_exact_samples() -> None:
    samples = [(calls, nbytes, 3e-4 * calls + 2e-9 * nbytes) for calls, nbytes in ((4, 1e5), (4, 1e6), (6, 1e7))]
    assert measurement.fit(samples) == pytest.approx((3e-4, 2e-9), rel=1e-6)


def test_no_cost_is_negative() -> None:
    assert measurement.fit([(4, 1e6, 2e-3), (4, 2e6, 4.4e-3)]) == (0.0, pytest.approx(2.1e-9, rel=0.05))
    assert measurement.fit([(4, 1e6, 2e-3), (4, 2e6, 1.9e-3)]) == (pytest.approx(4.9e-4, rel=0.05), 0.0)


def test_a_measurement_is_what_plan_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measurement, "_DEPTHS", (8, 48))
    monkeypatch.setattr(measurement, "_MODELS", ((64, 4, 2, 32, 32, 2), (128, 4, 2, 32, 64, 2), (64, 4, 2, 32, 96, 0)))
    assert main(["eval", "rates", "--threads", "1", "--steps", "2", "--json"]) == 0
    text = capsys.readouterr().out
    data = json.loads(text)
    assert {"machine", "date", "versions", "command", "threads", "dtype"} <= set(data)
    (tmp_path / "rates.json").write_text(text)
    assert Rates.from_file(tmp_path / "rates.json").as_dict() == data["rates"]
    assert data["rates"]["attention_byte"] + data["rates"]["attention_layer"] > 0


@pytest.mark.parametrize("text", ["", "{}", '{"rates": {"matrix": 1}}', '{"rates": null}'])
def test_a_file_without_rates_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rates.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--profile .*rates\.json: no rates .*eval rates"):
        Rates.from_file(tmp_path / "rates.json")


def test_shares_grow_with_depth_and_are_those_of_the_formula() -> None:
    checkpoint = target("qwen3-30b-a3b")
    weights, decoder = read_weights(checkpoint, "role-4-2-8"), checkpoint.decoder
    assert head_bytes(decoder, 10) == 48 * 32 * 256 * 2 * 10
    attention = 48 * RATES.attention_layer + RATES.attention_byte * head_bytes(decoder, 1024)
    dense = (weights.matrices - 1) * RATES.matrix + RATES.weight_byte * (weights.read - weights.cycle)
    other = 48 * (RATES.experts_layer + RATES.rest_layer + RATES.routing_layer) + RATES.expert_byte * weights.cycle
    assert attention_share(decoder, weights, 1024, RATES) == pytest.approx(attention / (attention + dense + other))
    assert weights.matrices == 1 + 1 + 48 * (4 + 1)  # embedding, head; q, k, v, o and a router in each layer
    shares = [
        attention_share(decoder, weights, tokens, rates) for rates in (None, RATES) for tokens in (1, 999, 99_999)
    ]
    assert shares[:3] == sorted(shares[:3])
    assert shares[3:] == sorted(shares[3:])


def test_bytes_alone_are_the_cache_over_the_cache_and_the_weights() -> None:
    """Of Nemotron's cache 4% at 32k, of Qwen3's three quarters: the paper's 14% and 54% have the same order."""
    found = {}
    for name in ("qwen3-30b-a3b", "nemotron-3-super-120b-a12b"):
        checkpoint = target(name)
        weights = read_weights(checkpoint, "role-4-2-8")
        found[name] = attention_share(checkpoint.decoder, weights, 32_768, None)
    assert found["qwen3-30b-a3b"] == pytest.approx(98_304 * 32_768 / (98_304 * 32_768 + 1.139e9), abs=0.02)
    assert found["nemotron-3-super-120b-a12b"] < 0.1
