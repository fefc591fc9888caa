import functools
import random
from typing import Any

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rotaryquant.integrations.transformers.detokenize import StopText, StreamDecoder, decode_text
from support.tiny_llm import byte_tokenizer, pieces_tokenizer


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@functools.cache
def _byte_table() -> list[int]:
    """Id of every byte in the byte-level tokenizer."""
    tokenizer = byte_tokenizer()
    return [tokenizer.convert_tokens_to_ids(name) for _, name in sorted(bytes_to_unicode().items())]


def byte_ids(data: bytes) -> list[int]:
    """Ids of raw bytes for the byte-level tokenizer, valid UTF-8 or not."""
    return [_byte_table()[byte] for byte in data]


FAMILY = "\U0001f468\u200d\U0001f469".encode()


@pytest.mark.parametrize(
    "data",
    [
        b"plain text", "\U0001f600".encode(), "한국어".encode(), FAMILY, b"a" + b"\xf0\x9f", b"\xf0", b" \xed\x95\x9c",
        b"\xf0\x9fa", b"\xff\xff\xff\xff\xffz", b"\xff" * 9, "a\ufffdb".encode(), b"", b"  two  spaces  ",
    ],
)  # fmt: skip
def test_pieces_join_to_the_whole_and_no_character_is_cut(data: bytes) -> None:
    tokenizer, ids = byte_tokenizer(), byte_ids(data)
    found = pieces(tokenizer, ids)
    assert "".join(found) == decode_text(tokenizer, ids) == data.decode(errors="replace")


def test_a_character_comes_whole_with_its_last_byte() -> None:
    assert pieces(byte_tokenizer(), byte_ids("x\U0001f600y".encode())) == ["x", "", "", "", "\U0001f600", "y", ""]


def test_an_unfinished_character_is_flushed_once() -> None:
    assert pieces(byte_tokenizer(), byte_ids(b"a\xf0\x9f"))[-1] == "\ufffd"


def test_random_bytes_join_to_the_whole() -> None:
    tokenizer, rng = byte_tokenizer(), random.Random(0)
    for _ in range(100):
        data = bytes(rng.choice([0x20, 0x61, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x80, 0x8D]) for _ in range(24))
        assert "".join(pieces(tokenizer, byte_ids(data))) == data.decode(errors="replace")


def test_special_tokens_are_skipped_wherever_they_stand() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("<bos> a<turn> b<end><end> c", add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == " a b c"


@pytest.mark.parametrize("seed", range(20))
def test_leading_spaces_of_pieces_survive(seed: int) -> None:
    tokenizer, rng = pieces_tokenizer(), random.Random(seed)
    smile = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "\U0001f600".encode()]
    units = [[1], [2], [3], [4], [5], [6], [tokenizer.eos_token_id], smile]
    ids = [token for _ in range(20) for token in rng.choice(units)]
    found = pieces(tokenizer, ids)
    assert "".join(found) == decode_text(tokenizer, ids)
    assert "\ufffd" not in "".join(found)


def stopped(stops: list[str], text: list[str]) -> tuple[str, bool]:
    stop = StopText(stops)
    given = "".join([*(stop.push(piece) for piece in text), stop.flush()])
    return given, stop.found


@pytest.mark.parametrize(
    ("stops", "text", "wanted"),
    [
        (["END"], ["one EN", "D two"], ("one ", True)),
        (["END"], ["one EN", "E two"], ("one ENE two", False)),
        (["END"], ["one EN"], ("one EN", False)),
        (["\n\n"], ["a\n", "b\n", "\nc"], ("a\nb", True)),
        (["aab"], ["a", "a", "a", "b"], ("a", True)),
        (["xyz", "b"], ["a", "b", "c"], ("a", True)),
        ([], ["a", "b"], ("ab", False)),
    ],
)
def test_stop_texts_never_slip_out(stops: list[str], text: list[str], wanted: tuple[str, bool]) -> None:
    assert stopped(stops, text) == wanted


def test_a_run_of_bytes_that_never_becomes_valid_does_not_stall_the_stream() -> None:
    tokenizer = pieces_tokenizer()
    smile = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "\U0001f600".encode()]
    bad = tokenizer.convert_tokens_to_ids("<0xFF>")
    found = pieces(tokenizer, [2, *smile, bad, 3, 2])
    assert found == ["hello", "", "", "", "\U0001f600", "", "\ufffd world", " hello", ""]
