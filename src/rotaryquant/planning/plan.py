"""A plan: what a model needs under a budget, whether that fits, and what to change where it does not."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rotaryquant.config import KVCacheConfig, parse_kv
from rotaryquant.errors import ConfigError, ModelFileError
from rotaryquant.models.geometry import Geometry, read_geometry
from rotaryquant.planning import memory as memories
from rotaryquant.planning.memory import Cache, Memory
from rotaryquant.planning.speed import BY_BYTES, CPU, PAYS_ABOVE, Paging, Rates, Step, paging, step_of
from rotaryquant.planning.weights import AS_IS, Weights, recipe_named, weigh
from rotaryquant.weights.headers import TensorInfo
from rotaryquant.weights.packed_config import METHOD, PackedConfig
from rotaryquant.weights.recipes import RECIPES

#: Whether this version can run with some experts on disk. As long as it cannot, only what is resident as a whole fits.
PAGES_EXPERTS = False

#: Tokens of a sequence where none are named.
DEFAULT_CONTEXT = 4096

_STREAMED = "prefill=streaming"


@dataclass(frozen=True)
class Model:
    """A model as its headers tell of it. config: what config.json holds. tensors: of all its files."""

    config: Mapping[str, Any]
    tensors: Sequence[TensorInfo]

    @cached_property
    def geometry(self) -> Geometry:
        """Its layers. Raises as `read_geometry` does."""
        return read_geometry(self.config)

    @cached_property
    def packed(self) -> PackedConfig | None:
        """How its weights are packed, None for a checkpoint that is not."""
        own = self.config.get("quantization_config")
        return PackedConfig.from_dict(own) if isinstance(own, Mapping) and own.get("quant_method") == METHOD else None

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of a value of the dtype in which it computes, by its configuration or else its tensors."""
        named = self.geometry.dtype.removeprefix("torch.")
        if named:
            return 4 if named == "float32" else 2
        return 4 if {tensor.dtype for tensor in self.tensors} == {"F32"} else 2


@dataclass(frozen=True)
class Request:
    """What is wanted. memory: the budget in bytes. context: tokens of a sequence, prompt and answer; None for
    DEFAULT_CONTEXT, or what the model has. clients: sequences at a time. kv: a `--kv` SPEC. recipe: of the weights'
    bits, or `as-is`. Raises ConfigError for what no model can honour.
    """

    memory: int
    context: int | None = None
    clients: int = 1
    kv: str = "iso3"
    recipe: str = AS_IS

    def __post_init__(self) -> None:
        for name in ("context", "clients"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name}={value} must be at least 1")
        parse_kv(self.kv)
        recipe_named(self.recipe)

    @property
    def tokens(self) -> int:
        """The context, once it is settled."""
        assert self.context is not None
        return self.context


@dataclass(frozen=True)
class Change:
    """One way to make it fit. text: what to do, as options. memory: bytes that are needed then."""

    text: str
    memory: int


@dataclass(frozen=True)
class Plan:
    """What came out. kv: None for 16 bits. paged: with experts on disk and the rest of the budget for them; with all
    of them resident where they fit. changes: that each make it fit, none where it does.
    """

    model: Model
    request: Request
    kv: KVCacheConfig | None
    weights: Weights
    cache: Cache
    memory: Memory
    paged: Paging
    step: Step
    pays_from: int | None
    changes: tuple[Change, ...]

    @property
    def fits_whole(self) -> bool:
        """Whether everything fits, all experts resident."""
        return self.memory.needed <= self.request.memory

    @property
    def fits_paged(self) -> bool:
        """Whether it fits once experts are paged in: below the experts of one step nothing is ever found again."""
        room = self.request.memory - self.memory.with_experts(0).needed
        return self.paged.experts > 0 and room >= self.paged.cycle

    @property
    def fits(self) -> bool:
        """Whether this version can run it in the budget."""
        return self.fits_whole or (PAGES_EXPERTS and self.fits_paged)

    def share(self, rates: Rates = CPU) -> float:
        """Share of a decode step that attention over a 16-bit cache takes."""
        return self.step.share(rates)

    @property
    def pays(self) -> bool:
        """Whether packing keys and values pays in time."""
        return self.share() > PAYS_ABOVE

    @property
    def share_by_bytes(self) -> float:
        """The same where every byte takes as long."""
        return self.share(BY_BYTES)


