"""Published ways to store a KV cache, one file each, to be measured beside ours (`evals.simulated`)."""

import dataclasses
from collections.abc import Iterable
from functools import cache

from rotaryquant.config import PRESETS, KVCacheConfig, parse_kv, spec_name
from rotaryquant.errors import ConfigError
from rotaryquant.evals.simulated import Peer, Simulation

#: What a peer may be granted of ours: exact rows, and bits of each layer (`config.parse_kv`).
_GRANTED = ("sinks", "tail", "calibration", "budget")


@cache
def peers() -> dict[str, Peer]:
    """All of them by name."""
    from rotaryquant.evals.peers import (
        groups,
        kivi,
        kvarn,
        kvquant,
        oscar,
        quarot,
        spinquant,
        trellis,
        turboquant,
        vectors,
        vllm,
    )

    modules = (groups, kivi, quarot, turboquant, vllm, kvarn, oscar, vectors, trellis, kvquant, spinquant)
    return {peer.name: peer for module in modules for peer in module.PEERS}


def parse_spec(spec: str) -> KVCacheConfig | Simulation | None:
    """What `--kv` SPEC names in a measurement: one of ours, or a peer with `sinks`, `tail` and bits as
    published or given.

    Raises ConfigError with the valid names for an unknown one, and for an option that a peer does not take.
    """
    name, _, options = spec.partition(",")
    name = name.strip()
    if name not in peers():
        if "=" in name or name in PRESETS:
            return parse_kv(spec)
        raise ConfigError(f"kv={name!r} is unknown; valid: {', '.join(PRESETS)}, peers: {', '.join(peers())}")
    peer = peers()[name]
    taken = [part.partition("=")[0].strip() for part in options.split(",") if part.strip()]
    if wrong := sorted(set(taken) - set(_GRANTED)):
        raise ConfigError(f"kv option {wrong[0]!r}: {name} is simulated and takes {', '.join(_GRANTED)} alone")
    plain = KVCacheConfig(
        name, sinks=peer.sinks, tail=peer.tail, rotation="none", mean=False, correct=0.0, protect=False
    )
    if not taken:
        return Simulation(peer, plain)
    as_is = ",fit=off" if "calibration" in taken else ""  # it codes rows as they are: bits by what they cost so
    given = parse_kv(f"{options}{as_is}")
    assert given is not None
    changes = {key: getattr(given, key) for key in taken if key in ("sinks", "tail")}
    return Simulation(
        peer, dataclasses.replace(plain, name=spec_name(spec.strip()), allocation=given.allocation, **changes)
    )


def parse_specs(specs: Iterable[str]) -> dict[str, KVCacheConfig | Simulation | None]:
    """What several `--kv` SPECs name, by the names that a report gives them. Raises ConfigError as `parse_spec`."""
    found: dict[str, KVCacheConfig | Simulation | None] = {}
    for spec in specs:
        kv = parse_spec(spec)
        config = kv.config if isinstance(kv, Simulation) else kv
        found["fp16" if config is None else config.name] = kv
    return found
