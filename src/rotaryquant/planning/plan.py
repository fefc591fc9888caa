"""One plan: whether a model fits, what it costs, and what to change where it does not."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from rotaryquant.config import KVCacheConfig, parse_kv
from rotaryquant.errors import ConfigError, RotaryQuantError
from rotaryquant.kv.footprint import Footprint
from rotaryquant.planning.checkpoint import Checkpoint
from rotaryquant.planning.memory import Memory, predict
from rotaryquant.planning.paging import Paging, page
from rotaryquant.planning.speed import Rates, attention_share
from rotaryquant.planning.weights import AS_IS, Weights, read_weights

#: The recipe that is proposed where weights are too large.
_SMALL = "role-4-2-8"
_STREAMING = "prefill=streaming"

#: Depths at which the share of attention is told, as parts of the context.
_DEPTHS = (16, 4, 1)


@dataclass(frozen=True)
class Request:
    """What is asked for.

    memory: bytes that the process may take. context: tokens of a client, prompt and answer together. kv, recipe: as the
    options of that name. disk, link: bytes a second.
    """

    memory: int
    context: int
    clients: int
    kv: str
    recipe: str
    disk: int
    link: int
    rates: Rates | None = None

    def __post_init__(self) -> None:
        for name in ("context", "clients"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"--{name}={value} must be at least 1")


@dataclass(frozen=True)
class PerSequence:
    """Keys and values of one sequence in bytes.

    per_token: at 16 bits, layers that grow. packed_per_token: of those that are packed, once they are. exact, stored:
    of the whole context, at 16 bits and as it is kept. window: of sliding layers, part of both. tail: exact rows beside
    packed ones, part of stored. state: of recurrent layers, part of neither. transient: of a prompt kept exact until it
    is packed.
    """

    per_token: int
    packed_per_token: int
    exact: int
    stored: int
    window: int
    tail: int
    state: int
    transient: int


@dataclass(frozen=True)
class Change:
    """Something to change. options: of the command line. needed: bytes with it. fits: whether that is enough."""

    what: str
    options: str
    needed: int
    fits: bool


@dataclass(frozen=True)
class Plan:
    """The answer. shares: of attention in a decode step, by depth in tokens. limit: of the model's positions, 0: none.

    paged_needed: bytes with no more experts in memory than one token goes to, None without experts.
    """

    checkpoint: Checkpoint
    request: Request
    weights: Weights
    memory: Memory
    sequence: PerSequence
    paging: Paging | None
    paged_needed: int | None
    shares: dict[int, float]
    changes: tuple[Change, ...]

    @property
    def fits(self) -> bool:
        """Whether it runs as it was asked for."""
        return self.memory.needed <= self.request.memory

    @property
    def fits_paged(self) -> bool:
        """Whether it would fit with experts on disk, those of one token in memory."""
        return self.paged_needed is not None and self.paged_needed <= self.request.memory


def make_plan(checkpoint: Checkpoint, request: Request) -> Plan:
    """The plan. Raises ConfigError for a wrong option or more context than the model has positions."""
    limit = checkpoint.decoder.limit
    if limit and request.context > limit:
        raise ConfigError(f"--context={request.context}: {checkpoint.name} has {limit} positions; ask for fewer tokens")
    kv, weights = parse_kv(request.kv), read_weights(checkpoint, request.recipe)
    memory = predict(checkpoint, weights, kv, request.context, request.clients)
    room = request.memory - (memory.needed - weights.routed)
    fits = memory.needed <= request.memory
    depths = sorted({max(1, request.context // part) for part in _DEPTHS})
    return Plan(
        checkpoint,
        request,
        weights,
        memory,
        per_sequence(checkpoint, kv, request.context),
        page(weights, room, request.disk, request.link),
        memory.needed - weights.routed + weights.cycle if weights.experts else None,
        {tokens: attention_share(checkpoint.decoder, weights, tokens, request.rates) for tokens in depths},
        () if fits else tuple(_changes(checkpoint, request)),
    )


def per_sequence(checkpoint: Checkpoint, kv: KVCacheConfig | None, context: int) -> PerSequence:
    """Keys and values of one sequence of `context` tokens."""
    layers, element = checkpoint.decoder.layers, checkpoint.element_bytes
    kept = Footprint(layers, kv)
    growing = [layer for layer in layers if layer.num_kv_heads and not layer.window]
    packed = Footprint([layer for layer in layers if layer.packable], kv)
    stored = packed.stored_bytes(context)
    return PerSequence(
        Footprint(growing, None).exact_bytes(1),
        kept.packed_per_token(),
        Footprint(layers, None).exact_bytes(context),
        kept.stored_bytes(context),
        Footprint([layer for layer in layers if layer.window], None).exact_bytes(context),
        max(0, stored - packed.packed_per_token() * context) if kv is not None else 0,
        sum(layer.state_bytes(element) for layer in layers),
        kept.prompt_bytes(context, element),
    )


def _changes(checkpoint: Checkpoint, request: Request) -> Iterator[Change]:
    """What to change, the least first; of what is not enough alone, only the sum."""
    steps = list(_steps(checkpoint, request))
    alone = [(what, _replaced(request, [change])) for what, change in steps]
    enough = False
    for what, asked in alone:
        if (needed := _needed(checkpoint, asked)) <= request.memory:
            enough = True
            yield Change(what, _options(request, asked), needed, True)
    together = _replaced(request, [change for _, change in steps])
    if not enough and len(steps) > 1:
        needed = _needed(checkpoint, together)
        yield Change("all of these together", _options(request, together), needed, needed <= request.memory)
        enough = needed <= request.memory
    best = request if enough and len(steps) < 2 else together if steps else request
    if (tokens := _longest(checkpoint, best)) and tokens < request.context:
        asked = dataclasses.replace(best, context=tokens)
        yield Change("a shorter context", _options(request, asked), _needed(checkpoint, asked), True)
    clients = _most_clients(checkpoint, best)
    if 0 < clients < request.clients:
        asked = dataclasses.replace(best, clients=clients)
        yield Change("fewer clients", _options(request, asked), _needed(checkpoint, asked), True)


def _steps(checkpoint: Checkpoint, request: Request) -> Iterator[tuple[str, dict[str, str]]]:
    """Single changes that could help, each as fields of a request."""
    kv = parse_kv(request.kv)
    packs = any(layer.packable for layer in checkpoint.decoder.layers)
    if kv is None and packs:
        yield "keys and values at 3 bits, prompts packed as they are read", {"kv": f"iso3,{_STREAMING}"}
    elif kv is not None and packs and kv.prefill == "deferred":
        yield "prompts packed as they are read", {"kv": f"{request.kv},{_STREAMING}"}
    if request.recipe == AS_IS and checkpoint.packed is None:
        with contextlib.suppress(RotaryQuantError):  # a recipe that this checkpoint cannot have is no advice
            read_weights(checkpoint, _SMALL)
            yield "weights by role, 4, 2 and 8 bits", {"recipe": _SMALL}


def _replaced(request: Request, changes: list[dict[str, str]]) -> Request:
    for change in changes:
        request = dataclasses.replace(request, **change)  # type: ignore[arg-type]
    return request


def _options(before: Request, after: Request) -> str:
    """The options that differ."""
    pairs = ((name, getattr(after, name)) for name in ("kv", "recipe", "context", "clients"))
    return " ".join(f"--{name} {value}" for name, value in pairs if value != getattr(before, name))


def _needed(checkpoint: Checkpoint, request: Request) -> int:
    weights = read_weights(checkpoint, request.recipe)
    return predict(checkpoint, weights, parse_kv(request.kv), request.context, request.clients).needed


def _longest(checkpoint: Checkpoint, request: Request) -> int:
    """Tokens of context that fit, in steps of 256; 0 for none."""
    weights, kv = read_weights(checkpoint, request.recipe), parse_kv(request.kv)
    low, high = 0, request.context // 256
    while low < high:
        middle = (low + high + 1) // 2
        fits = predict(checkpoint, weights, kv, 256 * middle, request.clients).needed <= request.memory
        low, high = (middle, high) if fits else (low, middle - 1)
    return 256 * low


def _most_clients(checkpoint: Checkpoint, request: Request) -> int:
    """Clients that fit at the whole context; 0 for none."""
    weights, kv = read_weights(checkpoint, request.recipe), parse_kv(request.kv)
    low, high = 0, request.clients
    while low < high:
        middle = (low + high + 1) // 2
        fits = predict(checkpoint, weights, kv, request.context, middle).needed <= request.memory
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
