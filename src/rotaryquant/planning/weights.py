"""Bytes of weights by role: as stored, at each number of bits, and under a recipe; experts, and what a token reads."""

from dataclasses import dataclass
from functools import lru_cache

from rotaryquant.errors import ModelFileError
from rotaryquant.formats.weight import BITS
from rotaryquant.models.roles import Role, grouped, layer_number, parts_of
from rotaryquant.planning.checkpoint import Checkpoint, is_scale, matrices, refuse_packed
from rotaryquant.weights.headers import TensorInfo
from rotaryquant.weights.packed_config import PackedConfig, refuse_transposed, weights_of
from rotaryquant.weights.recipes import Recipe, bits_of, parse_recipe

#: Weights as they are in the files.
AS_IS = "as-is"

_FLOATS = ("F32", "F16", "BF16")
_SCALE_BYTES = 2


@dataclass(frozen=True)
class RoleBytes:
    """Tensors of one role. as_is: bytes in the files. at_bits: bytes if rounded to so many. planned: by the recipe."""

    role: Role
    parameters: int
    as_is: int
    at_bits: dict[int, int]
    planned: int


@dataclass(frozen=True)
class Weights:
    """The weights of a model under one recipe.

    recipe: its name, or `AS_IS`. roles: in the order of `Role`. routed: bytes of all routed experts. expert: of one.
    moe_layers: that have any. experts, per_token: in a layer, and those that one token goes to. read: bytes that one
    token reads, its experts included. merged: bytes of experts that are stored one by one and joined when they are
    loaded. matrices: products that a token meets outside of experts.
    """

    recipe: str
    roles: tuple[RoleBytes, ...]
    routed: int
    expert: int
    moe_layers: int
    experts: int
    per_token: int
    read: int
    merged: int
    matrices: int

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return sum(role.planned for role in self.roles)

    @property
    def parameters(self) -> int:
        """Weights of everything."""
        return sum(role.parameters for role in self.roles)

    @property
    def resident(self) -> int:
        """Bytes of what every token needs: all but routed experts."""
        return self.total - self.routed

    @property
    def cycle(self) -> int:
        """Bytes of the experts that one token goes to, all layers: one token cycle."""
        return self.expert * self.per_token * self.moe_layers


def packed_bytes(tensor: TensorInfo, bits: int, base: PackedConfig) -> int:
    """Bytes of a matrix at so many bits, scales included; as it is where its width has no such form."""
    form = base.form(tensor.shape[-1], bits)
    if form is None:
        return tensor.nbytes
    return tensor.elements // form.width * (form.code_bytes + _SCALE_BYTES * form.groups)


def planned_bytes(checkpoint: Checkpoint, recipe: Recipe | None) -> dict[str, int]:
    """Bytes of each tensor by name under a recipe, None for as it is; scales are counted with what they are of.

    Raises ConfigError for a recipe on a packed checkpoint, ModelFileError where it holds no floating-point numbers.
    """
    if recipe is None:
        return {name: nbytes for name, (_, nbytes) in weights_of(checkpoint.tensors, checkpoint.packed).items()}
    refuse_packed(checkpoint, recipe.name)
    refuse_transposed(checkpoint.tensors, checkpoint.roles)
    parts, base = parts_of(checkpoint.roles), PackedConfig()
    bits = bits_of(recipe, {name: parts[name] for name in matrices(checkpoint)})
    for tensor in checkpoint.tensors:
        if tensor.name in bits and tensor.dtype not in _FLOATS:
            raise ModelFileError(
                f"tensor {tensor.name} is {tensor.dtype}, wanted one of {', '.join(_FLOATS)}; --recipe {recipe.name} "
                f"rounds a checkpoint that is not quantised yet"
            )
    return {
        tensor.name: packed_bytes(tensor, bits[tensor.name], base) if tensor.name in bits else tensor.nbytes
        for tensor in checkpoint.tensors
    }


@lru_cache(maxsize=16)
def read_weights(checkpoint: Checkpoint, recipe: str) -> Weights:
    """Weights of a checkpoint under the recipe of that name. Raises ConfigError as `parse_recipe`, and see above."""
    planned = planned_bytes(checkpoint, None if recipe == AS_IS else parse_recipe(recipe))
    sizes = weights_of(checkpoint.tensors, checkpoint.packed)
    elements, stored = ({name: pair[place] for name, pair in sizes.items()} for place in (0, 1))
    base, by_name = PackedConfig(), {tensor.name: tensor for tensor in checkpoint.tensors}
    roundable = matrices(checkpoint) if checkpoint.packed is None else {}
    roles = []
    for role, names in grouped({name: checkpoint.roles[name] for name in planned}).items():
        at_bits = {
            bits: sum(
                packed_bytes(by_name[name], bits, base) if name in roundable else stored[name] for name in names
            )
            for bits in BITS
        } if checkpoint.packed is None else {}  # fmt: skip
        sums = [sum(table[name] for name in names) for table in (elements, stored, planned)]
        roles.append(RoleBytes(role, sums[0], sums[1], at_bits, sums[2]))
    return _with_experts(checkpoint, recipe, tuple(roles), planned)


def _with_experts(
    checkpoint: Checkpoint, recipe: str, roles: tuple[RoleBytes, ...], planned: dict[str, int]
) -> Weights:
    decoder = checkpoint.decoder
    names = [name for name in planned if checkpoint.roles[name] is Role.ROUTED_EXPERT]
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    routed = sum(planned[name] for name in names)
    layers = len({layer_number(name) for name in names})
    if names and not (decoder.experts and decoder.experts_per_token):
        raise ModelFileError(
            f"config.json: {decoder.family} has routed experts in its files, but neither the number of experts nor how "
            f"many a token goes to is stated; take config.json from the model's own repository"
        )
    share = decoder.experts_per_token / decoder.experts if names else 0.0
    # of an embedding one row is read, unless it is the head as well; towers for other inputs are not read at all
    idle = {Role.OTHER_INPUT, *(() if decoder.tied else (Role.EMBEDDING,))}
    always = sum(role.planned for role in roles if role.role not in {*idle, Role.ROUTED_EXPERT})
    return Weights(
        recipe,
        roles,
        routed,
        routed // (layers * decoder.experts) if names else 0,
        layers,
        decoder.experts if names else 0,
        decoder.experts_per_token if names else 0,
        round(always + share * routed),
        sum(planned[name] for name in names if len(shapes[name]) == 2),
        sum(
            len(tensor.shape) == 2
            and not is_scale(checkpoint, tensor.name)
            and checkpoint.roles[tensor.name] is not Role.ROUTED_EXPERT
            for tensor in checkpoint.tensors
        ),
    )
