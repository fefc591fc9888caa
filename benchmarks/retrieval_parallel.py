r"""`eval needle` and `eval ruler` with the contexts shared out over processes and GPUs: the same cells, sooner.

    python benchmarks/retrieval_parallel.py ask needle MODEL --text FILE --context 4096,8192 --questions 400 \
        --needles 4 --kv iso3t,calibration=MODEL.safetensors --dtype bfloat16 \
        --gpus 4 --processes 15 --journal needle.jsonl
    python benchmarks/retrieval_parallel.py report needle MODEL … --journal needle.jsonl -o PREFIX

Every context is a line of the journal, so that a run that is stopped goes on where it was. The 16-bit cache is asked
first, and packed ones not where no row of a task discriminates, as the commands do it. `report` judges what is there
as the commands do, and refuses a journal in which contexts are missing.
"""

import argparse
import json
import multiprocessing
import os
import queue
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rotaryquant.evals import needle, ruler
from rotaryquant.evals.inputs import load_model
from rotaryquant.evals.peers import parse_specs
from rotaryquant.evals.retrieval import grid
from rotaryquant.evals.retrieval.contexts import Filler
from rotaryquant.evals.retrieval.forms import form_of
from rotaryquant.evals.retrieval.grid import Cell
from rotaryquant.evals.retrieval.measure import Measured, Setting, contexts_wanted, draw, outcome
from rotaryquant.evals.retrieval.questions import Score
from rotaryquant.measuring import provenance, read_text

#: Tokens of contexts that a batch of questions holds copies of, at most 20 questions.
_BATCH_TOKENS, _BATCH = 262_144, 20

COMMANDS = {"needle": needle, "ruler": ruler}

#: One context through one cache: (length, task, number, kv).
Unit = tuple[int, str, int, str]


