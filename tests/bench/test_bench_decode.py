"""`bench decode` on tiny models: who takes part, what is skipped, and that ours reads packed rows."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from rotaryquant.bench import decode, lineup, roofs, runs
from rotaryquant.bench.runs import LlamaRun, ModelRun, cache_bytes
from rotaryquant.bench.timing import Clock
from rotaryquant.config import parse_kv
from rotaryquant.errors import ConfigError
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.ops import native
from rotaryquant.ops.append_packed import cpu as append_cpu
from rotaryquant.ops.packed_attention import cpu as attention_cpu
from support.commands import Run, is_error
from support.models import tiny
from support.tiny_llm import byte_tokenizer
from support.zoo import build

needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

SHORT = ("--steps", "2", "--pairs", "2")


def fake_clock() -> Clock:
    """Every reading is a second later."""
    now = iter(range(10_000))
    return Clock("fake", lambda: float(next(now)))


def test_rows_carry_what_scripts_read(measure: Callable[..., dict[str, Any]], model: str) -> None:
    data = measure("decode", model, "--depths", "0,300", *SHORT, "--peers", "none")
    assert {"machine", "device", "date", "versions", "roof_gbps", "rows", "skipped"} <= set(data)
    assert [(row["depth"], row["dtype"]) for row in data["rows"]] == [
        (0, "bf16"), (0, "fp32"), (300, "bf16"), (300, "fp32")
    ]  # fmt: skip
    for row in data["rows"]:
        assert set(row) >= {"model", "kv", "depth", "tokens_per_s", "peer", "ratio", "peak_bytes"}
        assert row["model"] == "tiny"
        assert row["tokens_per_s"] == pytest.approx(1e6 / row["ours_us"])
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["depth_end"] == max(1, row["depth"]) + 2 * 3
        times = {peer["peer"]: peer for peer in row["peers"]}
        assert set(times) == {"DynamicCache bf16", "DynamicCache fp32"}
        best = min(times.values(), key=lambda peer: peer["us"])
        assert (row["peer"], row["ratio"]) == (best["peer"], best["ratio"])
        assert row["ratio_same_dtype"] == times[f"DynamicCache {row['dtype']}"]["ratio"]
        # two layers, keys and values, one KV head of 32
        exact = {name: peer["peak_bytes"] / row["depth_end"] / (2 * 2 * 32) for name, peer in times.items()}
        assert exact == {"DynamicCache bf16": 2, "DynamicCache fp32": 4}
        assert (row["packed_reads"] > 0) == (row["depth"] == 300)
        assert {peer["reason"] for peer in row["not_tried"]} == {"not asked for by --peers"}
        assert len(row["not_tried"]) == 2 * 3 + 3


def test_times_are_those_of_one_token(
    measure: Callable[..., dict[str, Any]], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRun, "window", lambda run, steps, clock: 3.0 if run.kv is None else 2.0)
    row = measure("decode", model, "--depths", "1", *SHORT, "--against", "fp32", "--peers", "none")["rows"][0]
    assert (row["ours_us"], row["peer_us"]) == (1e6, 1.5e6)  # windows of two steps
    assert (row["tokens_per_s"], row["ratio"]) == (1.0, 1.5)


def test_absent_peers_are_named_with_the_reason(
    measure: Callable[..., dict[str, Any]], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hqq", None)
    monkeypatch.setitem(sys.modules, "optimum", None)
    row = measure("decode", model, "--depths", "1", "--steps", "1", "--pairs", "1", "--against", "fp32")["rows"][0]
    reasons = {peer["peer"]: peer["reason"] for peer in row["not_tried"]}
    assert reasons == {
        "QuantizedCache quanto fp32": "optimum-quanto is not installed",
        "QuantizedCache hqq fp32": "hqq is not installed",
        "llama.cpp f16": "no --llama-gguf FILE given",
        "llama.cpp q8_0": "no --llama-gguf FILE given",
        "llama.cpp q4_0": "no --llama-gguf FILE given",
    }
    assert {peer["peer"] for peer in row["peers"]} == {"DynamicCache fp32", "QuantizedCache fp8 fp32"}
    assert row["ratio"] == pytest.approx(row["peer_us"] / row["ours_us"])  # of one window
    assert row["ratio"] == pytest.approx(row["tokens_per_s"] / row["peer_tokens_per_s"])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import absent_dependency", "llama-cpp-python cannot be imported: No module named 'absent_dependency'"),
        ("raise OSError('libggml.so: no such file')", "llama-cpp-python cannot be imported: libggml.so: no such file"),
    ],
)
def test_a_peer_that_does_not_load_is_named_with_the_reason(
    measure: Callable[..., dict[str, Any]],
    model: str,
    body: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "llama_cpp.py").write_text(body)
    (tmp_path / "x.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    peers = "llama-f16,llama-q8_0,llama-q4_0"
    words = ("--depths", "1", *SHORT, "--peers", peers, "--llama-gguf", str(tmp_path / "x.gguf"))
    row = measure("decode", model, *words, "--against", "fp32")["rows"][0]
    assert {peer["reason"] for peer in row["not_tried"] if peer["peer"].startswith("llama")} == {reason}


def test_a_depth_beyond_the_model_is_skipped_with_the_reason(run: Run, model: str) -> None:
    words = ("--depths", "1,1019", "--against", "fp32", "--peers", "none", *SHORT)
    status, out, err = run("bench", "decode", model, *words)
    assert status == 0
    reason = "depth 1,019 skipped: it would need 1,025 positions with 6 tokens decoded, the model has 1,024"
    assert reason in out
    assert reason in err
    is_last_line(run("bench", "decode", model, *words, "--depths", "1019"), "depth 1019", "1,025 positions")


def is_last_line(result: tuple[int, str, str], *parts: str) -> None:
    """An error after notes on what was under way."""
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert all(part in err.splitlines()[-1] for part in parts)


def test_a_text_that_is_too_short_is_refused(run: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words " * 50)
    words = ("--depths", "301", "--text", str(tmp_path / "text.txt"), "--against", "fp32", *SHORT)
    is_last_line(run("bench", "decode", model, *words), "300 tokens", "depth 301")


def test_llama_goes_with_one_model(run: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"")
    is_error(
        run("bench", "decode", model, model, "--llama-gguf", str(tmp_path / "x.gguf")), 2, "one model, 2 are given"
    )


@needs_native
@pytest.mark.parametrize("what", ["attention", "append"])
def test_a_wrong_kernel_is_not_timed(run: Run, model: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRun, "window", lambda *args: pytest.fail("timed"))
    if what == "attention":
        real = attention_cpu.run
        monkeypatch.setattr(attention_cpu, "run", lambda *args, **options: real(*args, **options) * 1.03)
    else:
        write = append_cpu.run
        monkeypatch.setattr(append_cpu, "run", lambda x, *args: write(x * 1.03, *args))
    status, out, err = run("bench", "decode", model, "--depths", "300", *SHORT, "--peers", "none")
    assert (status, out) == (1, "")
    wanted = "tiny, layer 0, kv=iso3" if what == "attention" else "append_packed, 2/1/32"
    assert wanted in err.splitlines()[-1]


def test_a_packed_run_that_packs_nothing_is_not_printed(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "check_model", lambda *args: "cpu")
    monkeypatch.setattr("rotaryquant.kv.packed.packed_end", lambda config, seq_len, fresh: 0)
    status, out, err = run("bench", "decode", model, "--depths", "300", *SHORT, "--peers", "none")
    assert (status, out) == (1, "")
    assert "read no packed row" in err.splitlines()[-1]


@pytest.mark.parametrize("kv", ["iso3", None])
def test_a_run_decodes_greedily_as_a_plain_loop_does(kv: str | None) -> None:
    """Windows may be cut anywhere: tokens and reads are those of one uninterrupted loop."""
    model = tiny()
    ids = torch.randint(3, 500, (290,), generator=torch.Generator().manual_seed(5)).tolist()

    def decoded(windows: list[int]) -> tuple[list[int], int]:
        made = ModelRun(model, None if kv is None else parse_kv(kv))
        made.start(ids)
        for steps in windows:
            assert made.window(steps, fake_clock()) == 1.0
        assert made._session is not None
        return [*made._session.tokens, made._token], made.packed_reads

    cut, whole = decoded([3, 5, 2]), decoded([12])  # each window has a step of its own before it
    assert cut == whole
    assert (cut[1] > 0) == (kv is not None)
    if kv is None:
        cache, tokens = DynamicCache(config=model.config), list(ids)
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), cache=cache).logits
            for _ in range(14):
                tokens.append(int(logits[0, -1].argmax()))
                logits = model(torch.tensor([[tokens[-1]]]), cache=cache).logits
        assert cut[0] == tokens


def test_prompts_are_as_deep_as_asked() -> None:
    model, plain = tiny(vocab_size=261), byte_tokenizer()
    loaded = Loaded("t", Path(), model, plain)
    random = lineup.prompt_ids(loaded, 1200, None)
    assert len(random) == 1200
    assert random[:512] == random[512:1024]
    assert not set(random) & set(plain.all_special_ids)
    with_bos = Loaded("t", Path(), model, byte_tokenizer(add_bos=True))
    text = lineup.prompt_ids(with_bos, 10, "abcdefghijklm")
    assert len(text) == 10
    assert text[0] == with_bos.tokenizer.bos_token_id
    assert len(lineup.prompt_ids(with_bos, 0, None)) == 1


@pytest.mark.parametrize("family", ["gemma4_moe", "qwen3_next"])
def test_bytes_of_every_kind_of_layer_are_counted(family: str) -> None:
    model = build(family)
    made = ModelRun(model)
    made.start(list(range(3, 40)))
    assert made.cache is not None
    total = cache_bytes(made.cache)
    assert total > 0
    stored = sum(
        value.nbytes for layer in made.cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor)
    )
    assert total >= stored


def test_bytes_of_a_packed_cache_are_what_it_holds() -> None:
    made = ModelRun(tiny(), parse_kv("iso3"))
    assert made.nbytes is None
    made.start(list(range(3, 300)))
    assert isinstance(made.cache, PackedCache)
    assert made.nbytes == made.cache.nbytes > 0


def test_llama_steps_through_the_binding(
    measure: Callable[..., dict[str, Any]], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A binding that records how it is used; llama.cpp itself is no part of the tests."""
    made: list[Any] = []

    class Llama:
        def __init__(self, **options: Any) -> None:
            self.options, self.fed, self.resets = options, [], 0
            made.append(self)

        def n_vocab(self) -> int:
            return 100

        def reset(self) -> None:
            self.resets += 1

        def eval(self, tokens: list[int]) -> None:
            self.fed.append(list(tokens))

        def sample(self, temp: float) -> int:
            assert temp == 0.0
            return 7

    fake = types.ModuleType("llama_cpp")
    fake.Llama = Llama  # type: ignore[attr-defined]
    fake.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    (tmp_path / "x.gguf").write_bytes(b"")
    row = measure(
        "decode", model, "--depths", "20", "--against", "fp32", *SHORT, "--peers", "llama-f16,llama-q8_0,llama-q4_0",
        "--llama-gguf", str(tmp_path / "x.gguf"),
    )["rows"][0]  # fmt: skip
    assert [one.options["type_k"] for one in made] == [1, 8, 2]
    for one in made:
        assert one.options["type_k"] == one.options["type_v"]
        assert one.options["flash_attn"] is True
        assert one.options["n_threads"] == 1
        assert one.options["n_ctx"] >= 20 + 6
        assert one.resets == 1
        assert len(one.fed[0]) == 20
        assert max(one.fed[0]) < 100
        assert one.fed[1:] == [[7]] * 6
    other = {peer["peer"]: peer for peer in row["peers"]}
    assert not any(other[f"llama.cpp {kind}"]["same_model"] for kind in runs.LLAMA_TYPES)
    assert row["peer"] == "DynamicCache fp32"  # other weights are no peer of the headline


def test_llama_reads_a_text_with_its_own_tokens() -> None:
    """A tokenizer with a token for every 30 characters and one in front, which must not be given a whole book."""
    seen: list[int] = []

    class Llama:
        def tokenize(self, text: bytes) -> list[int]:
            seen.append(len(text))
            return [1, *range(len(text) // 30)]

    run = LlamaRun.__new__(LlamaRun)
    run.llama = Llama()
    assert lineup.host_ids(run, [9] * 10, "x" * 100_000) == [1, *range(9)]
    assert seen == [160, 320]
    with pytest.raises(ConfigError, match=r"3 tokens for llama\.cpp, 10 are needed"):
        lineup.host_ids(run, [9] * 10, "x" * 60)


def test_roofs_are_measured_with_the_threads_of_the_run(
    measure: Callable[..., dict[str, Any]], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(roofs, "measure_roofs", lambda threads: asked.append(list(threads)) or {})
    data = measure("decode", model, "--depths", "1", "--against", "fp32", *SHORT, "--threads", "2", "--peers", "none")
    assert asked == [[2]]
    assert data["rows"][0]["clock"] == "wall clock"
    assert torch.get_num_threads() == 1