def make_plan(model: Model, request: Request) -> Plan:
    """Plan a request.

    Raises ConfigError for a request that cannot be honoured, ModelFileError or UnsupportedModelError for a model of
    which something is not known.
    """
    geometry = model.geometry
    if request.context is None:
        request = dataclasses.replace(request, context=min(DEFAULT_CONTEXT, geometry.max_tokens or DEFAULT_CONTEXT))
    if geometry.max_tokens and request.tokens > geometry.max_tokens:
        raise ConfigError(
            f"--context={request.context}: the model has {geometry.max_tokens} positions; ask for no more than these"
        )
    kv, weights, need = _needs(model, request)
    if weights.experts and not geometry.experts_per_token:
        raise ModelFileError(
            "config.json: num_experts_per_tok is missing, but there are routed experts; fetch it again"
        )
    room = request.memory - need.with_experts(0).needed
    return Plan(
        model=model,
        request=request,
        kv=kv,
        weights=weights,
        cache=memories.cache_of(geometry.layers, kv, request.tokens, model.element_bytes),
        memory=need,
        paged=paging(weights, geometry.experts_per_token, request.clients, room),
        step=step_of(geometry, weights, request.tokens),
        pays_from=_pays_from(geometry, weights),
        changes=() if need.needed <= request.memory else tuple(_changes(model, request)),
    )


def _needs(model: Model, request: Request) -> tuple[KVCacheConfig | None, Weights, Memory]:
    kv, recipe = parse_kv(request.kv), recipe_named(request.recipe)
    weights = weigh(model.tensors, len(model.geometry.layers), recipe, model.packed)
    need = memories.memory_of(model.geometry, weights, kv, request.tokens, request.clients, model.element_bytes)
    return kv, weights, need


def _pays_from(geometry: Geometry, weights: Weights) -> int | None:
    """The fewest tokens at which packing pays, None where it never does within the model's context."""
    most = geometry.max_tokens or 1 << 20
    return _first(1, most, lambda tokens: step_of(geometry, weights, tokens).share(CPU) > PAYS_ABOVE)


def _first(low: int, high: int, holds: Any) -> int | None:
    """The least number of [low, high] of which a growing statement holds, or None."""
    if low > high or not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _changes(model: Model, request: Request) -> Iterator[Change]:
    """Single changes that make it fit, or else the smallest of all of them together."""
    found = list(_single(model, request))
    if not found:
        found = list(_together(model, request))
    yield from found


def _needed(model: Model, request: Request, **changed: Any) -> int:
    return _needs(model, dataclasses.replace(request, **changed))[2].needed


def _streamed(kv: str) -> str | None:
    """The SPEC with a prompt that is packed while it is read, None where there is no such."""
    config = parse_kv(kv)
    return f"{kv},{_STREAMED}" if config is not None and config.prefill == "deferred" and "prefill=" not in kv else None


def _recipes(model: Model, request: Request) -> list[str]:
    """Recipes that can be had of this checkpoint, smallest last."""
    if model.packed is not None:
        return []
    layers = len(model.geometry.layers)
    sizes = {
        name: weigh(model.tensors, layers, RECIPES[name], None).total for name in RECIPES if name != request.recipe
    }
    return sorted(sizes, key=lambda name: -sizes[name])


def _single(model: Model, request: Request) -> Iterator[Change]:
    limit = request.memory
    for kv in (_streamed(request.kv), "iso3" if parse_kv(request.kv) is None else None):
        if kv is not None and (need := _needed(model, request, kv=kv)) <= limit:
            yield Change(f"--kv {kv}", need)
    for recipe in _recipes(model, request):
        if (need := _needed(model, request, recipe=recipe)) <= limit:
            yield Change(f"--recipe {recipe}", need)
            break  # the most bits that fit
    for name in ("clients", "context"):
        most = _first(
            1, getattr(request, name), lambda count, name=name: _needed(model, request, **{name: count}) > limit
        )
        if most is not None and most > 1:
            need = _needed(model, request, **{name: most - 1})
            yield Change(f"--{name} {most - 1:d}", need)


def _together(model: Model, request: Request) -> Iterator[Change]:
    """The least that it can be brought to with this model, if that fits."""
    kv = _streamed("iso3" if parse_kv(request.kv) is None else request.kv) or request.kv
    for recipe in [*_recipes(model, request), request.recipe]:
        for clients in dict.fromkeys((request.clients, 1)):
            changed = {"kv": kv, "clients": clients, "recipe": recipe}
            if (need := _needed(model, request, **changed)) <= request.memory:
                words = [f"--{name} {value}" for name, value in changed.items() if value != getattr(request, name)]
                yield Change(" ".join(words), need)
                return
