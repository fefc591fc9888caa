"""`rotaryquant plan` as a user meets it: the answer, the exit status, the advice, one line where something is wrong."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rotaryquant.config import parse_kv
from rotaryquant.integrations.transformers.session import CHUNK as SESSION_CHUNK
from rotaryquant.planning import memory as memories
from rotaryquant.planning.checkpoint import read_checkpoint
from rotaryquant.planning.weights import planned_bytes, read_weights
from rotaryquant.weights.conversion import convert, plan_items
from rotaryquant.weights.headers import read_folder
from rotaryquant.weights.packed_config import PackedConfig
from rotaryquant.weights.recipes import RECIPES
from support.assets import asset
from support.commands import is_error
from support.headers import config_of, header_file, tensors_of

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-30B-A3B: configuration and headers, 61 GB of nothing behind them."""
    folder = tmp_path_factory.mktemp("models") / "Qwen3-30B-A3B"
    folder.mkdir()
    config = config_of("qwen3-30b-a3b")
    (folder / "config.json").write_text(json.dumps(config))
    header_file(folder / "model.safetensors", tensors_of(config))
    return folder


def planned(run: Run, *words: str) -> tuple[int, dict[str, Any]]:
    status, out, err = run("plan", *words, "--json")
    assert err == ""
    return status, json.loads(out)


def test_what_fits_ends_with_0_and_says_so_first(run: Run, qwen3: Path) -> None:
    status, out, err = run("plan", str(qwen3), "--memory", "16GB", "--context", "32768", "--recipe", "role-4-2-8")
    assert (status, err) == (0, "")
    assert "FITS: needs" in out
    assert "What to change" not in out
    assert len(out.splitlines()) <= 36  # one screen
    assert max(map(len, out.splitlines())) <= 110
    for part in ("Qwen3-30B-A3B (qwen3_moe): 30.53 billion", "98,304 B at 16 bits", "48 x 128", "routed expert"):
        assert part in out


def test_what_does_not_fit_ends_with_1_and_says_what_to_change(run: Run, qwen3: Path) -> None:
    status, out, err = run("plan", str(qwen3), "--memory", "16GB", "--context", "32768", "--kv", "fp16")
    assert (status, err) == (1, "")
    for part in ("DOES NOT FIT: needs 65", "--recipe role-4-2-8", "fits", "3.00 GB/s (--disk)"):
        assert part in out


def test_what_is_proposed_is_enough(run: Run, qwen3: Path) -> None:
    words = [str(qwen3), "--memory", "16GB", "--context", "32768", "--kv", "fp16"]
    status, plan = planned(run, *words)
    assert status == 1
    good = [change for change in plan["changes"] if change["fits"]]
    assert good
    for change in good:
        options = change["options"].split()
        names = options[::2]
        kept = [word for pair in zip(words[1::2], words[2::2], strict=True) if pair[0] not in names for word in pair]
        again, said = planned(run, str(qwen3), *kept, *options)
        assert again == 0, change
        assert said["needed_bytes"] == change["needed"]


def test_a_prompt_is_to_be_streamed_where_it_breaks_the_budget(run: Run, qwen3: Path) -> None:
    words = [str(qwen3), "--context", "32768", "--recipe", "role-4-2-8"]
    _, plan = planned(run, *words, "--memory", "16GB")
    transient = plan["kv_per_sequence"]["transient"]
    assert transient == 98_304 * 32_768
    between = plan["needed_bytes"] - transient // 2
    status, out, _ = run("plan", *words, "--memory", f"{between}B")
    assert status == 1
    assert "stream it (prefill=streaming)\n" in out
    assert "--kv iso3,prefill=streaming" in out
    assert planned(run, *words, "--memory", f"{between}B", "--kv", "iso3,prefill=streaming")[0] == 0


def test_clients_have_caches_of_their_own(run: Run, qwen3: Path) -> None:
    one, eight = (planned(run, str(qwen3), "--memory", "1TB", "--clients", count)[1] for count in ("1", "8"))
    assert eight["memory"]["cache"] == 8 * one["memory"]["cache"]
    assert eight["memory"]["prompt"] == one["memory"]["prompt"]
    status, plan = planned(run, str(qwen3), "--memory", "16GB", "--clients", "64", "--context", "32768",
                           "--recipe", "role-4-2-8", "--kv", "iso3,prefill=streaming")  # fmt: skip
    assert status == 1
    assert {change["options"].split()[0] for change in plan["changes"]} == {"--context", "--clients"}


