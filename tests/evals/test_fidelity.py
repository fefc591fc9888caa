"""The fidelity measurement on tiny models: it reads packed rows, says so, and notices when they are damaged."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rotaryquant import enabled
from rotaryquant.config import parse_kv
from rotaryquant.errors import ConfigError
from rotaryquant.evals import fidelity
from rotaryquant.evals.teacher_forcing import (
    PathError,
    expected_reads,
    packed_chunks,
    reference_logits,
    stock_chunks,
)
from rotaryquant.evals.windows import check_plausible, windows_of
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.chunks import still_chunks
from rotaryquant.kv.tail import packed_end
from rotaryquant.ops.quantize import reference as quantize_reference
from support.kernels import force_kernel
from support.models import random_tokens, relative_error, tiny
from support.progress import Told
from support.tiny_llm import byte_tokenizer, save_tiny


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny(max_position_embeddings=2048)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return random_tokens(1, 700)[0]


def scores(model: Any, ids: torch.Tensor, spec: str) -> dict[str, Any]:
    loaded = Loaded("tiny", Path(), model, byte_tokenizer())
    exact, found = fidelity.measure(loaded, {spec: parse_kv(spec)}, [ids])
    return fidelity.result_of(found[spec], exact, [len(ids) - 1 - len(ids) // 2])


@pytest.mark.parametrize("spec", ["iso3", "iso3-strict", "iso3,tail=7,mean=off,protect=off", "fp16"])
def test_chunks_cover_everything_and_nothing_is_packed_within(spec: str) -> None:
    kv = parse_kv(spec)
    for begin, end, step in ((0, 1, 128), (5, 700, 128), (127, 129, 128), (350, 699, 7)):
        chunks = list(still_chunks(begin, end, kv, step))
        assert [chunks[0][0], *[stop for _, stop in chunks]] == [begin, *[a for a, _ in chunks[1:]], end]
        assert all(b - a <= step for a, b in chunks)
        if kv is not None and kv.tail:
            first_and_last = [(packed_end(kv, a, fresh=True), packed_end(kv, b - 1, fresh=True)) for a, b in chunks]
            assert all(first == last for first, last in first_and_last)
        else:
            assert len(chunks) == -(-(end - begin) // step)


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("spec", ["iso3", "iso3-strict", "iso3,tail=off", "iso4,sinks=0"])
def test_forced_chunks_equal_one_token_at_a_time(
    model: Any, ids: torch.Tensor, spec: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where queries are rounded to int8, an ulp of one may move it by a step."""
    force_kernel(monkeypatch, kernel)
    ids = ids[: 300 + 257]
    with enabled(model, spec) as state:
        assert state is not None
        by_block = torch.cat([c.logits for c in packed_chunks(model, state.new_cache(), ids, 300)])
        one_by_one = torch.cat([c.logits for c in packed_chunks(model, state.new_cache(), ids, 300, step=1)])
    assert len(by_block) == 256
    assert relative_error(by_block, one_by_one) < (1e-5 if kernel == "reference" else 1e-3)


def test_the_harness_itself_costs_nothing(model: Any, ids: torch.Tensor) -> None:
    stock = torch.cat([chunk.logits for chunk in stock_chunks(model, ids, 350)])
    assert relative_error(stock, reference_logits(model, ids, 350)) < 1e-5
    row = scores(model, ids, "fp16")
    assert row["kld_mean"] < 1e-7
    assert row["ppl_ratio"] == pytest.approx(1.0, abs=1e-6)
    assert row["packed_reads"] == 0


