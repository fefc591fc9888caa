"""What the configuration of a packed checkpoint says: `quantization_config` in its config.json."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rotaryquant.errors import ConfigError, ModelFileError, UnsupportedModelError
from rotaryquant.formats.weight import BITS, GRIDS, GROUPS, VERSION, WeightFormat, fit
from rotaryquant.models.roles import INPUTS, SCALE, UP_INPUTS, Part, Role, layer_number, packed_name, parts_of
from rotaryquant.weights.headers import TensorInfo

#: Name of the method, by which transformers finds its reader.
METHOD = "rotaryquant"

#: How codes are chosen, all but the first with a text that the model reads.
METHODS = ("rtn", "gptq", "awq")


@dataclass(frozen=True)
class PackedConfig:
    """How a checkpoint's weights are packed.

    grid, group: of `formats.weight`; 8 bits are always uniform, in groups of 32. seed: of the signs with which inputs
    are rotated, or None for none. method: of `METHODS`. text: fingerprint of what was read for all but "rtn", or "";
    tokens: how many of it.
    recipe: what chose the bits. bits: of each part by layer; under None those of a tensor outside of all layers.
    Tensors of parts and layers that are not named stay as they were.
    """

    grid: str = "trellis"
    group: int = 128
    seed: int | None = 0
    method: str = "rtn"
    text: str = ""
    tokens: int = 0
    recipe: str = ""
    bits: Mapping[Part, Mapping[int | None, int]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, valid in (("grid", GRIDS), ("group", GROUPS), ("method", METHODS)):
            if (value := getattr(self, name)) not in valid:
                raise ConfigError(f"{name}={value!r} is unknown; valid: {', '.join(map(str, valid))}")

    @property
    def factors(self) -> bool:
        """Whether each packed matrix has factors of its inputs."""
        return self.method == "awq"

    def form(self, width: int, bits: int) -> WeightFormat | None:
        """How rows of `width` are stored at so many bits, or None where they have no such form and stay as they are."""
        return fit(width, bits, self.grid, self.group, self.seed)

    def form_of(self, part: Part, layer: int | None, width: int) -> WeightFormat | None:
        """How a tensor of that part and layer is stored, or None where it is as it was."""
        bits = self.bits.get(part, {}).get(layer)
        return self.form(width, bits) if bits is not None else None

    def with_bits(self, recipe: str, bits: Mapping[Part, Mapping[int | None, int]]) -> "PackedConfig":
        """The same with what a recipe chose."""
        return dataclasses.replace(self, recipe=recipe, bits=bits)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for config.json."""
        by_part = {
            str(part): {"" if layer is None else str(layer): bits for layer, bits in sorted(layers.items(), key=_first)}
            for part, layers in sorted(self.bits.items())
        }
        return {
            "format_version": VERSION, "grid": self.grid, "group": self.group, "seed": self.seed,
            "method": self.method, "text": self.text, "tokens": self.tokens, "recipe": self.recipe, "bits": by_part,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PackedConfig":
        """The inverse of `as_dict`. Raises ModelFileError that names the field that is wrong."""
        where = "config.json: quantization_config"
        if data.get("format_version") != VERSION:
            raise ModelFileError(
                f"{where}: format_version={data.get('format_version')!r}, this package reads {VERSION}; quantise again"
            )
        try:
            bits = {
                Part.parse(part): {int(layer) if layer else None: int(each) for layer, each in layers.items()}
                for part, layers in data["bits"].items()
            }
            seed = None if data["seed"] is None else int(data["seed"])
            method, text, recipe = (str(data[name]) for name in ("method", "text", "recipe"))
            made = cls(str(data["grid"]), int(data["group"]), seed, method, text, int(data["tokens"]), recipe, bits)
        except KeyError as error:
            raise ModelFileError(f"{where}: {error} is missing; quantise again") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelFileError(f"{where}: {error}") from error
        if wrong := {each for layers in bits.values() for each in layers.values()} - set(BITS):
            raise ModelFileError(f"{where}: bits of {min(wrong)}; valid: {', '.join(map(str, BITS))}")
        return made


def config_in(folder: Path) -> PackedConfig | None:
    """What a checkpoint's config.json says of packed weights; None where they are not packed, or packed by others."""
    try:
        said = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{folder / 'config.json'}: {error}") from error
    own = said.get("quantization_config") if isinstance(said, dict) else None
    return PackedConfig.from_dict(own) if isinstance(own, dict) and own.get("quant_method") == METHOD else None


def weights_of(tensors: Sequence[TensorInfo], config: PackedConfig | None) -> dict[str, tuple[int, int]]:
    """Weights and bytes of each tensor of a checkpoint by name, scales and factors counted with the codes they are of.

    Factors that experts share stand for themselves, with no weights.

    config: of a packed checkpoint, None of any other. Raises ModelFileError where codes stand beside scales but the
    configuration says nothing of them, or the other way round.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    parts, found = parts_of(by_name), {}
    for name, tensor in by_name.items():
        if packed_name(name) != name and packed_name(name) in by_name:
            continue
        if name.endswith(UP_INPUTS):
            found[name] = 0, tensor.nbytes
            continue
        scale = by_name.get(name + SCALE)
        bits = config.bits.get(parts[name], {}).get(layer_number(name)) if config is not None else None
        if scale is not None and bits is None:
            raise ModelFileError(
                f"tensor {name}: has scales, but config.json says nothing of packed tensors of its part"
            )
        packed = scale is not None and bits is not None
        elements = tensor.elements * 8 // bits if packed and bits else tensor.elements
        beside = [by_name[name + end].nbytes for end in (SCALE, INPUTS) if packed and name + end in by_name]
        found[name] = elements, tensor.nbytes + sum(beside)
    return found


def refuse_transposed(tensors: Sequence[TensorInfo], roles: Mapping[str, Role]) -> None:
    """Raise UnsupportedModelError where experts multiply inputs from the other side, so that rows are not of inputs."""
    shapes = {tensor.name: tensor.shape for tensor in tensors if roles[tensor.name] is Role.ROUTED_EXPERT}
    for name, shape in shapes.items():
        down = shapes.get(name.replace("gate_up_proj", "down_proj"), ())
        if name.endswith("gate_up_proj") and len(down) == 3 and (shape[1], shape[2]) == (down[2], 2 * down[1]):
            raise UnsupportedModelError(
                f"tensor {name!r} {list(shape)}: these experts are stored transposed, [experts, inputs, outputs], "
                f"which packed rows cannot be; such a model cannot be quantised here yet"
            )


def _first(item: tuple[int | None, int]) -> int:
    return -1 if item[0] is None else item[0]
