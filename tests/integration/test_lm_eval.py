"""lm-evaluation-harness: what it is answered, against the model itself, and a whole run on a task made here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rotaryquant.cli import main as cli
from rotaryquant.errors import ConfigError
from support.tiny_llm import byte_tokenizer, save_tiny

WORDS = "the quick brown fox jumps over the lazy dog and then again "


@pytest.fixture(scope="module")
def harness() -> Any:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra lm-eval)")
    from rotaryquant.integrations import lm_eval

    return lm_eval


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


class Request:
    """As the harness hands it over."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def exact(model: Any, context: list[int], scored: list[int]) -> tuple[float, bool]:
    """One forward without a cache."""
    ids = torch.tensor([[*context, *scored]])
    with torch.inference_mode():
        logprobs = model(ids, use_cache=False).logits[0, len(context) - 1 : -1].log_softmax(-1)
    return float(logprobs.gather(1, ids[0, len(context) :, None]).sum()), bool(
        (logprobs.argmax(-1) == ids[0, len(context) :]).all()
    )


def encode(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text, add_special_tokens=False)
    return ids


# ---- without the harness -------------------------------------------------------------------------------------------


def test_without_the_harness_its_command_says_what_to_install(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "rotaryquant.integrations.lm_eval", raising=False)
    assert cli.main(["eval", "lm-eval", "--tasks", "any"]) == 2
    assert "lm_eval is not installed; run `pip install 'rotaryquant[lm-eval]'`" in capsys.readouterr().err


def test_the_command_is_listed(capsys: Any) -> None:
    assert cli.main(["eval", "--help"]) == 0
    assert "\n  lm-eval " in capsys.readouterr().out


# ---- answers -------------------------------------------------------------------------------------------------------


def test_a_cache_that_loses_nothing_scores_as_the_model_does(harness: Any, folder: Path) -> None:
    for options in ({"kv": "fp16"}, {"kv": "iso3", "key_bits": 32, "value_bits": 32}):
        made = harness.RotaryQuantLM(str(folder), **options)
        pairs = [(WORDS * 6, " jumps"), ("", "fox"), (WORDS * 3 + "x ", "the dog and " * 20)]
        found = made.loglikelihood([Request(*pair) for pair in pairs], disable_tqdm=True)
        for (context, scored), answer in zip(pairs, found, strict=True):
            whole = encode(context + scored)
            given = encode(context.rstrip()) or [made.prefix_token_id]
            rest = whole[len(given) if context else 0 :]
            wanted = exact(made.model, given, rest)
            assert answer[0] == pytest.approx(wanted[0], abs=2e-3 * len(rest))
            assert answer[1] == wanted[1]


def test_the_likeliest_continuation_is_said_to_be_that(harness: Any, folder: Path) -> None:
    made = harness.RotaryQuantLM(str(folder), kv="fp16")
    context = WORDS * 2
    text = made.generate_until([Request(context + "x", {"until": [], "max_gen_toks": 5})])[0]
    ids = encode(context + "x")
    likeliest: list[int] = []
    for _ in range(5):
        with torch.inference_mode():
            likeliest.append(int(made.model(torch.tensor([ids + likeliest]), use_cache=False).logits[0, -1].argmax()))
    assert text == byte_tokenizer().decode(likeliest)
    assert made._loglikelihood_tokens([((context, text), ids, likeliest)])[0][1]
    assert not made._loglikelihood_tokens([((context, text), ids, [*likeliest[::-1], 7])])[0][1]


def test_long_contexts_are_read_packed_and_short_ones_are_not(harness: Any, folder: Path) -> None:
    made = harness.RotaryQuantLM(str(folder), kv="iso2", sinks=0)
    assert made.enabled.kv.sinks == 0
    long, short = Request(WORDS * 8, "fox"), Request("the quick", " fox")
    packed = made.loglikelihood([long, short], disable_tqdm=True)
    said = made.get_model_info()
    assert (said["requests"], said["packed_requests"], said["truncated"]) == (2, 1, 0)
    # of 470 tokens before the first query, 416 are due with a tail of 48; the harness moves the space to what is scored
    assert said["packed_reads"] == len(" fox") * 2 * 416
    assert said["kv"].startswith("kv=iso2,sinks=0: 2 of 2 layers packed")
    plain = harness.RotaryQuantLM(str(folder), kv="fp16").loglikelihood([long, short], disable_tqdm=True)
    assert abs(packed[0][0] - plain[0][0]) > 1e-3
    assert packed[1][0] == pytest.approx(plain[1][0], abs=1e-4)


def test_what_is_too_long_is_cut_from_the_left_and_counted(harness: Any, folder: Path) -> None:
    made = harness.RotaryQuantLM(str(folder), kv="fp16", max_length=64)
    context, scored = WORDS * 3, "fox jumps"
    found = made.loglikelihood([Request(context, scored)], disable_tqdm=True)[0]
    whole = encode(context.rstrip() + " " + scored)
    rest = whole[len(encode(context.rstrip())) :]
    assert found[0] == pytest.approx(exact(made.model, whole[-65 : -len(rest)], rest)[0], abs=1e-3)
    made.generate_until([Request(context, {"until": ["\n"], "max_gen_toks": 8})])
    made.generate_until([Request("fox", {"until": ["\n"], "max_gen_toks": 8})])
    assert (made.get_model_info()["truncated"], made.get_model_info()["requests"]) == (2, 3)


