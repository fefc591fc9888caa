from typing import Any

import pytest
import transformers as hf

from rotaryquant.errors import ConfigError
from rotaryquant.integrations.transformers.tokens import bos_policy, chat_prompt, encode_text, raw_prompt
from support.tiny_llm import byte_tokenizer, tiny_config

BOS = 1
PRINTS_BOS = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
USER = [{"role": "user", "content": "hi"}]


def test_a_tokenizer_that_adds_bos_gives_exactly_one() -> None:
    tokenizer, config = byte_tokenizer(add_bos=True), tiny_config()
    assert bos_policy(tokenizer, config) == (BOS, "the tokenizer adds it")
    for prompt in (raw_prompt(tokenizer, config, "hi"), chat_prompt(tokenizer, config, USER)):
        assert prompt.ids.count(BOS) == 1
        assert prompt.first_ids[0] == BOS
    assert BOS not in encode_text(tokenizer, "hi")


def test_bos_that_template_or_text_spell_out_is_not_doubled() -> None:
    tokenizer, config = byte_tokenizer(add_bos=True, template=PRINTS_BOS), tiny_config()
    prompt = chat_prompt(tokenizer, config, USER)
    assert prompt.ids.count(BOS) == 1
    assert prompt.bos_source == "the chat template prints it"
    assert raw_prompt(tokenizer, config, "<bos>hi").ids.count(BOS) == 1


def test_a_tokenizer_that_adds_none_gets_none() -> None:
    tokenizer, config = byte_tokenizer(), tiny_config()
    assert bos_policy(tokenizer, config) == (None, "the tokenizer adds none")
    assert BOS not in raw_prompt(tokenizer, config, "hi").ids


def test_a_tokenizer_without_bos_works() -> None:
    tokenizer, config = byte_tokenizer(bos=None), tiny_config()
    assert bos_policy(tokenizer, config) == (None, "the tokenizer has no BOS")
    assert raw_prompt(tokenizer, config, "hi").ids == encode_text(tokenizer, "hi")


def test_a_family_that_needs_bos_gets_it_though_its_tokenizer_adds_none() -> None:
    bos, source = bos_policy(byte_tokenizer(), hf.Gemma3TextConfig())
    assert bos == BOS
    assert "gemma3" in source


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_an_empty_prompt_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="empty"):
        raw_prompt(byte_tokenizer(), tiny_config(), text)


def test_one_character_is_a_prompt() -> None:
    assert len(raw_prompt(byte_tokenizer(), tiny_config(), "x").ids) == 1


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "messages is empty"),
        ([{"role": "user", "content": ""}], "content is empty"),
        ([{"role": "user", "content": "  "}], "content is empty"),
        ([{"role": "user", "content": None}], "content=None"),
        ([{"role": "user"}], "content=None"),
        ([{"role": "robot", "content": "hi"}], "role='robot'"),
        ([{"content": "hi"}], "role=None"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "not text"),
        ([{"role": "user", "content": ["hi"]}], "not text"),
    ],
)
def test_messages_of_another_form_are_refused(messages: list[dict[str, Any]], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        chat_prompt(byte_tokenizer(), tiny_config(), messages)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    tokenizer, config = byte_tokenizer(), tiny_config()
    assert chat_prompt(tokenizer, config, [{"role": "user", "content": parts}]) == chat_prompt(tokenizer, config, USER)


def test_a_template_that_refuses_gives_its_own_reason_and_a_normal_request_still_works() -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    tokenizer, config = byte_tokenizer(template=template), tiny_config()
    with pytest.raises(ConfigError, match=r"roles: system, user.*System role not supported"):
        chat_prompt(tokenizer, config, [{"role": "system", "content": "be kind"}, *USER])
    assert chat_prompt(tokenizer, config, USER).text == "hi"


def test_a_template_that_breaks_is_no_crash() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        chat_prompt(byte_tokenizer(template="{{ messages[0].content + 1 }}"), tiny_config(), USER)
    with pytest.raises(ConfigError, match="chat template"):
        chat_prompt(byte_tokenizer(template="{% if %}"), tiny_config(), USER)


def test_no_template_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="no chat template; use generate"):
        chat_prompt(byte_tokenizer(template=None), tiny_config(), USER)
