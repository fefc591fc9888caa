"""The LLM class on a tiny random model: lengths, stops, streams that share a cache, interruptions."""

from typing import Any

import pytest
import torch

from rotaryquant.errors import ConfigError, NonFiniteError
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.integrations.transformers.detokenize import decode_text
from rotaryquant.llm import LLM
from support.tiny_llm import byte_tokenizer, tiny_model

LONG = "the quick brown fox jumps over the lazy dog. " * 8  # 360 tokens: more than two blocks


def make(tmp_path: Any = None, *, kv: str = "fp16", tokenizer: Any = None, **changes: Any) -> LLM:
    return LLM(Loaded("tiny", tmp_path, tiny_model(**changes), tokenizer or byte_tokenizer()), kv)


def cold_ids(llm: LLM, ids: list[int], count: int) -> list[int]:
    """Greedy tokens by plain forwards over the whole sequence, no cache."""
    ids = list(ids)
    begin = len(ids)
    with torch.inference_mode():
        while len(ids) < begin + count:
            ids.append(int(llm.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[begin:]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17])
def test_a_prompt_read_in_chunks_gives_the_tokens_of_one_forward(length: int) -> None:
    llm = make()
    llm.session.chunk = 8
    stream = llm.stream("abcdefghijklmnopq"[:length], 4)
    list(stream)
    assert stream.ids == cold_ids(llm, stream.prompt.ids, 4)


@pytest.mark.parametrize("length", [127, 128, 129, 257])
def test_packing_does_not_depend_on_how_the_prompt_was_cut(length: int) -> None:
    found = []
    for chunk in (512, 8):
        llm = make(kv="iso3")
        llm.session.chunk = chunk
        stream = llm.stream(LONG[:length], 6)
        list(stream)
        found.append(stream.ids)
    assert found[0] == found[1]


def test_pieces_join_to_the_decoded_tokens() -> None:
    llm = make(kv="iso3")
    stream = llm.stream(LONG, 40)
    text = "".join(stream)
    assert text == decode_text(llm.tokenizer, stream.ids)
    assert llm.generate(LONG, 40).text == text


def test_max_tokens_ends_with_length_and_counts() -> None:
    stream = make().stream("hello", 5)
    list(stream)
    assert (stream.finish_reason, stream.usage.completion_tokens, stream.usage.decode_steps) == ("length", 5, 4)
    assert stream.usage.prompt_tokens == 5


def test_the_end_of_the_context_is_a_clean_stop() -> None:
    llm = make(max_position_embeddings=32)
    stream = llm.stream("x" * 20, 40)
    list(stream)
    assert (stream.finish_reason, stream.usage.completion_tokens) == ("length", 12)
    assert len(llm.session.tokens) < 32


def test_a_prompt_that_fills_the_context_is_refused_and_the_next_one_works() -> None:
    llm = make(max_position_embeddings=32)
    with pytest.raises(ConfigError, match=r"32 tokens, the model's context 32"):
        llm.stream("x" * 32)
    assert llm.generate("x" * 31, 5).usage.completion_tokens == 1


def test_an_end_token_stops_and_gives_no_text() -> None:
    llm = make()
    with torch.no_grad():
        llm.model.lm_head.weight[:] = 0
    llm.model.lm_head.bias = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(4), 261).float())
    done = llm.generate("hi", 9)
    assert (done.text, done.finish_reason, done.usage.completion_tokens) == ("", "stop", 1)


def test_a_stop_text_is_cut_out() -> None:
    llm = make()
    whole = llm.generate("hello", 30).text
    stop = whole[10:13]
    done = llm.generate("hello", 30, stop=[stop])
    assert done.finish_reason == "stop"
    assert done.text == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop": [""]}, "stop"),
        ({"stop": "ab"}, "stop"),
        ({"top_p": 2.0}, "top_p"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make().stream("hello", **options)


@pytest.mark.parametrize("prompt", ["", " ", []])
def test_nothing_to_answer_is_refused(prompt: Any) -> None:
    with pytest.raises(ConfigError, match="empty"):
        make().stream(prompt)


def test_nan_logits_are_an_error_not_a_token() -> None:
    llm = make()
    with torch.no_grad():
        llm.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        llm.generate("hello", 5)


def test_the_same_seed_says_the_same() -> None:
    llm = make(kv="iso3")
    options: dict[str, Any] = {"temperature": 1.5, "top_k": 50, "seed": 3}
    assert llm.generate(LONG, 20, **options).text == llm.generate(LONG, 20, **options).text
    assert llm.generate(LONG, 20, **options | {"seed": 4}).text != llm.generate(LONG, 20, **options).text


# ---- turns that share a cache ------------------------------------------------------------------------------


def talk(llm: LLM, turns: int, reuse: bool) -> tuple[list[list[int]], list[int]]:
    """Tokens of each answer, and how many prompt tokens each reused."""
    messages, answers, reused = [], [], []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn} " * 12})
        stream = llm.stream(messages, 20, reuse=reuse)
        messages.append({"role": "assistant", "content": "".join(stream)})
        answers.append(stream.ids)
        reused.append(stream.usage.reused_tokens)
    return answers, reused


