"""How transformers loads a checkpoint with packed weights: `AutoModelForCausalLM.from_pretrained(FOLDER)`.

transformers finds the method by its name in config.json once this module is imported: as soon as both transformers and
`rotaryquant` are (`rotaryquant._registration`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from rotaryquant.errors import ModelFileError
from rotaryquant.formats.weight import WeightFormat
from rotaryquant.integrations.transformers.packed_modules import PackedEmbedding, PackedExperts, PackedLinear
from rotaryquant.models.roles import SCALE, layer_number, parts_of
from rotaryquant.weights.packed_config import METHOD, PackedConfig

if TYPE_CHECKING:  # transformers imports this module while it imports its models
    from transformers import PreTrainedModel


@register_quantization_config(METHOD)
class RotaryQuantConfig(QuantizationConfigMixin):
    """`quantization_config` as transformers carries it. packed: what it says."""

    def __init__(self, **fields: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.packed = PackedConfig.from_dict(fields)

    def to_dict(self) -> dict[str, Any]:
        """For config.json."""
        return {"quant_method": METHOD, **self.packed.as_dict()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Everything: there are no defaults to leave out."""
        return self.to_dict()


@register_quantizer(METHOD)
class RotaryQuantizer(HfQuantizer):
    """Puts packed modules in the place of a model's own before its weights are read."""

    requires_calibration = False
    #: A packed parameter is two tensors in the file; merges of experts are made of both.
    serialized_names: dict[str, list[str]] = {"weight": ["weight", "weight" + SCALE]}  # noqa: RUF012 - as declared there

    def _process_model_before_weight_loading(self, model: "PreTrainedModel", **_: Any) -> None:
        assert isinstance(self.quantization_config, RotaryQuantConfig)
        config = self.quantization_config.packed
        shapes = {name: tuple(own.shape) for name, own in model.named_parameters(remove_duplicate=False)}
        forms = _forms(config, shapes, getattr(model, "all_tied_weights_keys", {}))
        dtype = model.dtype  # asked for before there are scales, which have one of their own
        by_module: dict[str, dict[str, WeightFormat]] = {}
        for parameter, form in forms.items():
            path, leaf = parameter.rpartition(".")[::2]
            by_module.setdefault(path, {})[leaf] = form
        for path, leaves in by_module.items():
            with torch.device("meta"):
                model.set_submodule(path, _replacement(model.get_submodule(path), leaves, dtype))
        for target, source in list(getattr(model, "all_tied_weights_keys", {}).items()):
            if source in forms:
                model.all_tied_weights_keys[target + SCALE] = source + SCALE

    def update_weight_conversions(self, weight_conversions: list[Any], model: "PreTrainedModel") -> list[Any]:
        """Scales go where their codes go, also where a tensor is only renamed (Granite's experts)."""
        names = dict(model.named_parameters())
        scaled = {name.removesuffix(SCALE) for name in names if name.endswith(SCALE)}
        updated = []
        for conversion in super().update_weight_conversions(weight_conversions, model):  # type: ignore[no-untyped-call]
            sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
            if type(conversion) is WeightRenaming and any(name.endswith(f".{targets[0]}") for name in scaled):
                updated.append(conversion.copy([sources[0] + SCALE], [targets[0] + SCALE]))
            updated.append(conversion)
        return updated

    def get_state_dict_and_metadata(self, model: "PreTrainedModel") -> tuple[dict[str, Any], dict[str, str]]:
        """What is saved: scales as they came, whatever dtype the model runs in; tied ones stay one tensor."""
        stored: dict[int, torch.Tensor] = {}
        state = model.state_dict()
        for name, tensor in state.items():
            if name.endswith(SCALE) and name.removesuffix(SCALE) in state:
                state[name] = stored.setdefault(tensor.data_ptr(), tensor.to(torch.bfloat16))
        return state, {}

    @property
    def is_trainable(self) -> bool:
        """Codes have no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Nothing in the modules keeps a graph from being made."""
        return True

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """`save_pretrained` writes what was read."""
        return True


def _forms(
    config: PackedConfig, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]
) -> dict[str, WeightFormat]:
    """Formats of a model's parameters by name; those that stay as they were are left out."""
    found: dict[str, WeightFormat] = {}
    parts = parts_of(shapes)
    for name, part in parts.items():
        if (
            name not in tied
            and len(shapes[name]) in (2, 3)
            and (form := config.form_of(part, layer_number(name), shapes[name][-1]))
        ):
            found[name] = form
    found |= {target: found[source] for target, source in tied.items() if source in found}
    if missing := [part for part in config.bits if part not in parts.values()]:
        raise ModelFileError(
            f"config.json: quantization_config has bits of '{missing[0]}', but the model has no such tensor"
        )
    return found


def _replacement(module: nn.Module, forms: dict[str, WeightFormat], dtype: torch.dtype) -> nn.Module:
    """The packed module for one of a model's own. dtype: of the model."""
    if isinstance(module, nn.Embedding):
        return PackedEmbedding(module, forms["weight"], dtype)
    if isinstance(module, nn.Linear):
        return PackedLinear(module, forms["weight"], dtype)
    return PackedExperts(module, forms, dtype)
