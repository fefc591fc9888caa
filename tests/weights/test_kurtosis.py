"""Kurtosis of numbers whose kurtosis is known, and of a checkpoint by role."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rotaryquant.errors import ModelFileError
from rotaryquant.models.roles import Role, roles_of
from rotaryquant.weights.headers import read_folder
from rotaryquant.weights.kurtosis import excess_kurtosis, kurtosis_by_role


def test_of_known_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(1_000_000, generator=generator)
    uniform = torch.rand(1_000_000, generator=generator)
    assert excess_kurtosis(normal + 7.0) == pytest.approx(0.0, abs=0.02)
    assert excess_kurtosis(uniform) == pytest.approx(-1.2, abs=0.01)
    assert excess_kurtosis(torch.tensor([1.0, -1.0]).repeat(50)) == pytest.approx(-2.0)
    assert excess_kurtosis(torch.full((9,), 3.0)) == 0.0
    assert excess_kurtosis(torch.tensor([2000.0, -2000.0], dtype=torch.float16)) == pytest.approx(-2.0)  # fp64 sums


def test_by_role_each_tensor_counts_as_its_elements(tmp_path: Path) -> None:
    two, uniform = torch.tensor([1.0, -1.0]).repeat(2, 8), torch.rand(40, 1000)
    save_file(
        {
            "model.layers.0.mlp.experts.0.up_proj.weight": two,
            "model.layers.0.mlp.experts.1.up_proj.weight": 100.0 * uniform.to(torch.bfloat16),
            "model.layers.0.mlp.gate.weight": two.clone(),
            "model.norm.weight": torch.ones(16),
        },
        tmp_path / "model.safetensors",
    )
    tensors = read_folder(tmp_path)
    said: list[float] = []
    found = kurtosis_by_role(tensors, roles_of(t.name for t in tensors), lambda _, share: said.append(share))
    assert list(found) == [Role.ROUTED_EXPERT, Role.ROUTER]
    assert found[Role.ROUTER] == pytest.approx(-2.0)
    expected = (-2.0 * 32 + excess_kurtosis(100.0 * uniform.to(torch.bfloat16)) * 40_000) / 40_032
    assert found[Role.ROUTED_EXPERT] == pytest.approx(expected)
    assert said[-1] == 1.0


def test_quantised_weights_have_none(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(4, 4, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    tensors = read_folder(tmp_path)
    with pytest.raises(ModelFileError, match=r"lm_head.weight holds U8"):
        kurtosis_by_role(tensors, {"lm_head.weight": Role.HEAD}, lambda *_: None)
