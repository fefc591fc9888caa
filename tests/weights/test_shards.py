"""Files written tensor by tensor: what a reader finds, what a stop leaves, and what is refused."""

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rotaryquant.errors import ModelFileError
from rotaryquant.weights.headers import read_header
from rotaryquant.weights.shards import Entry, ShardWriter

TENSORS: dict[str, Tensor] = {
    "codes": torch.arange(24, dtype=torch.uint8).view(2, 3, 4),
    "scale": torch.randn(2, 3).to(torch.bfloat16),
    "norm": torch.randn(5),
    "empty": torch.zeros(0, 4, dtype=torch.float16),
}
NAMES = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
ENTRIES = [Entry(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def write(path: Path, count: int = len(ENTRIES)) -> ShardWriter:
    with ShardWriter(path, ENTRIES) as writer:
        for entry in ENTRIES[writer.done : count]:
            writer.add([TENSORS[entry.name]])
        if count == len(ENTRIES):
            writer.finish()
    return writer


def test_a_whole_file_is_read_by_others(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path)
    found = load_file(path)
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in TENSORS.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert [tensor.name for tensor in read_header(path)] == list(TENSORS)
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("count", range(len(ENTRIES)))
def test_a_stopped_file_is_no_checkpoint_and_goes_on_where_it_was(tmp_path: Path, count: int) -> None:
    whole, path = tmp_path / "whole.safetensors", tmp_path / "model.safetensors"
    write(whole)
    write(path, count)
    assert not path.exists()
    with (tmp_path / "model.safetensors.partial").open("ab") as file:
        file.write(b"half of the next tensor")
    assert ShardWriter(path, ENTRIES).done == count
    write(path)
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("damage", ["state", "header", "short", "count", "other"])
def test_what_cannot_be_trusted_is_written_anew(tmp_path: Path, damage: str) -> None:
    path, partial, state = (tmp_path / f"m.safetensors{end}" for end in ("", ".partial", ".state"))
    write(path, 3)
    if damage == "state":
        state.write_text("{")
    elif damage == "header":
        partial.write_bytes(b"x" + partial.read_bytes()[1:])
    elif damage == "short":
        partial.write_bytes(partial.read_bytes()[:-1])
    elif damage == "count":
        state.write_text(json.dumps({"done": 99}))
    entries = ENTRIES[:-1] if damage == "other" else ENTRIES
    assert ShardWriter(path, entries).done == 0


def test_other_tensors_than_planned_and_missing_ones_are_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "m.safetensors", ENTRIES)
    with pytest.raises(ModelFileError, match="was planned"):
        writer.add([torch.zeros(3)])
    with pytest.raises(ModelFileError, match="4 tensors were not written"):
        writer.finish()


def test_a_full_disk_says_what_is_still_to_come_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    writer = ShardWriter(path, ENTRIES)
    writer.add([TENSORS["codes"]])

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rotaryquant.weights.shards.os.fsync", full)
        with pytest.raises(ModelFileError, match="No space left on device; 32 bytes of this file are still to come"):
            writer.add([TENSORS["scale"]])
    assert ShardWriter(path, ENTRIES).done == 1