def test_whole_texts_are_scored_once_each_token(harness: Any, folder: Path) -> None:
    made = harness.RotaryQuantLM(str(folder), kv="fp16", max_length=100)
    text = WORDS * 4
    found = made.loglikelihood_rolling([Request(text)])[0]
    ids = encode(text)
    total, at = exact(made.model, [made.prefix_token_id], ids[:100])[0], 100
    while at < len(ids):
        stop = min(at + 100, len(ids))
        total += exact(made.model, ids[stop - 101 : at], ids[at:stop])[0]
        at = stop
    assert found == pytest.approx(total, rel=1e-4)


def test_a_text_begins_with_bos_once(harness: Any, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tokenizer=byte_tokenizer(add_bos=True))
    made = harness.RotaryQuantLM(str(folder), kv="fp16")
    bos = made.tokenizer.bos_token_id
    assert made.prefix_token_id == bos
    assert made.tok_encode("fox") == made.tok_encode("<bos>fox") == [bos, *encode("fox")]
    assert made.tok_encode("fox", add_special_tokens=False) == encode("fox")
    context, scored = made._encode_pair("the quick", " fox")
    assert (context, scored) == ([bos, *encode("the quick")], encode(" fox"))
    assert made.get_model_info()["bos"] == "the tokenizer adds it"


def test_generations_end_where_they_are_told(harness: Any, folder: Path) -> None:
    made = harness.RotaryQuantLM(str(folder))
    free = made.generate_until([Request(WORDS * 4, {"until": [], "max_gen_toks": 24})])[0]
    stop, reads = free[7:9], [made.tally.dense_reads + made.tally.packed_reads]
    cut = made.generate_until([Request(WORDS * 4, {"until": [stop], "max_gen_toks": 24})])[0]
    assert cut == free[: free.index(stop)]
    reads.append(made.tally.dense_reads + made.tally.packed_reads)
    assert reads[1] < 1.95 * reads[0]  # nothing is generated behind the stop text
    drawn = {"until": [], "max_gen_toks": 24, "do_sample": True, "temperature": 5.0, "top_p": 0.9}
    once, again = made.generate_until([Request(WORDS * 4, drawn), Request(WORDS * 4, drawn)])
    assert once == again != free


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8}, "batch_size=8: requests are read one at a time"),
        ({"kv": "iso9"}, "kv='iso9' is unknown"),
        ({"wheels": 4}, "kv option 'wheels=4' is unknown"),
        ({"max_length": 1}, "max_length=1 must be at least 2"),
    ],
)
def test_a_wrong_argument_is_one_clear_error(harness: Any, folder: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        harness.RotaryQuantLM(str(folder), **options)


def test_a_request_that_cannot_be_met_is_one_clear_error(harness: Any, folder: Path) -> None:
    made = harness.RotaryQuantLM(str(folder), max_length=32)
    with pytest.raises(ConfigError, match="a continuation of 59 tokens cannot be scored"):
        made.loglikelihood([Request("a", WORDS)], disable_tqdm=True)
    with pytest.raises(ConfigError, match="max_gen_toks=32 leaves no room"):
        made.generate_until([Request("a", {"until": [], "max_gen_toks": 32})])
    with pytest.raises(ConfigError, match="generation option 'num_beams' is not carried"):
        made.generate_until([Request("a", {"until": [], "num_beams": 2})])


# ---- the whole way -------------------------------------------------------------------------------------------------

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
{rest}
"""
CHOICE = """\
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
"""
ANSWER = """\
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{target}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
"""
READING = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: byte_perplexity
"""


def test_a_local_task_goes_through_the_command(
    harness: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    plain = harness.RotaryQuantLM(str(folder), kv="fp16")
    docs = []
    for number in range(4):
        text = WORDS * 5 + "abcd"[number]
        scores = [plain.loglikelihood([Request(text, c)], disable_tqdm=True)[0][0] for c in (" red", " blue")]
        answer = int(scores[1] > scores[0]) if number else int(scores[1] <= scores[0])  # the first one is wrong
        target = plain.generate_until([Request(text, {"until": ["\\n"], "max_gen_toks": 6})])[0]
        docs.append(
            {"text": text, "choices": [" red", " blue"], "answer": answer, "target": target if number else "no"}
        )
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (tmp_path / "tasks").mkdir()
    for name, rest in (("rq_choice", CHOICE), ("rq_answer", ANSWER), ("rq_reading", READING)):
        made = TASK.format(name=name, file=tmp_path / "docs.jsonl", rest=rest)
        (tmp_path / "tasks" / f"{name}.yaml").write_text(made)
    words = [
        "--model_args",
        f"pretrained={folder},kv=iso3,key_bits=32,value_bits=32",
        "--tasks",
        "rq_choice,rq_answer,rq_reading",
    ]
    words += ["--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out.json")]
    before = list(sys.argv)
    assert cli.main(["eval", "lm-eval", *words]) == 0
    assert sys.argv == before
    (file,) = tmp_path.glob("out*.json")
    found = json.loads(file.read_text())
    assert found["results"]["rq_choice"]["acc,none"] == 0.75
    assert found["results"]["rq_answer"]["exact_match,none"] == 0.75
    nats = sum(plain.loglikelihood_rolling([Request(doc["text"]) for doc in docs]))
    size = sum(len(doc["text"]) for doc in docs)
    bytewise = torch.tensor(-nats / size).exp()
    assert found["results"]["rq_reading"]["byte_perplexity,none"] == pytest.approx(float(bytewise), rel=1e-3)
    assert found["config"]["requests"] == found["config"]["packed_requests"] == 16
    assert found["config"]["kv"].startswith("kv=iso3,key_bits=32,value_bits=32: 2 of 2 layers packed")