def test_a_chat_that_reuses_its_cache_says_what_a_cold_one_says() -> None:
    cold, none = talk(make(), 3, reuse=False)
    warm, reused = talk(make(), 3, reuse=True)
    assert none == [0, 0, 0]
    assert warm == cold
    assert reused[0] == 0
    assert 100 < reused[1] < reused[2]


def test_a_packed_chat_reuses_its_cache_and_reads_packed_rows() -> None:
    llm = make(kv="iso3")
    _, reused = talk(llm, 3, reuse=True)
    assert 100 < reused[1] < reused[2]
    assert llm.session.cache is not None
    assert llm.session.cache.get_seq_length() == len(llm.session.tokens)
    assert llm.session.cache.counters.packed_reads > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("kv", ["fp16", "iso3"])
@pytest.mark.parametrize("keep", [1, 5, 130, 359, 360])
def test_a_prompt_that_departs_is_cut_back_to_what_it_shares(kv: str, keep: int) -> None:
    llm = make(kv=kv)
    llm.generate(LONG, 10)
    stream = llm.stream(LONG[:keep] + "Z", 3, reuse=True)
    list(stream)
    assert stream.usage.reused_tokens == keep
    assert llm.session.cache is not None
    assert llm.session.cache.get_seq_length() == len(llm.session.tokens) == keep + 1 + 2
    if kv == "fp16":
        assert stream.ids == cold_ids(llm, stream.prompt.ids, 3)


def test_the_same_prompt_again_reads_its_last_token() -> None:
    llm = make()
    first = llm.generate(LONG, 5)
    again = llm.generate(LONG, 5, reuse=True)
    assert again.text == first.text
    assert again.usage.reused_tokens == len(LONG) - 1


def test_without_reuse_the_same_prompt_gives_the_same_answer_packed() -> None:
    llm = make(kv="iso3")
    assert llm.generate(LONG, 20).text == llm.generate(LONG, 20).text


def test_layers_that_cannot_go_back_start_over() -> None:
    """A window that has moved on cannot be cut back; the prompt is then read whole."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.Gemma3TextConfig(
        vocab_size=261, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=512, eos_token_id=4, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = hf.Gemma3ForCausalLM(config).eval()
    llm = LLM(Loaded("tiny", None, model, byte_tokenizer()), "iso3")  # type: ignore[arg-type]
    llm.generate(LONG[:60], 4)
    assert llm.generate(LONG[:30] + "Z", 2, reuse=True).usage.reused_tokens == 0
    assert llm.generate(LONG[:30] + "Zab", 2, reuse=True).usage.reused_tokens in (0, 32)


# ---- interruptions -----------------------------------------------------------------------------------------


def test_a_cancelled_answer_leaves_cache_and_tokens_in_step() -> None:
    llm = make()
    stream = llm.stream("hello", 50)
    said = [next(stream) for _ in range(5)]
    stream.cancel()
    rest = list(stream)
    assert stream.finish_reason == "cancelled"
    assert llm.session.tokens == [*stream.prompt.ids, *stream.ids]
    assert decode_text(llm.tokenizer, stream.ids) == "".join(said + rest)
    follow = llm.stream("hello", 8, reuse=True)
    list(follow)
    assert follow.ids == cold_ids(llm, follow.prompt.ids, 8)


def test_a_prompt_cancelled_between_chunks_keeps_what_was_read() -> None:
    llm = make(kv="iso3")
    llm.session.chunk = 64
    stream = llm.stream(LONG, 5)
    forward, calls = llm.session._forward, []

    def counted(ids: Any) -> Any:
        calls.append(len(ids))
        if len(calls) == 2:
            stream.cancel()
        return forward(ids)

    llm.session._forward = counted  # type: ignore[method-assign]
    assert list(stream) == []
    assert stream.finish_reason == "cancelled"
    assert calls == [64, 64]
    assert llm.session.tokens == stream.prompt.ids[:128]
    assert llm.generate(LONG, 5, reuse=True).usage.reused_tokens == 128


def test_an_interrupted_forward_drops_the_cache_whole() -> None:
    llm = make()
    stream = llm.stream("hello", 50)
    next(stream)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = llm.model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    hook.remove()
    assert llm.session.tokens == []
    assert llm.session.cache is None
    after = llm.stream("hello", 5, reuse=True)
    list(after)
    assert after.ids == cold_ids(llm, after.prompt.ids, 5)


def test_an_overtaken_stream_says_so() -> None:
    llm = make()
    first = llm.stream("hello", 50)
    next(first)
    llm.stream("other", 5)
    with pytest.raises(ConfigError, match="overtaken"):
        next(first)
