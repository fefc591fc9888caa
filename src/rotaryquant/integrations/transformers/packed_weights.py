"""How transformers loads a checkpoint with packed weights: `AutoModelForCausalLM.from_pretrained(FOLDER)`.

transformers finds the method by its name in config.json once this module is imported: as soon as both transformers and
`rotaryquant` are (`rotaryquant._registration`). A checkpoint that is not packed is packed while it is loaded where a
`RotaryQuantConfig` with a recipe is given for it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from rotaryquant.errors import ConfigError, ModelFileError
from rotaryquant.formats.weight import WeightFormat
from rotaryquant.integrations.transformers.packed_modules import (
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    PackedModule,
)
from rotaryquant.models.roles import INPUTS, SCALE, UP_INPUTS, Part, layer_number, packed_name, parts_of
from rotaryquant.weights.packed_config import METHOD, PackedConfig
from rotaryquant.weights.recipes import Recipe, bits_of, parse_recipe
from rotaryquant.weights.rounding import round_matrix

if TYPE_CHECKING:  # transformers imports this module while it imports its models
    from transformers import PreTrainedModel


@register_quantization_config(METHOD)
class RotaryQuantConfig(QuantizationConfigMixin):
    """`quantization_config` as transformers carries it: what config.json says of a packed checkpoint, or for one that
    is to be packed while it is loaded `recipe`, and if wanted `grid`, `group` and `seed`, each weight to its nearest
    level. packed: what it says; without bits until the tensors are known.
    """

    def __init__(self, **fields: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        own = {name: value for name, value in fields.items() if name != "quant_method"}
        self.recipe: Recipe | None = None
        if "bits" in own:
            self.packed = PackedConfig.from_dict(own)
            return
        if unknown := sorted(set(own) - {"recipe", "grid", "group", "seed"}):
            raise ConfigError(f"RotaryQuantConfig: {unknown[0]} is unknown; valid: recipe, grid, group, seed")
        self.recipe = parse_recipe(own.pop("recipe", "role-4-2-8"))
        self.packed = PackedConfig(**own)

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
    #: A packed parameter is two or three tensors in the file; merges of experts are made of all.
    serialized_names: dict[str, list[str]] = {  # noqa: RUF012 - as declared there
        "weight": ["weight", "weight" + SCALE, "weight" + INPUTS]
    }

    def _process_model_before_weight_loading(self, model: "PreTrainedModel", **_: Any) -> None:
        assert isinstance(self.quantization_config, RotaryQuantConfig)
        shapes = {name: tuple(own.shape) for name, own in model.named_parameters(remove_duplicate=False)}
        tied = getattr(model, "all_tied_weights_keys", {})
        if (recipe := self.quantization_config.recipe) is not None:
            own = {name: shape for name, shape in shapes.items() if name not in tied}
            self.quantization_config.packed = _with_bits(self.quantization_config.packed, recipe, own)
        forms = _forms(self.quantization_config.packed, shapes, tied)
        dtype = model.dtype  # asked for before there are scales, which have one of their own
        by_module: dict[str, dict[str, WeightFormat]] = {}
        for parameter, form in forms.items():
            path, leaf = parameter.rpartition(".")[::2]
            by_module.setdefault(path, {})[leaf] = form
        factors = self.quantization_config.packed.factors
        for path, leaves in by_module.items():
            with torch.device("meta"):
                model.set_submodule(path, _replacement(model.get_submodule(path), leaves, dtype, factors))
        for target, source in list(getattr(model, "all_tied_weights_keys", {}).items()):
            for end in (SCALE, INPUTS) if factors else (SCALE,):
                if source in forms:
                    model.all_tied_weights_keys[target + end] = source + end

    def param_needs_quantization(self, model: "PreTrainedModel", param_name: str, **_: Any) -> bool:
        """Whether a tensor of a checkpoint that is not packed becomes codes."""
        path, leaf = param_name.rpartition(".")[::2]
        module = model.get_submodule(path)
        return isinstance(module, PackedModule) and module.has(leaf)

    def get_quantize_ops(self) -> ConversionOps:
        """What makes codes of it."""
        return _Rounding()

    def update_weight_conversions(self, weight_conversions: list[Any], model: "PreTrainedModel") -> list[Any]:
        """Scales and factors go where their codes go, also where a tensor is only renamed (Granite's experts)."""
        names = dict(model.named_parameters())
        scaled = {name.removesuffix(SCALE) for name in names if name.endswith(SCALE)}
        updated = []
        for conversion in super().update_weight_conversions(weight_conversions, model):  # type: ignore[no-untyped-call]
            sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
            if type(conversion) is WeightRenaming and any(name.endswith(f".{targets[0]}") for name in scaled):
                updated += [conversion.copy([sources[0] + end], [targets[0] + end]) for end in (SCALE, INPUTS)]
            updated.append(conversion)
        return updated

    def get_state_dict_and_metadata(self, model: "PreTrainedModel") -> tuple[dict[str, Any], dict[str, str]]:
        """What is saved: scales and factors as they came, in whichever dtype they run; tied ones stay one tensor."""
        stored: dict[int, torch.Tensor] = {}
        state = model.state_dict()
        for name, tensor in state.items():
            if name.endswith(UP_INPUTS) or (packed_name(name) != name and packed_name(name) in state):
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


class _Rounding(ConversionOps):
    """Matrices and stacks of them, each weight to its nearest level."""

    def convert(  # type: ignore[override] # the loader passes everything by name
        self, input_dict: dict[str, Any], *, model: "PreTrainedModel", **_: Any
    ) -> dict[str, torch.Tensor]:
        """Codes and scales by the parameters' names."""
        made: dict[str, torch.Tensor] = {}
        for name, value in input_dict.items():
            path, leaf = name.rpartition(".")[::2]
            module = model.get_submodule(path)
            assert isinstance(module, PackedModule)
            whole = value[0] if isinstance(value, list) else value
            matrices = whole if whole.dim() == 3 else whole[None]
            packed = [round_matrix(matrix, module.form(leaf)) for matrix in matrices]
            codes, scales = torch.stack([one.codes for one in packed]), torch.stack([one.scales for one in packed])
            made[name] = codes.view(*whole.shape[:-1], -1)
            made[name + SCALE] = scales.view(*whole.shape[:-1], -1).to(getattr(module, leaf + SCALE).dtype)
        return made


def _with_bits(base: PackedConfig, recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> PackedConfig:
    """What a recipe says of a model's parameters, those of them that have a packed form."""
    parts = parts_of(shapes)
    matrices = {name: part for name, part in parts.items() if len(shapes[name]) in (2, 3)}
    bits: dict[Part, dict[int | None, int]] = {}
    for name, own in bits_of(recipe, matrices).items():
        if base.form(shapes[name][-1], own) is not None:
            bits.setdefault(parts[name], {})[layer_number(name)] = own
    return base.with_bits(recipe.name, bits)


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


def _replacement(module: nn.Module, forms: dict[str, WeightFormat], dtype: torch.dtype, factors: bool) -> nn.Module:
    """The packed module for one of a model's own. dtype: of the model. factors: whether its inputs have some."""
    if isinstance(module, nn.Embedding):
        return PackedEmbedding(module, forms["weight"], dtype, factors)
    if isinstance(module, nn.Linear):
        return PackedLinear(module, forms["weight"], dtype, factors)
    return PackedExperts(module, forms, dtype, factors)
