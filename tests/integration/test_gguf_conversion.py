"""GGUF files: converted once, whole or not at all, and never taken for another file."""

import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rotaryquant.errors import ModelFileError
from rotaryquant.formats.gguf import read_gguf_header
from rotaryquant.integrations.transformers import gguf as conversion
from rotaryquant.integrations.transformers.gguf import MARKER, check_gguf, converted_folder
from rotaryquant.llm import LLM
from support.tiny_gguf import write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("source") / "tiny.gguf", eot=258)


def silent(message: str) -> None:
    """Tell nobody."""


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_a_file_is_converted_once_and_runs(source: Path, cache: Path) -> None:
    told: list[str] = []
    llm = LLM.load(str(source), kv="iso3", notify=told.append)
    assert llm.end_ids == {257, 258}  # the end of the text and of the turn
    assert llm.generate("hello", 4).usage.prompt_tokens == 5
    LLM.load(str(source), notify=told.append)
    assert len(told) == 1
    assert "once" in told[0]
    assert len(folders(cache)) == 1


def test_the_tensors_are_those_of_the_file(source: Path) -> None:
    header = read_gguf_header(source)
    assert header.size == source.stat().st_size
    llm = LLM.load(str(source), kv="fp16")
    assert sum(t.elements for t in header.tensors) == sum(p.numel() for p in llm.model.parameters())


def test_another_file_of_the_same_name_is_converted_apart(source: Path, cache: Path, tmp_path: Path) -> None:
    first = converted_folder(source, silent)
    (tmp_path / "other").mkdir()
    second = converted_folder(write_gguf(tmp_path / "other" / "tiny.gguf", seed=1), silent)
    assert first != second
    assert len(folders(cache)) == 2


def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = conversion._write

    def interrupted(path: Path, folder: Path, header: Any) -> None:
        write(path, folder, header)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            converted_folder(source, silent)
    assert folders(cache) == []
    stale = cache / f".{source.stem}-{conversion._sha256(source)[:12]}.partial-killed"
    stale.mkdir()
    folder = converted_folder(source, silent)
    assert folders(cache) == [folder.name]


def test_a_folder_without_marker_or_of_an_older_layout_is_made_anew(source: Path) -> None:
    folder = converted_folder(source, silent)
    marker = json.loads((folder / MARKER).read_text())
    (folder / "leftover").touch()
    (folder / MARKER).write_text(json.dumps(marker | {"layout": 0}))
    assert converted_folder(source, silent) == folder
    assert not (folder / "leftover").exists()
    (folder / MARKER).unlink()
    converted_folder(source, silent)
    assert (folder / MARKER).is_file()


def test_a_damaged_marker_says_what_to_remove(source: Path) -> None:
    folder = converted_folder(source, silent)
    (folder / MARKER).write_text("{")
    with pytest.raises(ModelFileError, match="remove the folder"):
        converted_folder(source, silent)


def _convert_in_child(source: Path, told: Any) -> None:
    converted_folder(source, lambda message: told.put(message))


def test_processes_that_convert_at_once_do_it_once(source: Path, cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    children = [context.Process(target=_convert_in_child, args=(source, told)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    told.get()
    assert told.empty()
    assert len(folders(cache)) == 1


def cut(count: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:-count]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (cut(1), r"expected \d+ bytes, found \d+; .*cut short"),
        (cut(200_000), r"expected \d+ bytes, found"),
        (lambda data: data[:300], "ends at byte 300, inside its header"),
        (lambda data: data[:3], r"starts with b'GGU'"),
        (lambda data: b"", r"empty \(0 bytes\)"),
        (lambda data: b"PK\x03\x04" + data[4:], "no GGUF file"),
        (lambda data: data[:4] + b"\x09" + data[5:], "version 9 is unknown"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "out of range"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_a_damaged_file_is_refused_before_any_work(
    source: Path, cache: Path, tmp_path: Path, damage: Callable[[bytes], bytes], match: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage(source.read_bytes()))
    with pytest.raises(ModelFileError, match=match):
        check_gguf(path)
    with pytest.raises(ModelFileError, match=r"bad\.gguf"):
        converted_folder(path, silent)
    assert not cache.exists()


def test_an_architecture_that_nobody_knows(source: Path, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(source.read_bytes().replace(b"llama", b"lamas"))
    with pytest.raises(ModelFileError, match=r"odd\.gguf: transformers cannot read this"):
        converted_folder(path, silent)
    assert folders(cache) == []


def test_no_room_on_the_disk(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(source.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ModelFileError, match="RQ_CACHE"):
        converted_folder(source, silent)


def test_a_cache_folder_that_cannot_be_made(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RQ_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelFileError, match="set RQ_CACHE elsewhere"):
        converted_folder(source, silent)
