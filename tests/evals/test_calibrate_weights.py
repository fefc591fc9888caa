"""Measuring what rounding each part of a model costs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rotaryquant.evals.calibrate_weights import measure_sensitivity
from rotaryquant.formats.weight import BITS
from rotaryquant.models.roles import parts_of
from rotaryquant.weights.packed_config import PackedConfig
from rotaryquant.weights.recipes import ROUNDED
from rotaryquant.weights.sensitivity import MeasuredFile, Sensitivity
from support.zoo import build

WINDOWS = [torch.randint(0, 90, (24,), generator=torch.Generator().manual_seed(1))]


def no_moments(name: str) -> Tensor | None:
    return None


def measured(model: PreTrainedModel, path: Path) -> list[Sensitivity]:
    file = MeasuredFile(path, {"model": "tiny"})
    return measure_sensitivity(model, WINDOWS, PackedConfig(group=32), no_moments, file, lambda *_: None)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "gemma4_moe", "nemotron_h"])
def test_every_part_is_measured_and_the_model_stays_as_it_was(family: str, tmp_path: Path) -> None:
    model = build(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = measured(model, tmp_path / "m.jsonl")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    named = dict(model.named_parameters())
    wanted = {part for name, part in parts_of(named).items() if part.role in ROUNDED and named[name].dim() > 1}
    assert {one.part for one in found} == wanted
    for one in found:
        assert len(one.errors) == len(BITS)
        assert one.errors[0] > one.errors[1] > one.errors[2] > one.errors[3] >= 0
    total = [sum(one.nats[at] for one in found) for at in range(3)]
    assert total[0] > total[1] > total[2] > 0


def test_a_part_that_nothing_hangs_on_costs_nothing(tmp_path: Path) -> None:
    model = build("glm4_moe")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()  # values go nowhere
    found = {(str(one.part), one.layer): one for one in measured(model, tmp_path / "m.jsonl")}
    assert found["attention value", 1].nats == pytest.approx((0.0, 0.0, 0.0), abs=1e-6)
    assert found["attention out", 1].errors == (0.0, 0.0, 0.0, 0.0)
    assert found["attention value", 0].nats[0] > 1e-5


def test_a_stopped_measurement_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = measured(build("glm4_moe"), tmp_path / "whole.jsonl")
    file = MeasuredFile(tmp_path / "part.jsonl", {"model": "tiny"})
    told = 0

    def stop(*_: object) -> None:
        nonlocal told
        told += 1
        if told == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_sensitivity(build("glm4_moe"), WINDOWS, PackedConfig(group=32), no_moments, file, stop)
    assert len(file.found) == 4
    assert measured(build("glm4_moe"), tmp_path / "part.jsonl") == whole
    assert (tmp_path / "part.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


def test_factors_are_measured_with_what_inputs_are(tmp_path: Path) -> None:
    model = build("glm4_moe")
    named = dict(model.named_parameters())

    def moments(name: str) -> Tensor:
        own = named[name]
        size = torch.logspace(-1, 1, own.shape[-1])
        moment = torch.diag(size)
        return moment if own.dim() == 2 else moment.expand(len(own), -1, -1)

    def found(method: str) -> list[Sensitivity]:
        file = MeasuredFile(tmp_path / f"{method}.jsonl", {"model": "tiny"})
        return measure_sensitivity(
            model, WINDOWS, PackedConfig(group=32, method=method), moments, file, lambda *_: None
        )

    scaled, cancelled = found("awq"), found("gptq")
    assert [(one.part, one.layer) for one in scaled] == [(one.part, one.layer) for one in cancelled]
    assert all(one.errors[0] > one.errors[1] > one.errors[2] > one.errors[3] > 0 for one in scaled)
    assert all(one.errors != other.errors for one, other in zip(scaled, cancelled, strict=True))
