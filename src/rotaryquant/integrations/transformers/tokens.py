"""From text or messages to token ids, with a beginning-of-sequence token exactly where the model expects one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rotaryquant.errors import ConfigError
from rotaryquant.integrations.transformers.geometry import text_config

#: Families that are broken without BOS, whatever their tokenizer files say: perplexity without it is off by
#: orders of magnitude (lm-evaluation-harness issue 3333).
_FAMILIES_WITH_BOS = ("gemma",)

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it.

    ids: token ids, never empty. text: what was encoded, template applied. bos_source: who decided about BOS.
    """

    ids: list[int]
    text: str
    bos_source: str

    @property
    def first_ids(self) -> list[int]:
        """The first four ids, for reports."""
        return self.ids[:4]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of `text` alone: no BOS, no EOS. Special tokens spelled out in the text count as such."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def bos_policy(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> tuple[int | None, str]:
    """(id that every sequence starts with, or None; who says so).

    Asked in this order: what the tokenizer itself puts in front, `add_bos_token` of its configuration, the model
    family's known need.
    """
    bos = tokenizer.bos_token_id
    if not isinstance(bos, int):
        return None, "the tokenizer has no BOS"
    probe = "a"
    if tokenizer.encode(probe)[:1] == [bos] and encode_text(tokenizer, probe)[:1] != [bos]:
        return bos, "the tokenizer adds it"
    family = text_config(config).model_type
    if family.startswith(_FAMILIES_WITH_BOS):
        return bos, f"model family {family} needs it"
    if tokenizer.init_kwargs.get("add_bos_token") is True:
        return bos, "add_bos_token of the tokenizer's configuration"
    return None, "the tokenizer adds none"


def raw_prompt(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, text: str) -> Prompt:
    """`text` as it is, behind the BOS of `bos_policy` unless the text spells one out.

    Raises ConfigError for text that is empty or only white space.
    """
    if not text.strip():
        raise ConfigError(f"prompt={text!r} is empty; give it some text")
    bos, source = bos_policy(tokenizer, config)
    ids = encode_text(tokenizer, text)
    if bos is not None and ids[:1] == [bos]:
        source = "the prompt spells it out"
    elif bos is not None:
        ids = [bos, *ids]
    if not ids:
        raise ConfigError(f"prompt={text!r} gives no tokens; give it some text")
    return Prompt(ids, text, source)


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, messages: Sequence[Mapping[str, Any]]
) -> Prompt:
    """`messages` through the model's chat template, ending where the assistant begins to speak.

    messages: role and content each; content is text, or a list of {"type": "text", "text": ...} parts. Raises
    ConfigError for a model without a template, for messages that are not of that form or without text in the
    last one, and with the template's own reason where it refuses.
    """
    if not tokenizer.chat_template:
        raise ConfigError("this model has no chat template; use generate with a plain prompt (--raw)")
    plain = _check_messages(messages)
    try:
        text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in plain)
        raise ConfigError(f"the model's chat template refuses these messages (roles: {roles}): {error}") from error
    assert isinstance(text, str)
    prompt = raw_prompt(tokenizer, config, text)
    spelled = prompt.bos_source == "the prompt spells it out"
    return Prompt(prompt.ids, text, "the chat template prints it" if spelled else prompt.bos_source)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The messages with plain text as content."""
    if not messages:
        raise ConfigError("messages is empty; give at least one user message")
    plain = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in _ROLES:
            raise ConfigError(f"messages[{index}]: role={role!r} is unknown; valid: {', '.join(_ROLES)}")
        plain.append({"role": role, "content": _plain_content(index, message.get("content"))})
    if not plain[-1]["content"].strip():
        raise ConfigError(f"messages[{len(plain) - 1}]: content is empty; give it some text")
    return plain


def _plain_content(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ConfigError(f"messages[{index}]: content part {part!r} is not text, and only text is read")
            texts.append(part["text"])
        return "".join(texts)
    raise ConfigError(f"messages[{index}]: content={content!r} must be text or a list of text parts")
