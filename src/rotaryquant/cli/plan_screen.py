"""A plan as a person reads it, on one screen: the answer first, then what it is made of, then what to change."""

from collections import Counter
from typing import TYPE_CHECKING

from rotaryquant.cli.screen import print_table
from rotaryquant.cli.sizes import show_bytes

if TYPE_CHECKING:
    from rotaryquant.planning.plan import Plan

_KINDS = {
    "full": "full attention", "sliding": "sliding windows", "latent": "latent attention", "state": "recurrent states",
    "none": "without a cache",
}  # fmt: skip


def print_plan(plan: "Plan") -> None:
    """Print it on stdout."""
    from rotaryquant.planning.weights import AS_IS

    request, decoder = plan.request, plan.checkpoint.decoder
    kinds = Counter(layer.kind for layer in decoder.layers)
    layers = ", ".join(f"{count} {_KINDS[kind]}" for kind, count in kinds.items())
    clients = "1 client" if request.clients == 1 else f"{request.clients} clients"
    print(f"{plan.checkpoint.name} ({decoder.family}): {_billions(plan.weights.parameters)} weights; layers: {layers}")
    recipe = "weights as they are" if request.recipe == AS_IS else f"--recipe {request.recipe}"
    print(f"{clients}, {request.context:,} tokens each, --kv {request.kv}, {recipe}\n")
    print(f"{verdict(plan)}\n")
    print_table(_memory_rows(plan), ("memory", "bytes", ""), right=(1,))
    print()
    _print_roles(plan)
    print()
    for line in (*_kv_lines(plan), *_expert_lines(plan), *_share_lines(plan)):
        print(line)
    _print_changes(plan)


def verdict(plan: "Plan") -> str:
    """One line: fits or not, and by how much."""
    needed, memory = plan.memory.needed, plan.request.memory
    if needed <= memory:
        return f"FITS: needs {show_bytes(needed)} of {show_bytes(memory)}, {show_bytes(memory - needed)} to spare"
    if plan.fits:
        return f"FITS with experts on disk: all of them would need {show_bytes(needed)} of {show_bytes(memory)}"
    over = show_bytes(needed - memory)
    return f"DOES NOT FIT: needs {show_bytes(needed)}, {over} more than {show_bytes(memory)}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def _memory_rows(plan: "Plan") -> list[tuple[str, str, str]]:
    memory, request = plan.memory, plan.request
    each = f"{request.clients} x {show_bytes(memory.cache / request.clients)}, as memory is taken"
    rows = [
        ("weights", memory.weights, ""),
        ("keys and values", memory.cache, each),
        ("recurrent states", memory.states, f"{request.clients} x {show_bytes(memory.states / request.clients)}"),
        ("newest prompt", memory.prompt, "exact until it is packed; --kv ...,prefill=streaming takes none of it"),
        ("one forward", memory.forward, "activations of 512 tokens of a prompt"),
        ("compiled products", memory.products, "kept by torch for experts in 16 bits"),
        ("program", memory.process, "Python, torch and transformers"),
        ("needed", memory.needed, ""),
    ]
    shown = [(name, show_bytes(count), note) for name, count, note in rows if count]
    if memory.files:
        shown.append(
            ("peak reported", show_bytes(memory.peak), "with pages of files, which the system takes back at need")
        )
    return shown


def _print_roles(plan: "Plan") -> None:
    """Bytes by role: as they are, at each number of bits, and as planned."""
    from rotaryquant.planning.weights import AS_IS

    weights = plan.weights
    bits = sorted({bits for role in weights.roles for bits in role.at_bits}, reverse=True)
    planned = [] if weights.recipe == AS_IS else [weights.recipe]
    rows = [
        (
            role.role.value,
            f"{role.parameters / 1e6:,.1f} M",
            show_bytes(role.as_is),
            *(show_bytes(role.at_bits[each]) for each in bits),
            *(show_bytes(role.planned) for _ in planned),
        )
        for role in weights.roles
    ]
    roles = weights.roles
    rows.append(
        (
            "all",
            f"{weights.parameters / 1e6:,.1f} M",
            show_bytes(sum(role.as_is for role in roles)),
            *(show_bytes(sum(role.at_bits[each] for role in roles)) for each in bits),
            *(show_bytes(weights.total) for _ in planned),
        )
    )
    headers = ("role", "weights", "as-is", *(f"{each} bits" for each in bits), *planned)
    print_table(rows, headers, right=tuple(range(1, len(headers))))


