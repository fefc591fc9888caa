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
    from rotaryquant.ops.dispatch import explain

    rows = explain()
    forced = env.kernel_override()
    if args.json:
        kernels = [
            {"op": op, "kernel": kernel, "ready": state == "ready", "reason": None if state == "ready" else state}
            for op, kernel, state in rows
        ]
        print_json({"forced": forced, "kernels": kernels})
        return 0
    print_table(rows, ("op", "kernel", "state"))
    if forced is not None:
        print(f"\nRQ_KERNEL={forced} forces this kernel for every op")
    return 0
