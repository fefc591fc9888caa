"""How fast experts can be paged in, and what share of a decode step attention over the cache takes."""

from dataclasses import dataclass

from rotaryquant.models.geometry import Geometry
from rotaryquant.planning.weights import Weights

#: Share of a step above which packing keys and values pays in time (the paper's; `eval profile` measures it).
PAYS_ABOVE = 0.2


@dataclass(frozen=True)
class Paging:
    """Experts that are resident, and what it costs that others are not.

    resident, experts: how many of how many. cycle: bytes of the experts that one step of all clients runs. hit: share
    of them that is resident if routing is uniform; real routing prefers some, so that more of it is.
    """

    resident: int
    experts: int
    cycle: float
    hit: float
    clients: int

    def ceiling(self, bytes_per_second: float) -> float | None:
        """Tokens per second, of all clients together, that reading alone allows; None where nothing is read.

        The bound is that of I/O: speed / ((1 - hit) · cycle), a token for each client. Products take time besides.
        """
        missed = (1 - self.hit) * self.cycle
        return None if missed <= 0 else self.clients * bytes_per_second / missed


def paging(weights: Weights, per_token: int, clients: int, room: int) -> Paging:
    """Paging with `room` bytes for experts. per_token: experts that a token runs in each layer."""
    total, routed = weights.expert_count, weights.routed
    resident = total if room >= routed else max(0, room // weights.largest_expert) if total else 0
    hit = resident / total if total else 1.0
    return Paging(resident, total, weights.cycle(per_token, clients), hit, clients)


@dataclass(frozen=True)
class Rates:
    """Seconds that a decode step of one sequence takes for what it reads.

    weight: of a byte of weights. cached: of a byte of keys and values at 16 bits. by_head: whether these are read once
    for each query head, not once for all that share them. attention: of a layer with attention, whatever its length.
    layer: of any layer besides. experts: of a layer with routed experts besides.
    """

    weight: float
    cached: float
    by_head: bool
    attention: float
    layer: float
    experts: float


#: A machine on which memory alone decides, and which reads keys and values once for all heads that share them.
BY_BYTES = Rates(1.0, 1.0, False, 0.0, 0.0, 0.0)

#: One thread of an AMD EPYC with AVX-512 under torch 2.13, whose attention for bf16 reads keys and values for each
#: query head anew. Fitted to processor times of glm4moe-70m and SmolLM2-135M; docs/planning.md has them beside others.
CPU = Rates(0.19e-9, 0.457e-9, True, 0.38e-3, 0.46e-3, 1.25e-3)


@dataclass(frozen=True)
class Step:
    """A decode step with a 16-bit cache. weights, cached: bytes that it reads. cached_by_head: the latter where each
    query head reads them. attention_layers, layers, expert_layers: how many there are.
    """

    weights: float
    cached: int
    cached_by_head: int
    attention_layers: int
    layers: int
    expert_layers: int

    def share(self, rates: Rates) -> float:
        """Share of the step that attention over the cache takes."""
        cached = self.cached_by_head if rates.by_head else self.cached
        attention = cached * rates.cached + self.attention_layers * rates.attention
        rest = self.weights * rates.weight + self.layers * rates.layer + self.expert_layers * rates.experts
        return attention / (attention + rest) if attention + rest else 0.0


def step_of(geometry: Geometry, weights: Weights, tokens: int) -> Step:
    """A step after `tokens` tokens."""
    rows = [layer for layer in geometry.layers if layer.key_width]
    return Step(
        weights=weights.read_per_token() + weights.cycle(geometry.experts_per_token),
        cached=sum(2 * layer.values_per_token * layer.held_tokens(tokens) for layer in rows),
        cached_by_head=sum(2 * layer.values_by_head * layer.held_tokens(tokens) for layer in rows),
        attention_layers=len(rows),
        layers=len(geometry.layers),
        expert_layers=len(weights.experts),
    )
