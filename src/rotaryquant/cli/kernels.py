"""`rotaryquant kernels`: op × kernel × ready, or the reason why not."""

from collections.abc import Sequence

from rotaryquant import env
from rotaryquant.cli.common import parser
from rotaryquant.cli.screen import print_json, print_table


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    args = parser("kernels", "Which kernels can run on this machine, best first, and why others cannot.").parse_args(
        words
    )
    from rotaryquant.ops import native
    from rotaryquant.ops.dispatch import explain

    rows = explain()
    forced, forced_isa = env.kernel_override(), env.cpu_isa()
    isa, isas = native.instruction_set(), native.instruction_sets()
    if args.json:
        kernels = [
            {"op": op, "kernel": kernel, "ready": state == "ready", "reason": None if state == "ready" else state}
            for op, kernel, state in rows
        ]
        instruction_set = {"in_use": isa, "available": isas, "forced": forced_isa}
        print_json({"forced": forced, "instruction_set": instruction_set, "kernels": kernels})
        return 0
    print_table(rows, ("op", "kernel", "state"))
    if isa is not None:
        reason = "the best here" if forced_isa is None else f"RQ_CPU_ISA={forced_isa}"
        print(f"\ncpu kernels use {isa} ({reason}); available: {', '.join(isas)}")
    if forced is not None:
        print(f"\nRQ_KERNEL={forced} forces this kernel for every op")
    return 0