def parse() -> argparse.Namespace:
    """The command line: ours around that of the command itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    for step in ("ask", "report"):
        commands = steps.add_parser(step).add_subparsers(dest="command", required=True)
        for name, module in COMMANDS.items():
            command = commands.add_parser(name)
            module.add_arguments(command)
            command.add_argument("--journal", type=Path, required=True, metavar="FILE.jsonl")
            if step == "ask":
                command.add_argument("--gpus", type=int, default=0, metavar="N", help="0: on the CPU")
                command.add_argument("--processes", type=int, default=1, metavar="N", help="a GPU, or in all")
                command.add_argument("--seconds", type=float, metavar="S", help="begin no context after so long")
            else:
                command.add_argument("-o", "--output", type=Path, required=True, metavar="PREFIX")
    return parser.parse_args()


def setting_of(args: argparse.Namespace, device: str) -> Setting:
    """The model on a device, and with what it is asked."""
    loaded = load_model(args.model, args.dtype, 1, device)
    packed = {name: kv for name, kv in parse_specs(args.kv).items() if kv is not None}
    return Setting(loaded, form_of(args.form, loaded), Filler(loaded, read_text(Path(args.text))), packed, args.seed)


def work(args: argparse.Namespace, device: str, units: Any, done: Any) -> None:
    """Ask units until None comes."""
    setting, tasks = setting_of(args, device), COMMANDS[args.command].tasks(args)
    while (unit := units.get()) is not None:
        length, task, number, kv = unit
        measured = Measured()
        context = draw(setting, task, tasks[task], length, number)
        batch = max(1, min(_BATCH, _BATCH_TOKENS // length))
        measured.ask(replace(setting, batch=batch), context, length, number, kv)
        done.put((unit, line_of(unit, measured, kv)))


def line_of(unit: Unit, measured: Measured, kv: str) -> dict[str, Any]:
    """What one context gave, as a line of the journal. answers: [row, share, exact, packed reads] of each question."""
    answers = []
    for (row, _), cell in measured.cells.items():
        scores = cell.exact if kv == "fp16" else cell.packed[kv]
        reads = [0] * len(scores) if kv == "fp16" else cell.reads[kv]
        answers += [[row, score.share, score.exact, read] for score, read in zip(scores, reads, strict=True)]
    line: dict[str, Any] = {"unit": unit, "answers": answers, "seconds": measured.seconds[kv]}
    if kv != "fp16":
        line |= {"bits": measured.bits[kv, unit[0]], "summary": measured.summaries[kv]}
    return line


def read_journal(path: Path) -> tuple[dict[str, Any], dict[Unit, dict[str, Any]]]:
    """Where it was made, and lines by unit; a line that a stopped run left unfinished is not one."""
    made: dict[str, Any] = {}
    found: dict[Unit, dict[str, Any]] = {}
    if path.exists():
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if "machine" in line:
                made = line
                continue
            length, task, number, kv = line["unit"]
            found[length, task, number, kv] = line
    return made, found


def exact_cells(lines: Mapping[Unit, Mapping[str, Any]], length: int, task: str, contexts: int) -> dict[str, Cell]:
    """The 16-bit answers of one task at one length by row, of the contexts that are there."""
    cells: dict[str, Cell] = defaultdict(Cell)
    for number in range(contexts):
        for row, share, exact, _ in lines.get((length, task, number, "fp16"), {"answers": []})["answers"]:
            cells[row].groups.append(number)
            cells[row].exact.append(Score(share, exact))
    return cells


class Plan:
    """What is to be asked, in order: packed caches as soon as the 16-bit one has answered, if they are to be."""

    def __init__(self, wanted: Mapping[tuple[int, str], int], kvs: Sequence[str], lines: dict[Unit, dict[str, Any]]):
        self._wanted, self._kvs, self.lines = wanted, kvs, lines
        self._asked = set(lines)
        self._discriminates: dict[tuple[int, str], bool] = {}

    def _units(self) -> Iterator[Unit]:
        exact: list[Unit] = []
        for (length, task), contexts in self._wanted.items():
            units = [(length, task, number, "fp16") for number in range(contexts)]
            if not all(unit in self.lines for unit in units):
                exact += units
                continue
            if (length, task) not in self._discriminates:
                cells = exact_cells(self.lines, length, task, contexts).values()
                self._discriminates[length, task] = any(cell.verdict() != grid.BLIND for cell in cells)
            if self._discriminates[length, task]:
                yield from ((length, task, number, kv) for kv in self._kvs for number in range(contexts))
        yield from exact

    def take(self) -> Unit | None:
        """The next one, which is taken for asked from now on, or None where there is none for now."""
        unit = next((unit for unit in self._units() if unit not in self._asked), None)
        if unit is not None:
            self._asked.add(unit)
        return unit

    def missing(self) -> int:
        """How many are not answered; more can follow from the answers of 16 bits."""
        return sum(unit not in self.lines for unit in self._units())


def ask(args: argparse.Namespace) -> int:
    """Share units out, and write what comes back. Returns how many are left."""
    plan = Plan(wanted_contexts(args), list(parse_specs(args.kv)), read_journal(args.journal)[1])
    if not plan.missing():
        return 0
    devices = [f"cuda:{gpu}" for gpu in range(args.gpus)] or ["cpu"]
    spawn = multiprocessing.get_context("spawn")
    units, done = spawn.Queue(), spawn.Queue()
    workers = [
        spawn.Process(target=work, args=(args, device, units, done), daemon=True)
        for device in devices
        for _ in range(args.processes)
    ]
    for worker in workers:
        worker.start()
    began = said = time.monotonic()
    under_way = 0
    with args.journal.open("a") as journal:
        journal.write(json.dumps(provenance(devices[0])) + "\n")
        while True:
            late = args.seconds is not None and time.monotonic() - began > args.seconds
            while not late and under_way < len(workers) + len(devices) and (unit := plan.take()) is not None:
                units.put(unit)
                under_way += 1
            if not under_way:
                break
            try:
                unit, line = done.get(timeout=5)
            except queue.Empty:
                if dead := [worker.exitcode for worker in workers if worker.exitcode]:
                    raise SystemExit(f"{len(dead)} of {len(workers)} processes ended with {dead[0]}") from None
                continue
            plan.lines[unit] = line
            journal.write(json.dumps(line) + "\n")
            journal.flush()
            under_way -= 1
            if time.monotonic() - said > 20:
                said = time.monotonic()
                print(f"{said - began:.0f} s: {len(plan.lines)} contexts, the last {unit}", flush=True)
    for _ in workers:
        units.put(None)
    for worker in workers:
        worker.join()
    return plan.missing()


def wanted_contexts(args: argparse.Namespace) -> dict[tuple[int, str], int]:
    """Contexts by length and task, lengths in the order in which they were named."""
    setting = setting_of(args, "cpu")
    lengths = [int(part) for part in args.context.split(",")]
    return {
        (length, name): contexts_wanted(setting, name, task, length, args.questions)
        for length in lengths
        for name, task in COMMANDS[args.command].tasks(args).items()
    }


def report(args: argparse.Namespace) -> int:
    """Judge a journal, and write data and table. Returns how many contexts are missing."""
    wanted, kvs = wanted_contexts(args), list(parse_specs(args.kv))
    made, lines = read_journal(args.journal)
    if missing := Plan(wanted, kvs, lines).missing():
        return missing
    measured = Measured()
    for (length, task), contexts in wanted.items():
        for row, cell in exact_cells(lines, length, task, contexts).items():
            measured.cells[row, length] = cell
        for kv in ("fp16", *kvs):
            for number in range(contexts):
                line = lines.get((length, task, number, kv))
                if line is None:
                    continue  # not asked: nothing discriminates
                measured.seconds[kv] += line["seconds"]
                if kv == "fp16":
                    continue
                measured.bits[kv, length], measured.summaries[kv] = line["bits"], line["summary"]
                for row, share, exact, reads in line["answers"]:
                    measured.cells[row, length].packed.setdefault(kv, []).append(Score(share, exact))
                    measured.cells[row, length].reads.setdefault(kv, []).append(reads)
    found = outcome(args, setting_of(args, "cpu"), sorted({length for length, _ in wanted}), measured,
                    "depth" if args.command == "needle" else "task")  # fmt: skip
    if args.command == "needle":
        found.data["needles"] = args.needles or 1
    found.data |= made
    args.output.with_suffix(".json").write_text(json.dumps(found.data, indent=1) + "\n")
    print("\n".join(found.lines))
    for row in (found.headers, *found.rows):
        print(" | ".join(row))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    given = parse()
    left = ask(given) if given.step == "ask" else report(given)
    if left:
        sys.exit(f"{left} contexts are not in {given.journal} yet; `ask` goes on where it was")
