"""Damaged checkpoints are refused by name, with numbers, before anything is loaded."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rotaryquant.errors import ModelFileError
from rotaryquant.weights.headers import INDEX_NAME, SINGLE_NAME, read_folder, read_header


def sharded(folder: Path) -> Path:
    """Three shards of two tensors and their index."""
    weight_map = {}
    for shard in range(3):
        name = f"model-0000{shard + 1}-of-00003.safetensors"
        tensors = {f"layer.{shard}.{part}": torch.ones(4, 8, dtype=torch.bfloat16) for part in ("a", "b")}
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def second(folder: Path) -> Path:
    return folder / "model-00002-of-00003.safetensors"


def test_a_whole_checkpoint_is_read(tmp_path: Path) -> None:
    tensors = read_folder(sharded(tmp_path))
    assert sorted(t.name for t in tensors) == [f"layer.{n}.{part}" for n in range(3) for part in "ab"]
    assert {(t.dtype, t.shape, t.nbytes, t.elements) for t in tensors} == {("BF16", (4, 8), 64, 32)}


@pytest.mark.parametrize("cut", [1, 64])
def test_a_cut_shard(tmp_path: Path, cut: int) -> None:
    path = second(sharded(tmp_path))
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ModelFileError, match=rf"00002.*expected {whole} bytes, found {whole - cut}; .*cut short"):
        read_folder(tmp_path)


def test_a_shard_cut_inside_its_header(tmp_path: Path) -> None:
    path = second(sharded(tmp_path))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ModelFileError, match=r"00002.*header, found 40"):
        read_folder(tmp_path)


def test_an_empty_shard(tmp_path: Path) -> None:
    second(sharded(tmp_path)).write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"00002.*0 bytes"):
        read_folder(tmp_path)


def test_a_pointer_in_place_of_the_data(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456789\n"
    second(sharded(tmp_path)).write_text(text)
    with pytest.raises(ModelFileError, match=rf"00002.*pointer of {len(text)} bytes.*git lfs pull"):
        read_folder(tmp_path)


def test_a_missing_shard(tmp_path: Path) -> None:
    second(sharded(tmp_path)).unlink()
    with pytest.raises(ModelFileError, match="1 of 3 shards are missing, first model-00002"):
        read_folder(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    save_file({"layer.0.a": torch.ones(1), "layer.1.a": torch.ones(1)}, second(sharded(tmp_path)))
    with pytest.raises(ModelFileError, match=r"layer\.0\.a is in model-00001.* and again in model-00002"):
        read_folder(tmp_path)


def test_an_index_that_names_an_absent_tensor(tmp_path: Path) -> None:
    path = sharded(tmp_path) / INDEX_NAME
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match="ghost, but no shard holds it"):
        read_folder(tmp_path)


def test_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    path = sharded(tmp_path) / INDEX_NAME
    index = json.loads(path.read_text())
    del index["weight_map"]["layer.2.b"]
    path.write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"layer\.2\.b, which .* does not name"):
        read_folder(tmp_path)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/passwd"])
def test_an_index_that_leaves_its_folder(tmp_path: Path, shard: str) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelFileError, match="outside its own folder"):
        read_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    (sharded(tmp_path) / INDEX_NAME).write_text(text)
    with pytest.raises(ModelFileError, match=INDEX_NAME.replace(".", r"\.")):
        read_folder(tmp_path)


def raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "match"),
    [
        (b"not json", b"", "not the JSON"),
        ([], b"", "not the JSON"),
        ({"a": 3}, b"", "not the JSON"),
        ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, b"x" * 8, "lacks dtype, shape"),
        ({"a": entry(0, 8, "F12")}, b"x" * 8, "F12"),
        ({"a": entry(0, 8, shape=(-2,))}, b"x" * 8, "no reader knows"),
        ({"a": entry(0, 8, shape=(3,))}, b"x" * 8, r"needs 12 bytes, found 8"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12, "b starts at byte 4, expected 8"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, b"x" * 20, "b starts at byte 12, expected 8"),
        ({"a": entry(0, 8)}, b"x" * 9, "bytes follow the last tensor"),
    ],
)
def test_a_header_that_does_not_add_up(tmp_path: Path, header: object, data: bytes, match: str) -> None:
    with pytest.raises(ModelFileError, match=match):
        read_header(raw(tmp_path / SINGLE_NAME, header, data))


def test_a_header_length_of_two_to_the_sixty(tmp_path: Path) -> None:
    path = tmp_path / SINGLE_NAME
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(ModelFileError, match=f"claims {1 << 60} bytes"):
        read_folder(tmp_path)


def test_folders_without_safetensors_say_what_they_hold(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="holds no weights"):
        read_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"pickle.*convert the model to safetensors"):
        read_folder(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelFileError, match="rename it"):
        read_folder(tmp_path)
    save_file({"b": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelFileError, match="fetch the index"):
        read_folder(tmp_path)
