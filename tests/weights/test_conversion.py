"""Checkpoints to packed ones: what is planned, memory, stops at any point, several files, and what is refused."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rotaryquant.errors import ConfigError, ModelFileError, UnsupportedModelError
from rotaryquant.formats.weight import BITS
from rotaryquant.models.roles import Part, Role, Side, parts_of
from rotaryquant.weights import conversion
from rotaryquant.weights.conversion import convert, sizes_of
from rotaryquant.weights.headers import read_folder
from rotaryquant.weights.packed_config import PackedConfig, weights_of
from rotaryquant.weights.recipes import RECIPES, ROUNDED, Recipe, bits_of, by_role, parse_recipe

BASE = PackedConfig()


def checkpoint(folder: Path, layers: int = 2, experts: int = 3, hidden: int = 64) -> Path:
    """A folder with the tensors of a routed model of random numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": normal(96, hidden), "model.norm.weight": normal(hidden)}
    for layer in range(layers):
        own = f"model.layers.{layer}."
        for name in "qkvo":
            tensors[f"{own}self_attn.{name}_proj.weight"] = normal(hidden, hidden)
        tensors[f"{own}mlp.gate.weight"] = normal(experts, hidden)
        tensors[f"{own}mlp.shared_expert.up_proj.weight"] = normal(48, hidden)
        for expert in range(experts):
            tensors[f"{own}mlp.experts.{expert}.up_proj.weight"] = normal(32, hidden)
            tensors[f"{own}mlp.experts.{expert}.down_proj.weight"] = normal(hidden, 32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


def hearing(name: str) -> Tensor:
    """Moments of inputs of 64 or 32 columns, of very different sizes, other ones for every name."""
    width = 32 if name.endswith("down_proj.weight") else 64
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    inputs = torch.randn(400, width, generator=generator) * torch.logspace(-1, 1, width)
    return inputs.T @ inputs / 400


def run(folder: Path, out: Path, recipe: str = "role-4-2-8", **options: Any) -> list[dict[str, Any]]:
    base = options.get("base", BASE)
    return convert(folder, out, RECIPES[recipe], base, options.get("hessian", lambda _: None), lambda *_: None)


def test_a_packed_checkpoint_has_the_old_names_and_scales_beside_them(tmp_path: Path) -> None:
    log = run(checkpoint(tmp_path / "in"), tmp_path / "out")
    whole, packed = load_file(tmp_path / "in" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    rounded = {name for name in whole if "proj" in name or "embed" in name}
    assert set(packed) == set(whole) | {name + "_scale" for name in rounded}
    assert packed["model.layers.0.mlp.experts.1.up_proj.weight"].shape == (32, 64 * 2 // 8)
    assert packed["model.layers.0.mlp.shared_expert.up_proj.weight_scale"].shape == (48, 2)
    assert torch.equal(packed["model.layers.1.mlp.gate.weight"], whole["model.layers.1.mlp.gate.weight"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.safetensors", "config.json", "tokenizer.json", "quantization-log.jsonl",
    }  # fmt: skip
    read_folder(tmp_path / "out")
    assert {said["name"] for said in log} == set(whole)
    assert sum(said["nbytes"] for said in log) == sum(tensor.nbytes for tensor in packed.values())
    by_bits = {said["bits"]: said["relative_error"] for said in log}
    assert 0.06 < by_bits[2] < 0.11
    assert by_bits[4] < 0.01
    assert by_bits[8] < 1e-4
    assert by_bits[None] == 0.0
    written = (tmp_path / "out" / "quantization-log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == log


def test_the_configuration_names_bits_by_role_and_layer_and_reads_back(tmp_path: Path) -> None:
    run(checkpoint(tmp_path / "in", layers=3), tmp_path / "out", "role-4-2-8-edge")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "none"
    own = config["quantization_config"]
    assert own["quant_method"] == "rotaryquant"
    assert own["bits"]["routed expert"] == {"0": 4, "1": 2, "2": 4}
    assert own["bits"]["embedding"] == {"": 4}
    packed = PackedConfig.from_dict(own)
    assert packed.as_dict() == {key: value for key, value in own.items() if key != "quant_method"}
    form = packed.form_of(Part(Role.ROUTED_EXPERT, Side.OUT), 1, 64)
    assert form is not None
    assert (form.bits, form.grid, form.group, form.seed) == (2, "trellis", 64, 0)
    assert packed.form_of(Part(Role.ROUTER, Side.IN), 1, 64) is None
    assert packed.form_of(Part(Role.ROUTED_EXPERT, Side.IN), 9, 64) is None


def test_several_files_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "in")
    run(folder, tmp_path / "one")
    monkeypatch.setattr(conversion, "_SHARD_BYTES", 10_000)
    run(folder, tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    found = {tensor.name for tensor in read_folder(tmp_path / "many")}  # checks the index too
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert found == set(one)
    many = {name: t for path in (tmp_path / "many").glob("*.safetensors") for name, t in load_file(path).items()}
    assert all(torch.equal(many[name], tensor) for name, tensor in one.items())


def test_stacks_are_rounded_matrix_by_matrix_each_with_its_own_inputs(tmp_path: Path) -> None:
    stack = torch.randn(3, 32, 64)
    (tmp_path / "in").mkdir()
    save_file({"model.layers.0.experts.down_proj": stack}, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    (tmp_path / "in" / "config.json").write_text("{}")
    inputs = torch.randn(3, 500, 64) @ torch.diag(torch.linspace(0.1, 3.0, 64))
    hessians = inputs.mT @ inputs / 500
    run(tmp_path / "in", tmp_path / "plain")
    run(tmp_path / "in", tmp_path / "heard", hessian=lambda _: hessians)
    plain, heard = (load_file(tmp_path / one / "model.safetensors") for one in ("plain", "heard"))
    name = "model.layers.0.experts.down_proj"
    assert plain[name].shape == heard[name].shape == (3, 32, 16)
    assert not torch.equal(plain[name], heard[name])
    for number in range(3):
        alone = convert_matrix(stack[number], hessians[number])
        assert torch.equal(heard[name][number], alone)


def test_factors_are_counted_and_stand_once_where_experts_share_them(tmp_path: Path) -> None:
    base = PackedConfig(method="awq", text="a", tokens=9)
    log = run(checkpoint(tmp_path / "in"), tmp_path / "out", base=base, hessian=hearing)
    packed = load_file(tmp_path / "out" / "model.safetensors")
    own = {name: tuple(tensor.shape) for name, tensor in packed.items() if name.endswith("_inputs")}
    assert own["model.layers.0.mlp.experts.up_inputs"] == (64,)
    assert own["model.layers.0.mlp.experts.1.down_proj.weight_inputs"] == (32,)
    assert own["model.layers.1.self_attn.q_proj.weight_inputs"] == (64,)
    assert "model.layers.0.mlp.experts.1.up_proj.weight_inputs" not in own
    assert len(own) == 1 + 2 * (4 + 1 + 1 + 3)
    assert all(packed[name].dtype == torch.bfloat16 for name in own)
    assert sum(said["nbytes"] for said in log) == sum(tensor.nbytes for tensor in packed.values())
    config = PackedConfig.from_dict(json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"])
    assert config.factors
    sizes = weights_of(read_folder(tmp_path / "out"), config)
    assert sum(nbytes for _, nbytes in sizes.values()) == sum(tensor.nbytes for tensor in packed.values())
    assert sum(weights for weights, _ in sizes.values()) == sum(said["elements"] for said in log)


def convert_matrix(matrix: Tensor, hessian: Tensor) -> Tensor:
    from rotaryquant.weights.rounding import round_matrix

    form = BASE.form(64, 2)
    assert form is not None
    return round_matrix(matrix, form, hessian).codes


STOPPED = """
import sys
sys.path.insert(0, sys.argv[4])
from pathlib import Path
from rotaryquant.weights.conversion import convert, sizes_of
from rotaryquant.weights.packed_config import PackedConfig
from rotaryquant.weights.recipes import RECIPES
from test_conversion import hearing
heard = hearing if sys.argv[3] == "awq" else lambda _: None
convert(Path(sys.argv[1]), Path(sys.argv[2]), RECIPES["role-4-2-8"], PackedConfig(method=sys.argv[3]), heard,
        lambda message, share: print(share, flush=True))
"""


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_killed_at_ten_points_it_ends_as_if_it_had_not_been(tmp_path: Path, method: str) -> None:
    folder = checkpoint(tmp_path / "in", layers=6, experts=8)
    options: dict[str, Any] = {"base": PackedConfig(method=method)}
    if method == "awq":
        options["hessian"] = hearing
    run(folder, tmp_path / "whole", **options)
    draw = random.Random(0)
    killed = 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", STOPPED, folder, tmp_path / "out", method, str(Path(__file__).parent)],
            stdout=subprocess.PIPE, env={**os.environ},
        )  # fmt: skip
        assert process.stdout is not None
        for _line in range(draw.randrange(1, 14)):
            process.stdout.readline()
        time.sleep(draw.random() * 0.01)
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert killed >= 8
    assert not (tmp_path / "out" / "config.json").exists()
    run(folder, tmp_path / "out", **options)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


def test_another_model_of_the_same_shape_does_not_go_on_where_one_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_finish_config", stop)
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint(tmp_path / "in"), tmp_path / "out")
    other = checkpoint(tmp_path / "other")
    with pytest.raises(ModelFileError, match="not of this conversion"):
        run(other, tmp_path / "out")
    with pytest.raises(ModelFileError, match="not of this conversion"):
        run(tmp_path / "in", tmp_path / "out", base=PackedConfig(method="gptq", text="a", tokens=9))
    run(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("step", ["_write_index", "_finish_config", "unlink"])
def test_stopped_in_its_last_steps_it_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    folder = checkpoint(tmp_path / "in")
    monkeypatch.setattr(conversion, "_SHARD_BYTES", 10_000)
    run(folder, tmp_path / "whole")

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if step == "unlink":
            unlink = Path.unlink
            patch.setattr(
                Path, "unlink", lambda path, **o: stop() if path.name == conversion._NOTE else unlink(path, **o)
            )
        else:
            patch.setattr(conversion, step, stop)
        with pytest.raises(KeyboardInterrupt):
            run(folder, tmp_path / "out")
    log = run(folder, tmp_path / "out")
    assert len(log) == len({said["name"] for said in log}) > 20
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(list((tmp_path / "out").iterdir())) == len(list((tmp_path / "whole").iterdir()))


PEAK = """
import resource, sys
from pathlib import Path
from rotaryquant.weights.conversion import convert, sizes_of
from rotaryquant.weights.packed_config import PackedConfig
from rotaryquant.weights.recipes import RECIPES
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
base = PackedConfig("normal")
convert(Path(sys.argv[1]), Path(sys.argv[2]), RECIPES["uniform-4"], base, lambda _: None, lambda *_: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    """Four times the layers, and the peak above the imports grows by a fifth at most (in KiB)."""

    def peak(layers: int) -> int:
        folder = checkpoint(tmp_path / f"in{layers}", layers, experts=8, hidden=512)
        out = subprocess.run(
            [sys.executable, "-c", PEAK, folder, tmp_path / f"out{layers}"], capture_output=True, text=True, check=True
        )
        return int(out.stdout)

    shallow, deep = peak(4), peak(16)
    size = (tmp_path / "in16" / "model.safetensors").stat().st_size / 1024
    assert deep < 1.2 * shallow + 0.1 * size


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(ModelFileError, match="holds files that are not of this conversion"):
        run(folder, tmp_path / "out")
    run(folder, tmp_path / "done")
    with pytest.raises(ModelFileError, match="name another folder"):
        run(folder, tmp_path / "done")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_what_cannot_be_quantised_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"

    def refused(error: type[Exception], said: str, **changed: Tensor) -> None:
        save_file({**tensors, **changed}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(error, match=said):
            run(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused(ModelFileError, f"{name} is U8, wanted one of F32", **{name: torch.zeros(64, 8, dtype=torch.uint8)})
    refused(UnsupportedModelError, "tensor 'model.layers.0.mystery'", **{"model.layers.0.mystery": torch.zeros(2, 2)})
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(ModelFileError, match="the download was probably cut short"):
        run(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bytes_that_are_planned_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "in")
    monkeypatch.setattr(conversion, "_SHARD_BYTES", 12_000)
    sizes, other = sizes_of(read_folder(folder), BASE)
    assert {str(part) for part, _ in sizes} == {
        "embedding", "attention", "attention value", "attention out", "shared expert", "routed expert",
        "routed expert out",
    }  # fmt: skip
    for bits in BITS:
        run(folder, tmp_path / str(bits), f"uniform-{bits}")
        written = sum(path.stat().st_size for path in (tmp_path / str(bits)).glob("*.safetensors"))
        planned = other + sum(of[bits] for of in sizes.values())
        assert planned - 2_000 < written <= planned


def test_single_parts_of_single_layers_have_bits_of_their_own(tmp_path: Path) -> None:
    places = {(Part(Role.ROUTED_EXPERT, Side.OUT), 1): 4, (Part(Role.ATTENTION, Side.VALUE), 0): 8}
    recipe = Recipe("own", by_role(3, 2, 2), places=places)
    folder = checkpoint(tmp_path / "in")
    convert(folder, tmp_path / "out", recipe, BASE, lambda _: None, lambda *_: None)
    bits = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["bits"]
    assert bits["routed expert out"] == {"0": 2, "1": 4}
    assert bits["routed expert"] == {"0": 2, "1": 2}
    assert bits["attention value"] == {"0": 8, "1": 3}
    assert bits["attention"] == {"0": 3, "1": 3}
    packed = load_file(tmp_path / "out" / "model.safetensors")
    assert packed["model.layers.1.mlp.experts.2.down_proj.weight"].shape == (64, 32 * 4 // 8)
    assert packed["model.layers.0.mlp.experts.2.down_proj.weight"].shape == (64, 32 * 2 // 8)


def test_recipes_are_data_and_keep_what_must_be_kept() -> None:
    parts = parts_of(
        (
            "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.gate.weight",
            "model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.2.mlp.experts.0.up_proj.weight",
            "model.layers.3.mlp.experts.0.down_proj.weight", "model.layers.3.mlp.shared_expert.up_proj.weight",
        )
    )  # fmt: skip
    assert list(bits_of(RECIPES["role-4-2-8"], parts).values()) == [4, 4, 2, 2, 2, 8]
    assert list(bits_of(RECIPES["role-4-2-8-edge"], parts).values()) == [4, 4, 4, 2, 4, 8]
    assert set(bits_of(RECIPES["uniform-3"], parts).values()) == {3}
    assert all("gate.weight" not in name for recipe in RECIPES.values() for name in bits_of(recipe, parts))
    with pytest.raises(ConfigError, match=r"recipe 'role-4-2' is unknown; valid: role-4-2-8, .*uniform-8, role-auto"):
        parse_recipe("role-4-2")
    with pytest.raises(ConfigError, match="bits of 'embedding' are 5"):
        Recipe("odd", dict.fromkeys(ROUNDED, 4) | {Role.EMBEDDING: 5})
    with pytest.raises(ConfigError, match="group=100 is unknown; valid: 32, 64, 128"):
        PackedConfig(group=100)
