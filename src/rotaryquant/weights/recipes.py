"""How many bits each tensor gets: recipes, which are data, and what they say of one checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rotaryquant.errors import ConfigError
from rotaryquant.formats.weight import BITS
from rotaryquant.models.roles import KEPT, Part, Role, layer_number

#: Roles whose tensors a recipe can give fewer bits.
ROUNDED = tuple(role for role in Role if role not in KEPT)


#: The recipe that is not data but chosen by measurement under a size (weights.sensitivity).
AUTO = "role-auto"

#: A part and its layer, None outside of all layers.
Place = tuple[Part, int | None]


@dataclass(frozen=True)
class Recipe:
    """Bits by role, and more of them at the edges, or by part and layer.

    bits: of every role in `ROUNDED`. edge: bits of routed experts in the first and the last `edge_layers` layers that
    have any, or None for those of all others. places: bits of single parts in single layers, which go before.
    """

    name: str
    bits: Mapping[Role, int] = field(hash=False)
    edge: int | None = None
    edge_layers: int = 1
    places: Mapping[Place, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for role in ROUNDED:
            if self.bits.get(role) not in BITS:
                raise ConfigError(
                    f"recipe {self.name!r}: bits of {role.value!r} are {self.bits.get(role)}; "
                    f"valid: {', '.join(map(str, BITS))}"
                )


def by_role(dense: int, routed: int, shared: int) -> dict[Role, int]:
    """Bits of all roles: of routed experts, of shared experts, and of all others that are rounded."""
    return dict.fromkeys(ROUNDED, dense) | {Role.ROUTED_EXPERT: routed, Role.SHARED_EXPERT: shared}


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("role-4-2-8", by_role(4, 2, 8)),
        Recipe("role-4-2-8-edge", by_role(4, 2, 8), edge=4),
        *(Recipe(f"uniform-{bits}", by_role(bits, bits, bits)) for bits in BITS),
    )
}


def parse_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ConfigError with those that there are."""
    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r} is unknown; valid: {', '.join((*RECIPES, AUTO))}")
    return RECIPES[name]


def bits_of(recipe: Recipe, parts: Mapping[str, Part]) -> dict[str, int]:
    """Bits of every tensor that the recipe rounds, by name; what is not named stays as it is.

    parts: of the checkpoint's matrices alone (models.roles): vectors are left out by whoever calls.
    """
    routed = sorted({layer_number(name) or 0 for name, part in parts.items() if part.role is Role.ROUTED_EXPERT})
    edges = {*routed[: recipe.edge_layers], *routed[-recipe.edge_layers :]} if recipe.edge is not None else set()
    found = {}
    for name, part in parts.items():
        layer, bits = layer_number(name), recipe.bits.get(part.role)
        if bits is None:
            continue
        if recipe.edge is not None and part.role is Role.ROUTED_EXPERT and layer in edges:
            bits = recipe.edge
        found[name] = recipe.places.get((part, layer), bits)
    return found
