"""How many bits each tensor gets: recipes, which are data, and what they say of one checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rotaryquant.errors import ConfigError
from rotaryquant.formats.weight import BITS
from rotaryquant.models.roles import KEPT, Role, layer_number

#: Roles whose tensors a recipe can give fewer bits.
ROUNDED = tuple(role for role in Role if role not in KEPT)


@dataclass(frozen=True)
class Recipe:
    """Bits by role, and more of them at the edges.

    bits: of every role in `ROUNDED`. edge: bits of routed experts in the first and the last `edge_layers` layers that
    have any, or None for those of all others.
    """

    name: str
    bits: Mapping[Role, int] = field(hash=False)
    edge: int | None = None
    edge_layers: int = 1

    def __post_init__(self) -> None:
        for role in ROUNDED:
            if self.bits.get(role) not in BITS:
                raise ConfigError(
                    f"recipe {self.name!r}: bits of {role.value!r} are {self.bits.get(role)}; "
                    f"valid: {', '.join(map(str, BITS))}"
                )


def _by_role(dense: int, routed: int, shared: int) -> dict[Role, int]:
    return dict.fromkeys(ROUNDED, dense) | {Role.ROUTED_EXPERT: routed, Role.SHARED_EXPERT: shared}


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("role-4-2-8", _by_role(4, 2, 8)),
        Recipe("role-4-2-8-edge", _by_role(4, 2, 8), edge=4),
        *(Recipe(f"uniform-{bits}", _by_role(bits, bits, bits)) for bits in BITS),
    )
}


def parse_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ConfigError with those that there are."""
    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r} is unknown; valid: {', '.join(RECIPES)}")
    return RECIPES[name]


def bits_of(recipe: Recipe, roles: Mapping[str, Role]) -> dict[str, int]:
    """Bits of every tensor that the recipe rounds, by name; what is not named stays as it is.

    roles: of the checkpoint's matrices alone (models.roles): vectors are left out by whoever calls.
    """
    routed = sorted({layer_number(name) or 0 for name, role in roles.items() if role is Role.ROUTED_EXPERT})
    edges = {*routed[: recipe.edge_layers], *routed[-recipe.edge_layers :]} if recipe.edge is not None else set()
    return {
        name: recipe.edge if recipe.edge and role is Role.ROUTED_EXPERT and layer_number(name) in edges else bits
        for name, role in roles.items()
        if (bits := recipe.bits.get(role)) is not None
    }