def test_reads_are_those_of_every_position_and_layer(model: Any, ids: torch.Tensor) -> None:
    row = scores(model, ids, "iso3")
    wanted = sum((position - 48) // 32 * 32 - 4 for position in range(350, 699))
    assert row["packed_reads"] == 2 * wanted  # two layers
    assert row["dense_reads"] == 2 * sum(position + 1 for position in range(350, 699)) - 2 * wanted
    strict = scores(model, ids, "iso3-strict")
    assert strict["packed_reads"] == 2 * sum(position + 1 for position in range(350, 699))
    assert strict["dense_reads"] == 0


def test_more_bits_are_better_and_broken_codes_are_much_worse(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_kernel(monkeypatch, "reference")
    good, better = scores(model, ids, "iso3-strict"), scores(model, ids, "iso4,sinks=0,tail=off,mean=off")
    assert better["kld_mean"] < good["kld_mean"]
    no_inverse = scores(model, ids, "iso3-strict,inverse=off")
    real = quantize_reference.dequantize
    monkeypatch.setattr(quantize_reference, "dequantize", lambda *args: real(*args) * 0.0)
    zeros = scores(model, ids, "iso3-strict")
    for broken in (zeros, no_inverse):
        assert broken["kld_mean"] > 3 * good["kld_mean"]
        assert broken["kld_p999"] > good["kld_p999"]
        assert broken["top1"] < good["top1"]


def test_a_trellis_is_better_at_the_same_bits(model: Any, ids: torch.Tensor) -> None:
    lone, paths = scores(model, ids, "iso3-strict"), scores(model, ids, "iso3-strict,quantizer=trellis")
    assert paths["bits_per_value"] == lone["bits_per_value"]
    assert paths["kld_mean"] < 0.9 * lone["kld_mean"]


def test_a_run_that_reads_too_few_packed_rows_fails(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rotaryquant.kv.packed.packed_end", lambda config, seq_len, fresh: 0)
    with enabled(model, "iso3") as state:
        assert state is not None
        chunks = packed_chunks(model, state.new_cache(), ids, 350)
        with pytest.raises(PathError, match="read 0 packed rows, wanted"):
            next(chunks)


def test_expected_reads_waits_for_the_first_block() -> None:
    with enabled(tiny(), "iso3") as state:
        assert state is not None
        assert expected_reads(state.new_cache(), 100, 128) == 0
        assert expected_reads(state.new_cache(), 128, 130) == 2 * 60


def test_the_interval_between_two_configurations_is_paired(tmp_path: Path) -> None:
    data = run_cli(tmp_path, "--kv", "iso3", "--kv", "iso4", "--against", "iso4").data
    assert [row["kv"] for row in data["results"]] == ["iso3", "iso4"]
    other = data["results"][0]["against"]
    assert other["kv"] == "iso4"
    assert other["low"] <= other["ratio"] <= other["high"]
    assert data["results"][0]["ppl"] / data["results"][1]["ppl"] == pytest.approx(other["ratio"])


def run_cli(folder: Path, *words: str, text: str | None = None) -> Any:
    save_tiny(folder, max_position_embeddings=2048)
    (folder / "text.txt").write_text(text if text is not None else "the quick brown fox jumps over the dog. " * 100)
    parser = argparse.ArgumentParser()
    fidelity.add_arguments(parser)
    base = [str(folder), "--text", str(folder / "text.txt"), "--context", "512", "--tokens", "500", "--any-baseline"]
    return fidelity.run(parser.parse_args([*base, *words]), Told())


def test_one_configuration_prints_the_promised_keys(tmp_path: Path) -> None:
    data = json.loads(json.dumps(run_cli(tmp_path, "--kv", "iso3").data, allow_nan=False))
    keys = "ppl_ref ppl ppl_ratio kld_mean kld_p999 top1 bits_per_value bits_worst tokens packed_reads dense_reads"
    assert set(keys.split()) <= set(data)
    assert data["tokens"] == 510
    assert data["ppl_ratio"] == pytest.approx(data["ppl"] / data["ppl_ref"])
    assert data["bits_per_value"] < data["bits_worst"] < 16
    assert math.isfinite(data["kld_p999"])


def test_windows_begin_as_the_model_expects(tmp_path: Path) -> None:
    model = tiny()
    text = "abcdefgh" * 200
    plain = Loaded("t", tmp_path, model, byte_tokenizer(add_bos=False))
    windows, start = windows_of(plain, text, 512, 300)
    assert start["bos"] is None
    with_bos = Loaded("t", tmp_path, model, byte_tokenizer(add_bos=True))
    windows, start = windows_of(with_bos, text, 512, 300)
    assert all(len(window) == 512 and int(window[0]) == start["bos"] for window in windows)
    assert all(int((window == start["bos"]).sum()) == 1 for window in windows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv", "iso5"), "kv='iso5' is unknown"),
        (("--against", "iso4"), "must be one of --kv"),
        (("--tokens", "100000"), "ask for at most"),
        (("--device", "nowhere"), "device='nowhere' cannot be used here"),
        (("--context", "64"), "need at least 512"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_cli(tmp_path, *words)


def test_an_implausible_base_line_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ppl_ref=5\.9e\+09 is outside"):
        check_plausible(5.9e9, {"bos": None, "bos_source": "nobody", "first_ids": [1, 2]})


def test_empty_and_missing_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        run_cli(tmp_path, text="  \n")
    with pytest.raises(ConfigError, match="cannot be read"):
        run_cli(tmp_path, "--text", str(tmp_path / "absent.txt"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv", "oscar2"], "kv=oscar2 is calibrated on a text; name one with --calibration FILE"),
        (["--kv", "oscar2", "--calibration", "text.txt"], "is the text that is scored; use another"),
        (["--kv", "oscar2", "--calibration", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["--kv", "oscar2", "--calibration", "short.txt"], "the text has"),
    ],
)
def test_a_calibrated_peer_wants_a_text_of_its_own(tmp_path: Path, words: list[str], message: str) -> None:
    folder = save_tiny(tmp_path, max_position_embeddings=1024)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog, again and again. " * 40)
    (tmp_path / "short.txt").write_text("Not much.")
    parser = argparse.ArgumentParser()
    fidelity.add_arguments(parser)
    words = [str(tmp_path / word) if word.endswith(".txt") else word for word in words]
    args = [str(folder), "--text", str(tmp_path / "text.txt"), "--context", "512", "--tokens", "100", *words]
    with pytest.raises(ConfigError, match=message):
        fidelity.run(parser.parse_args(args), Told())
