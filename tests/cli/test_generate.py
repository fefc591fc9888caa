"""`generate`: what goes where, the figures, what is refused."""

import json
import sys
from pathlib import Path

import pytest

from support.commands import Run, is_error
from support.tiny_llm import save_tiny

LONG = "the quick brown fox jumps over the lazy dog. " * 8


def test_generate_streams_text_to_stdout_and_the_rest_to_stderr(run: Run, model: str) -> None:
    status, out, err = run("generate", model, "--prompt", LONG, "--max-tokens", "20")
    assert status == 0
    assert out.endswith("\n")
    assert err.splitlines()[0] == f"{model}: kv=iso3: 2 of 2 layers packed (isoquant)"
    for part in ("16-bit", "bits a value", "buffers held now", "packed,", "tokens/s", "peak memory", "length"):
        assert part in err
    again = run("generate", model, "--prompt", LONG, "--max-tokens", "20", "--json")
    assert json.loads(again[1])["text"] + "\n" == out


def test_generate_json_is_one_object_with_the_figures(run: Run, model: str) -> None:
    status, out, _ = run("generate", model, "--prompt", LONG, "--max-tokens", "20", "--json", "--kv", "iso3")
    data = json.loads(out)
    assert (status, out.count("\n")) == (0, 1)
    assert data["finish_reason"] == "length"
    assert data["usage"]["completion_tokens"] == 20
    assert data["bos"] == "the tokenizer adds none"
    assert len(data["first_ids"]) == 4
    found = data["figures"]
    assert found["tokens"] == data["usage"]["prompt_tokens"] + 19
    assert found["kv_exact"] == 2 * 2 * 32 * 2  # layers x (K, V) x width x bytes
    assert found["packed_reads"] > 0
    assert 3 < found["bits_long"] < found["bits_per_value"] < found["bits_worst"] < 16
    assert found["kv_stored"] == pytest.approx(found["bits_per_value"] * 2 * 2 * 32 / 8)
    assert sum(layer["nbytes"] for layer in data["report"]["layers"]) == pytest.approx(
        found["kv_held"] * found["tokens"]
    )


def test_a_context_too_short_to_pack_is_said_plainly(run: Run, model: str) -> None:
    _, _, err = run("generate", model, "--prompt", "hi", "--max-tokens", "3")
    assert "nothing packed yet: packing starts at 128 tokens" in err
    _, out, _ = run("generate", model, "--prompt", "hi", "--max-tokens", "3", "--json")
    assert json.loads(out)["figures"]["kv_stored"] is None


def test_generate_with_a_16_bit_cache(run: Run, model: str) -> None:
    status, _, err = run("generate", model, "--prompt", LONG, "--max-tokens", "3", "--kv", "fp16")
    assert status == 0
    assert "kv=fp16: 16-bit cache, nothing packed" in err
    assert "0 packed" in err
    _, out, _ = run("generate", model, "--prompt", LONG, "--max-tokens", "3", "--kv", "fp16", "--json")
    data = json.loads(out)
    assert (data["report"], data["figures"]["packed_reads"], data["figures"]["kv"]) == (None, 0, "fp16")


def test_the_demo_prompt_and_stdin(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    _, out, _ = run("generate", "--max-tokens", "1", "--json")
    data = json.loads(out)
    assert data["model"] == "glm4moe-70m"
    assert data["usage"]["prompt_tokens"] > 600
    assert 3.0 < data["figures"]["weights"]["all"][1] < 4.0
    assert data["figures"]["weights"]["routed expert"][0] < data["figures"]["weights"]["all"][0] < 32_000_000
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    _, out, _ = run("generate", model, "--max-tokens", "1", "--json", "--raw", "--prompt", "-")
    assert json.loads(out)["usage"]["prompt_tokens"] == len("from a pipe")


def test_the_template_is_used_unless_raw_or_absent(run: Run, model: str, plain_model: str) -> None:
    def count(*words: str) -> int:
        return int(
            json.loads(run("generate", *words, "--prompt", "hi", "--max-tokens", "1", "--json")[1])["usage"][
                "prompt_tokens"
            ]
        )

    assert count(plain_model) == count(model, "--raw") == 2
    assert count(model) > 10
    assert count(model, "--system", "be kind") > count(model)
    is_error(run("generate", plain_model, "--system", "be kind"), 2, "no chat template")
    is_error(run("chat", plain_model), 2, "no chat template")


def test_the_same_seed_repeats(run: Run, model: str) -> None:
    words = ("generate", model, "--prompt", "hi", "--max-tokens", "20", "--json", "--temperature", "2")
    first, second, third = (json.loads(run(*words, "--seed", seed)[1]) for seed in ("1", "1", "2"))
    assert first["text"] == second["text"] != third["text"]
    assert first["seed"] == 1


def test_memory_that_suffices_is_shown_and_one_that_does_not_is_refused(run: Run, model: str) -> None:
    status, _, err = run("generate", model, "--prompt", "hi", "--max-tokens", "3", "--memory", "64GB")
    assert status == 0
    assert "of 64.0 GB (--memory)" in err
    result = run("generate", model, "--prompt", "hi", "--max-tokens", "3", "--memory", "50MB")
    is_error(result, 2, "--memory 50.0 MB is too small", "weights", "KV cache of 4 tokens", "this process")


def test_a_prompt_that_fills_the_context_is_refused(run: Run, model: str) -> None:
    result = run("generate", model, "--raw", "--prompt", "x" * 1024)
    is_error(result, 2, "1024 tokens, the model's context 1024")


def test_a_damaged_checkpoint_is_one_line(run: Run, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "cut")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for command in ("generate", "chat", "inspect"):
        is_error(run(command, str(folder)), 1, "model.safetensors: expected", "cut short")
