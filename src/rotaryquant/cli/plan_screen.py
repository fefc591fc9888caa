"""A plan as one screen for people and as one object for programs."""

from collections.abc import Iterator, Mapping
from typing import Any

from rotaryquant.cli.screen import print_table
from rotaryquant.cli.sizes import show_bytes
from rotaryquant.formats.weight import BITS
from rotaryquant.models.geometry import Kind
from rotaryquant.planning.plan import Plan
from rotaryquant.planning.speed import PAYS_ABOVE
from rotaryquant.planning.weights import AS_IS


def show(plan: Plan, name: str, speeds: Mapping[str, float]) -> None:
    """Print the screen. name: of the model. speeds: bytes per second of disk and link."""
    print(_headline(plan, name))
    print()
    print_table(_memory(plan), right=(1,))
    print()
    print_table(_roles(plan), ("role", "parameters", "stored", *(f"{bits} bits" for bits in BITS[::-1]), "planned"),
                right=tuple(range(1, 8)))  # fmt: skip
    print()
    for line in (*_layers(plan), *_paging(plan, speeds), *_pays(plan), *_verdict(plan)):
        print(line)


def _headline(plan: Plan, name: str) -> str:
    geometry, weights = plan.model.geometry, plan.weights
    experts = ""
    if weights.experts:
        most = max(layer.experts for layer in weights.experts)
        experts = f", {most} experts in {len(weights.experts)} of them, {geometry.experts_per_token} a token"
    layers = f"{len(geometry.layers)} layers{experts}"
    return f"{name} ({geometry.model_type}): {_count(weights.parameters)} parameters, {layers}"


def _count(number: float) -> str:
    """30.5 billion, 69.6 million."""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}" if number < 100 * size else f"{number / size:.0f} {word}"
    return f"{number:,}"


def _memory(plan: Plan) -> list[tuple[str, str, str]]:
    """What takes memory: name, bytes, note."""
    need, request, cache = plan.memory, plan.request, plan.cache
    rows = [("weights of every token", show_bytes(need.always), f"--recipe {request.recipe}")]
    if plan.weights.experts:
        rows.append(("routed experts", show_bytes(need.experts), _resident(plan)))
    smaller = f", {cache.exact_whole / cache.total:.1f}x smaller" if plan.kv is not None and cache.total else ""
    each = f"{request.clients} × {show_bytes(cache.total)}" if request.clients > 1 else ""
    exact = f"{show_bytes(cache.exact_whole)} each at 16 bits{smaller}"
    rows.append(
        (f"cache of {request.tokens:,} tokens", show_bytes(need.caches), "; ".join(filter(None, (each, exact))))
    )
    if need.prompt:
        rows.append(("a prompt until it is packed", show_bytes(need.prompt), "none with --kv ...,prefill=streaming"))
    rows.append(("working memory", show_bytes(need.working + need.compiled), "of 512 prompt tokens at a time"))
    rows.append(("the program", show_bytes(need.process), "Python with torch, measured"))
    mapped = f"; {show_bytes(need.mapped)} more show as resident until others need them" if need.mapped else ""
    fits = "fits" if plan.fits_whole else f"{show_bytes(need.needed - request.memory)} too much"
    rows.append(("together", show_bytes(need.needed), f"of {show_bytes(request.memory)}: {fits}{mapped}"))
    return rows


def _resident(plan: Plan) -> str:
    paged = plan.paged
    size = f"{show_bytes(plan.weights.largest_expert)} each"
    if paged.resident == paged.experts:
        return f"all {paged.experts:,}, {size}"
    return f"all {paged.experts:,}, {size}; there is room for {paged.resident:,} ({paged.hit:.0%})"


def _roles(plan: Plan) -> list[list[str]]:
    rows = []
    for role in plan.weights.roles:
        sizes = [show_bytes(role.at[bits]) if role.at else "-" for bits in BITS[::-1]]
        rows.append(
            [role.role.value, f"{role.parameters:,}", show_bytes(role.stored), *sizes, show_bytes(role.planned)]
        )
    weights = plan.weights
    sums = [
        show_bytes(sum(role.at[bits] for role in weights.roles)) if weights.roles[0].at else "-" for bits in BITS[::-1]
    ]
    stored = show_bytes(sum(role.stored for role in weights.roles))
    rows.append(["all", f"{weights.parameters:,}", stored, *sums, show_bytes(weights.total)])
    return rows


