"""Experts on disk: how many stay in memory, and how many tokens a second a link allows at most.

Of what one token reads, experts that are not in memory come over a link: tokens/s ≤ link / ((1 - h) · T), where T is
the bytes of the experts that one token goes to (one token cycle) and h the share of them that is in memory. That is a
ceiling: it leaves out the arithmetic, the weights that are in memory, and what every read costs. This version keeps all
experts in memory, so that a plan that needs some of them on disk does not fit.
"""

from dataclasses import dataclass

from rotaryquant.planning.weights import Weights


@dataclass(frozen=True)
class Paging:
    """What paging experts would take.

    room: bytes for experts. resident: how many fit there, of `experts` in all. hit: share of a token's experts that
    is in memory where all are asked for alike. disk, link: ceilings in tokens per second, at that share; None where
    nothing has to be fetched. cycle_fits: whether the room holds one token cycle: below that, what is fetched for one
    token is gone before the next one asks for it, and nothing is gained by keeping any.
    """

    room: int
    resident: int
    experts: int
    hit: float
    disk: float | None
    link: float | None
    cycle_fits: bool


def ceiling(cycle: int, hit: float, speed: int) -> float | None:
    """Tokens a second that a link of `speed` bytes a second allows; None where nothing is fetched."""
    missed = (1 - hit) * cycle
    return speed / missed if missed > 0 else None


def page(weights: Weights, room: int, disk: int, link: int) -> Paging | None:
    """Experts that fit into `room` bytes; None for a model without any.

    disk: bytes a second that a disk gives to reads of single experts. link: the same of what lies between memory and an
    accelerator, for experts kept in memory but multiplied elsewhere.
    """
    if not weights.expert:
        return None
    experts = weights.experts * weights.moe_layers
    resident = min(experts, max(0, room) // weights.expert)
    hit = resident / experts
    fits = resident * weights.expert >= weights.cycle
    return Paging(
        max(0, room),
        resident,
        experts,
        hit,
        ceiling(weights.cycle, hit if fits else 0.0, disk),
        ceiling(weights.cycle, hit if fits else 0.0, link),
        fits,
    )