def test_no_torch_and_no_transformers_are_imported(qwen3: Path) -> None:
    code = (
        "import sys; from rotaryquant.cli.main import main; "
        f"status = main(['plan', {str(qwen3)!r}, '--memory', '1TB', '--json']); "
        "sys.exit(status or 10 * bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_take_what_a_conversion_writes(recipe: str, moe_folder: Path) -> None:
    checkpoint = read_checkpoint(moe_folder, "tiny")
    items = plan_items(read_folder(moe_folder), RECIPES[recipe], PackedConfig())
    assert planned_bytes(checkpoint, RECIPES[recipe]) == {item.source.name: item.nbytes for item in items}


def test_a_packed_checkpoint_is_planned_as_it_is(run: Run, moe_folder: Path, tmp_path: Path) -> None:
    recipe = RECIPES["uniform-4"]
    convert(moe_folder, tmp_path / "packed", recipe, PackedConfig(), lambda name: None, lambda *said: None)
    before = read_weights(read_checkpoint(moe_folder, "tiny"), "uniform-4")
    after = read_weights(read_checkpoint(tmp_path / "packed", "tiny"), "as-is")
    assert (after.total, after.routed, after.expert) == (before.total, before.routed, before.expert)
    assert after.parameters == before.parameters
    words = ("plan", str(tmp_path / "packed"), "--memory", "1GB", "--recipe", "uniform-2")
    is_error(run(*words), 2, "--recipe uniform-2", "packed already by 'uniform-4'", "as-is")


def test_a_gguf_file_is_planned_as_what_it_becomes(run: Run) -> None:
    from rotaryquant.errors import ModelFileError
    from rotaryquant.integrations.sources import smollm2_gguf

    try:
        path = smollm2_gguf()
    except ModelFileError:
        pytest.skip("smollm2-135m is not installed")
    status, plan = planned(run, str(path), "--memory", "4GB")
    assert status == 0
    assert plan["family"] == "llama"
    assert plan["parameters"] == 134_515_008
    assert plan["weights"]["total"] == 2 * 134_515_008
    assert plan["kv_per_sequence"]["per_token"] == 23_040


@pytest.mark.parametrize(
    ("words", "status", "parts"),
    [
        (("--memory", "16"), 2, ("--memory", "16", "unit")),
        ((), 2, ("--memory",)),
        (("--memory", "16GB", "--context", "0"), 2, ("--context=0", "at least 1")),
        (("--memory", "16GB", "--clients", "-1"), 2, ("--clients=-1",)),
        (("--memory", "16GB", "--context", "999999"), 2, ("--context=999999", "40960 positions")),
        (("--memory", "16GB", "--recipe", "tiny"), 2, ("'tiny'", "role-4-2-8")),
        (("--memory", "16GB", "--kv", "iso9"), 2, ("iso9",)),
        (("--memory", "16GB", "--disk", "fast"), 2, ("--disk", "fast")),
        (("--memory", "16GB", "--profile", "/nowhere.json"), 2, ("--profile", "eval rates")),
    ],
)
def test_wrong_options_are_one_line(
    run: Run, qwen3: Path, words: tuple[str, ...], status: int, parts: tuple[str, ...]
) -> None:
    is_error(run("plan", str(qwen3), *words), status, *parts)


def test_models_that_cannot_be_planned_are_one_line(run: Run, tmp_path: Path) -> None:
    words = ("--memory", "16GB")
    is_error(run("plan", str(tmp_path), *words), 1, "no config.json")
    (tmp_path / "config.json").write_text('{"model_type": "mamba9"}')
    header_file(tmp_path / "model.safetensors", [])
    is_error(run("plan", str(tmp_path), *words), 1, "model_type='mamba9'", "nothing is guessed")
    (tmp_path / "config.json").write_text("{")
    is_error(run("plan", str(tmp_path), *words), 1, "config.json", "not JSON")
    config = {**config_of("qwen3-30b-a3b"), "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    is_error(run("plan", str(tmp_path), *words), 1, "quant_method='fp8'")
    (tmp_path / "notes.txt").write_text("")
    is_error(run("plan", str(tmp_path / "notes.txt"), *words), 1, "neither a model folder")


def test_chunks_are_those_of_a_session() -> None:
    assert memories.CHUNK == SESSION_CHUNK


@pytest.mark.assets("models/glm4moe-70m", "data/wikitext-2/test.txt")
def test_the_peak_of_a_real_run_is_foretold(run: Run) -> None:
    folder = str(asset("models/glm4moe-70m"))
    code = "import sys; from rotaryquant.cli.main import main; sys.exit(main(sys.argv[1:]))"
    prompt = asset("data/wikitext-2/test.txt").read_text(encoding="utf-8")[:3000]  # words that repeat take less
    words = ["generate", folder, "--prompt", prompt, "--raw", "--max-tokens", "8", "--threads", "1"]
    done = subprocess.run([sys.executable, "-c", code, *words, "--json"], capture_output=True, text=True, check=True)
    made = json.loads(done.stdout)
    tokens = made["usage"]["prompt_tokens"] + made["usage"]["completion_tokens"]
    _, plan = planned(run, folder, "--memory", "4GB", "--context", str(tokens))
    assert parse_kv(plan["asked"]["kv"]) is not None
    assert plan["peak_bytes"] == pytest.approx(made["figures"]["peak_bytes"], rel=0.1)