def _layers(plan: Plan) -> Iterator[str]:
    """How the cache of a sequence is made up."""
    cache, kinds = plan.cache, [layer.kind for layer in plan.model.geometry.layers]
    counts = ", ".join(
        f"{kinds.count(kind)} × {kind.value}" for kind in Kind if kind is not Kind.NONE and kind in kinds
    )
    parts = {"packed": cache.packed, "exact tail": cache.tail, "16-bit layers": cache.exact, "states": cache.state}
    sizes = " + ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)
    yield f"A sequence: {counts}; {sizes}."


def _paging(plan: Plan, speeds: Mapping[str, float]) -> Iterator[str]:
    paged = plan.paged
    if not paged.experts:
        return
    cycle = f"One step runs {show_bytes(paged.cycle)} of experts"
    if paged.resident == paged.experts:
        yield f"{cycle}; all are resident, nothing is paged."
        return
    if not plan.fits_paged:
        yield f"{cycle}; fewer than these would be resident, so paging would read all of them again and again."
        return
    limits = " and ".join(
        f"{paged.ceiling(speed) or 0:.1f} from a {name} of {show_bytes(speed)}/s" for name, speed in speeds.items()
    )
    yield (
        f"{cycle}; with {paged.hit:.0%} of them resident and the others paged, reading alone allows {limits} tokens/s "
        f"at most (uniform routing; `generate` does not page yet)."
    )


def _pays(plan: Plan) -> Iterator[str]:
    share, tokens = plan.share(), plan.request.tokens
    where = "never does here" if plan.pays_from is None else f"does from {plan.pays_from:,} tokens on"
    verdict = "pays in time" if plan.pays else "saves memory more than time"
    yield (
        f"Attention over a 16-bit cache takes {share:.0%} of a step after {tokens:,} tokens on a CPU "
        f"({plan.share_by_bytes:.0%} where a byte is a byte): packing it {verdict}; "
        f"it pays above {PAYS_ABOVE:.0%}, and {where}."
    )


def _verdict(plan: Plan) -> Iterator[str]:
    yield ""
    if plan.fits:
        how = (
            ""
            if plan.request.recipe == AS_IS
            else f", once made by `rotaryquant quantize --recipe {plan.request.recipe}`"
        )
        yield f"It fits{how}: {show_bytes(plan.request.memory - plan.memory.needed)} are left."
        return
    yield (
        "It does not fit. What would make it fit:"
        if plan.changes
        else (
            "It does not fit, and no recipe, cache or number of clients makes it: take more memory or a smaller model."
        )
    )
    for change in plan.changes:
        yield f"  {change.text}  (needs {show_bytes(change.memory)})"


def as_json(plan: Plan, name: str, speeds: Mapping[str, float]) -> dict[str, Any]:
    """The same as plain values; bytes, tokens, shares between 0 and 1."""
    geometry, weights, cache, paged = plan.model.geometry, plan.weights, plan.cache, plan.paged
    return {
        "model": name,
        "family": geometry.model_type,
        "memory": plan.request.memory,
        "context": plan.request.context,
        "clients": plan.request.clients,
        "kv": plan.kv.name if plan.kv is not None else "fp16",
        "recipe": plan.request.recipe,
        "fits": plan.fits,
        "fits_paged": plan.fits_paged,
        "parameters": weights.parameters,
        "weight_bytes": weights.total,
        "left_out_bytes": weights.left_out,
        "roles": [
            {
                "role": role.role.value,
                "tensors": role.tensors,
                "parameters": role.parameters,
                "stored_bytes": role.stored,
                "bytes_at_bits": {str(bits): size for bits, size in role.at.items()},
                "planned_bytes": role.planned,
            }
            for role in weights.roles
        ],
        "sequence": {
            "packed_bytes": cache.packed, "tail_bytes": cache.tail, "exact_bytes": cache.exact,
            "state_bytes": cache.state, "total_bytes": cache.total, "total_bytes_16bit": cache.exact_whole,
        },
        "peak": plan.memory.as_dict(),
        "experts": {
            "count": paged.experts,
            "resident": paged.resident,
            "bytes_each": weights.largest_expert,
            "cycle_bytes": paged.cycle,
            "hit_rate_uniform": paged.hit,
            "ceiling_tokens_per_s": {name: paged.ceiling(speed) for name, speed in speeds.items()},
        },
        "attention_share": plan.share(),
        "attention_share_by_bytes": plan.share_by_bytes,
        "packing_pays": plan.pays,
        "packing_pays_from_tokens": plan.pays_from,
        "changes": [{"options": change.text, "needed_bytes": change.memory} for change in plan.changes],
    }  # fmt: skip