def _kv_lines(plan: "Plan") -> list[str]:
    kv, request = plan.sequence, plan.request
    packed = f", {kv.packed_per_token:,} B once packed" if kv.packed_per_token else ""
    parts = [
        f"{text} {show_bytes(count)}"
        for text, count in (("exact tail", kv.tail), ("windows", kv.window), ("states besides", kv.state))
        if count
    ]
    lines = [
        f"KV a token    {kv.per_token:,} B at 16 bits{packed}",
        f"KV a client   {show_bytes(kv.stored)} stored at {request.context:,} tokens, {show_bytes(kv.exact)} at 16 bits"
        + (f"; {', '.join(parts)}" if parts else ""),
    ]
    latent = sum(layer.kind == "latent" for layer in plan.checkpoint.decoder.layers)
    if latent and request.kv != "fp16":
        lines.append(f"              {latent} layers of latent attention cannot be packed yet: run it with --kv fp16")
    if kv.transient and plan.memory.needed > request.memory:
        enough = plan.memory.needed - kv.transient <= request.memory
        lines.append(
            f"deferred      {show_bytes(kv.transient)} more while a prompt of {request.context:,} tokens is read: "
            f"stream it (prefill=streaming){'' if enough else '; not enough alone'}"
        )
    return lines


def _expert_lines(plan: "Plan") -> list[str]:
    weights, paging, request = plan.weights, plan.paging, plan.request
    if paging is None:
        return []
    lines = [
        f"experts       {weights.moe_layers} x {weights.experts} of {show_bytes(weights.expert)}; a token goes to "
        f"{weights.per_token} a layer: {show_bytes(weights.cycle)}; all else {show_bytes(weights.resident)}"
    ]
    if paging.resident == paging.experts:
        return [*lines, "              all of them in memory"]
    if not paging.cycle_fits:
        stay = f"there is room for {paging.resident:,} of {paging.experts:,}, fewer than one token goes to"
    else:
        stay = f"{paging.resident:,} of {paging.experts:,} in memory ({paging.hit:.0%})"
    lines.append(f"              {stay}; the others on disk would allow at most")
    lines.append(
        f"              {_rate(paging.disk)} at {show_bytes(request.disk)}/s (--disk), {_rate(paging.link)} at "
        f"{show_bytes(request.link)}/s (--link)"
    )
    if plan.fits_paged and plan.paged_needed is not None:
        lines.append(f"              (with no more in memory than one token goes to: {show_bytes(plan.paged_needed)})")
    lines.append("              this version keeps all experts in memory: a ceiling to plan by, not to run at")
    return lines


def _rate(rate: float | None) -> str:
    return "no limit" if rate is None else f"{rate:,.1f} tokens/s"


def _share_lines(plan: "Plan") -> list[str]:
    from rotaryquant.planning.speed import PAYS_ABOVE

    shares = ", ".join(f"{share:.0%} at {tokens:,}" for tokens, share in plan.shares.items())
    pays = list(plan.shares.values())[-1] > PAYS_ABOVE
    told = "a step's time, by this machine's rates" if plan.request.rates else "the bytes a token reads"
    advice = "packing pays in time too" if pays else "packing saves memory more than time"
    return [
        f"attention     {shares} tokens of {told}, 16-bit cache",
        f"              {'above' if pays else 'not above'} {PAYS_ABOVE:.0%}: {advice}",
    ]


def _print_changes(plan: "Plan") -> None:
    if plan.memory.needed <= plan.request.memory:
        return
    print("\nWhat to change:")
    for change in plan.changes:
        enough = "fits" if change.fits else "still too much"
        print(f"  {change.options:<40}  {change.what}: {show_bytes(change.needed)}, {enough}")
    if not any(change.fits for change in plan.changes):
        least = min((change.needed for change in plan.changes), default=plan.memory.needed)
        print(f"  a smaller model, or --memory of {show_bytes(least)} and more")
