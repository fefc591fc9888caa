"""Bytes of a checkpoint's weights: by role, at each precision, and of single experts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rotaryquant.errors import ConfigError
from rotaryquant.formats.weight import BITS
from rotaryquant.models.roles import Part, Role, layer_number, parts_of
from rotaryquant.weights.headers import TensorInfo
from rotaryquant.weights.packed_config import PackedConfig, weights_of
from rotaryquant.weights.recipes import RECIPES, Recipe, bits_of, by_role

#: The recipe that changes nothing.
AS_IS = "as-is"

_SCALE_BYTES = 2


@dataclass(frozen=True)
class RoleSize:
    """Weights of one role. tensors: how many. stored: bytes in the files. planned: under the recipe. at: bytes if
    rounded to so many bits, scales counted; of roles that no recipe rounds, and of a packed checkpoint, as stored.
    """

    role: Role
    tensors: int
    parameters: int
    stored: int
    planned: int
    at: Mapping[int, int] = field(hash=False)


@dataclass(frozen=True)
class ExpertLayer:
    """Routed experts of one layer: how many, and the bytes of all of them."""

    experts: int
    nbytes: int


@dataclass(frozen=True)
class Weights:
    """What the weights of a model take.

    roles: in the order of `Role`. experts: of the layers that have routed ones. left_out: bytes in the files that the
    model does not load (multi-token prediction). merged: bytes of experts that are stored one by one and merged while
    they are loaded, so that the pages of the files stay mapped beside the copy. packed: whether products are made by
    this package's own kernels.
    """

    roles: tuple[RoleSize, ...]
    experts: tuple[ExpertLayer, ...]
    left_out: int
    merged: int
    packed: bool

    @property
    def parameters(self) -> int:
        """Of all weights that are loaded."""
        return sum(role.parameters for role in self.roles)

    @property
    def total(self) -> int:
        """Bytes of all weights that are loaded."""
        return sum(role.planned for role in self.roles)

    @property
    def routed(self) -> int:
        """Bytes of all routed experts."""
        return sum(layer.nbytes for layer in self.experts)

    @property
    def always(self) -> int:
        """Bytes that every token may need: all but routed experts."""
        return self.total - self.routed

    @property
    def expert_count(self) -> int:
        """Routed experts of all layers."""
        return sum(layer.experts for layer in self.experts)

    @property
    def largest_expert(self) -> int:
        """Bytes of one routed expert, 0 without any."""
        return max((math.ceil(layer.nbytes / layer.experts) for layer in self.experts), default=0)

    def read_per_token(self) -> int:
        """Bytes outside of routed experts that a token reads: of an embedding that is no head, hardly any."""
        sizes = {role.role: role.planned for role in self.roles}
        spared = sizes.get(Role.EMBEDDING, 0) if Role.HEAD in sizes else 0
        return self.always - spared - sizes.get(Role.OTHER_INPUT, 0)

    def cycle(self, per_token: int, clients: int = 1) -> float:
        """Bytes of the experts that one step of so many sequences runs, each choosing at random (T for one).

        per_token: experts that a token runs in each layer.
        """
        total = 0.0
        for layer in self.experts:
            touched = layer.experts * (1 - (1 - min(1.0, per_token / layer.experts)) ** clients)
            total += layer.nbytes / layer.experts * touched
        return total


def recipe_named(name: str) -> Recipe | None:
    """The recipe, or None for `as-is`. Raises ConfigError with the names that there are."""
    if name == AS_IS:
        return None
    if name not in RECIPES:
        raise ConfigError(
            f"--recipe {name!r} is unknown or not known beforehand; valid: {', '.join((AS_IS, *RECIPES))}"
        )
    return RECIPES[name]


def loaded_tensors(tensors: Iterable[TensorInfo], layers: int) -> tuple[list[TensorInfo], int]:
    """Tensors that a model of so many layers loads, and the bytes of those that it leaves out.

    Heads for multi-token prediction are outside of its layers, or are layers behind the last one.
    """
    kept, left_out = [], 0
    for tensor in tensors:
        number = layer_number(tensor.name)
        if tensor.name.startswith("mtp.") or (number is not None and number >= layers):
            left_out += tensor.nbytes
        else:
            kept.append(tensor)
    return kept, left_out


def weigh(tensors: Sequence[TensorInfo], layers: int, recipe: Recipe | None, packed: PackedConfig | None) -> Weights:
    """Weights of a checkpoint under a recipe, None for as they are.

    layers: of the model. packed: configuration of a checkpoint whose weights are packed already. Raises
    UnsupportedModelError for a tensor of which no role is known, ConfigError where a packed checkpoint is to be
    packed again or numbers are not floating-point ones.
    """
    kept, left_out = loaded_tensors(tensors, layers)
    if packed is not None and recipe is not None:
        raise ConfigError(
            f"--recipe {recipe.name}: this checkpoint is packed already (recipe {packed.recipe!r}); use --recipe "
            f"{AS_IS}, or name the checkpoint that it was made from"
        )
    parts = parts_of(tensor.name for tensor in kept)
    stored = weights_of(kept, packed)
    by_name = {tensor.name: tensor for tensor in kept}
    planned = rounded_bytes(kept, recipe, parts) if recipe is not None else {}
    at = {} if packed is not None else {bits: rounded_bytes(kept, _uniform(bits), parts) for bits in BITS}
    roles = []
    for role in Role:
        names = [name for name in stored if parts[name].role is role]
        if names:
            sizes = {bits: sum(at[bits].get(name, by_name[name].nbytes) for name in names) for bits in at}
            whole = sum(planned.get(name, stored[name][1]) for name in names)
            elements = sum(stored[name][0] for name in names)
            roles.append(RoleSize(role, len(names), elements, sum(stored[name][1] for name in names), whole, sizes))
    nbytes = {name: planned.get(name, size) for name, (_, size) in stored.items()}
    routed = [name for name in stored if parts[name].role is Role.ROUTED_EXPERT]
    single = [name for name in routed if len(by_name[name].shape) < 3]
    merged = sum(nbytes[name] for name in single)
    return Weights(tuple(roles), _expert_layers(routed, by_name, nbytes), left_out, merged, bool(packed or recipe))


def _uniform(bits: int) -> Recipe:
    return Recipe("", by_role(bits, bits, bits))


def rounded_bytes(
    tensors: Iterable[TensorInfo], recipe: Recipe, parts: Mapping[str, Part], base: PackedConfig | None = None
) -> dict[str, int]:
    """Bytes of each tensor that a recipe rounds, codes and scales, as `quantize` would write it.

    base: grid and group, by default those of `quantize`.
    """
    base = base or PackedConfig()
    matrices = {tensor.name: tensor for tensor in tensors if len(tensor.shape) in (2, 3)}
    found = {}
    for name, bits in bits_of(recipe, {name: parts[name] for name in matrices}).items():
        tensor = matrices[name]
        if tensor.dtype not in ("F32", "F16", "BF16"):
            continue  # codes of another method: `quantize` would refuse them, and they stay what they are
        form = base.form(tensor.shape[-1], bits)
        if form is not None:
            rows = math.prod(tensor.shape[:-1])
            found[name] = rows * (form.code_bytes + _SCALE_BYTES * form.groups)
    return found


def _expert_layers(
    names: Iterable[str], tensors: Mapping[str, TensorInfo], nbytes: Mapping[str, int]
) -> tuple[ExpertLayer, ...]:
    """Experts by layer: stacked in one tensor, or one by one under numbers."""
    counts: dict[int, set[str]] = {}
    stacked: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for name in names:
        layer = layer_number(name) or 0
        sizes[layer] = sizes.get(layer, 0) + nbytes[name]
        if len(tensors[name].shape) == 3:
            stacked[layer] = tensors[name].shape[0]
        else:
            counts.setdefault(layer, set()).add(name.rpartition("experts.")[2].split(".")[0])
    return tuple(
        ExpertLayer(stacked.get(layer) or len(counts[layer]), sizes[layer]) for layer in sorted(sizes) if sizes[layer]
    )
