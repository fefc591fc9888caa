"""From options to a judged grid: what `eval needle` and `eval ruler` do alike."""

import argparse
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.evals.inputs import add_model_arguments, load_model
from rotaryquant.evals.peers import parse_specs
from rotaryquant.evals.plots import grid_picture
from rotaryquant.evals.retrieval import grid
from rotaryquant.evals.retrieval.answers import ask
from rotaryquant.evals.retrieval.contexts import Context, Filler, build_context, check_length
from rotaryquant.evals.retrieval.forms import FORMS, Form, form_of
from rotaryquant.evals.retrieval.grid import Cell
from rotaryquant.evals.retrieval.questions import score
from rotaryquant.evals.retrieval.tasks import Task
from rotaryquant.evals.simulated import Simulation
from rotaryquant.integrations.transformers.checkpoints import Loaded
from rotaryquant.kv.accounting import bits_per_value
from rotaryquant.measuring import Outcome, Progress, model_name, provenance, read_text

_LEAST_CONTEXT = 512


@dataclass(frozen=True)
class Setting:
    """With what questions are asked: of whom, in which words and filler, through which caches, how many in a batch."""

    loaded: Loaded
    form: Form
    filler: Filler
    specs: Mapping[str, KVCacheConfig | Simulation]
    seed: int = 0
    batch: int = 8


@dataclass
class Measured:
    """Cells by row and context; of each packed cache its bits by context, a line on it, and seconds by cache."""

    cells: dict[tuple[str, int], Cell] = field(default_factory=dict)
    bits: dict[tuple[str, int], float] = field(default_factory=dict)
    summaries: dict[str, str] = field(default_factory=dict)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def ask(self, setting: Setting, context: Context, length: int, group: int, kv_name: str) -> None:
        """Ask all questions of a context through one cache and add their scores. group: number of the context."""
        kv = setting.specs.get(kv_name)
        begun = time.perf_counter()
        answered = ask(setting.loaded, setting.form, context, kv, setting.batch)
        self.seconds[kv_name] += time.perf_counter() - begun
        for question, said in zip(context.questions, answered.said, strict=True):
            cell, scored = self.cells.setdefault((question.row, length), Cell()), score(question, said.answers)
            if kv is None:
                cell.groups.append(group)
                cell.exact.append(scored)
            else:
                cell.packed.setdefault(kv_name, []).append(scored)
                cell.reads.setdefault(kv_name, []).append(said.packed_reads)
        if kv is not None:
            self.bits[kv_name, length] = bits_per_value(answered.layers, length)
            self.summaries[kv_name] = answered.summary


def add_grid_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a measurement that asks questions of contexts."""
    add_model_arguments(parser, "auto")
    parser.add_argument(
        "--kv", metavar="SPEC", action="append", help="ours or a simulated peer; repeat to compare; default iso3"
    )
    parser.add_argument("--text", metavar="FILE", required=True, help="filler: real text, UTF-8")
    parser.add_argument(
        "--context", metavar="LIST", default="4096", help="tokens, question and answer included (default 4096)"
    )
    parser.add_argument(
        "--questions", type=int, default=grid.QUESTIONS, metavar="N",
        help=f"of each cell at least (default {grid.QUESTIONS}, with fewer none counts)",
    )  # fmt: skip
    parser.add_argument(
        "--form", default="auto", metavar="NAME", help=f"{', '.join(FORMS)} (default: chat where there is a template)"
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="questions answered at once (default 8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of names, values, places and filler")


def numbers_of(option: str, text: str, low: int, high: int | None = None) -> list[int]:
    """The different whole numbers that a list names, ascending. Raises ConfigError for anything else."""
    found = set()
    for part in map(str.strip, text.split(",")):
        if not part.isdecimal() or int(part) < low or (high is not None and int(part) > high):
            wanted = f"at least {low}" if high is None else f"{low} to {high}"
            raise ConfigError(f"{option} {part!r}: wanted numbers of {wanted}, comma-separated")
        found.add(int(part))
    return sorted(found)


def run_grid(args: argparse.Namespace, progress: Progress, tasks: Mapping[str, Task], row: str) -> Outcome:
    """Ask what `tasks` draw at every context, compare and judge. row: what the grid's rows are called.

    Raises RotaryQuantError with one clear line for a wrong input.
    """
    contexts = numbers_of("--context", args.context, _LEAST_CONTEXT)
    specs = parse_specs(args.kv or ["iso3"])
    if "fp16" in specs:
        raise ConfigError("--kv fp16: the 16-bit cache is what others are compared with; name those")
    if args.questions < 1 or args.batch < 1:
        raise ConfigError(f"questions={args.questions}, batch={args.batch}: need at least 1 of each")
    text = read_text(Path(args.text))
    loaded = load_model(args.model, args.dtype, args.threads, args.device)
    check_length(loaded, contexts)
    packed = {name: kv for name, kv in specs.items() if kv is not None}
    setting = Setting(loaded, form_of(args.form, loaded), Filler(loaded, text), packed, args.seed, args.batch)
    measured = measure(setting, tasks, contexts, args.questions, progress)
    return outcome(args, setting, contexts, measured, row)


def measure(
    setting: Setting,
    tasks: Mapping[str, Task],
    contexts: Sequence[int],
    questions: int,
    progress: Progress,
) -> Measured:
    """Ask what the tasks draw in contexts of each length, until every row has at least `questions`.

    The 16-bit cache is asked first, and packed ones not at all where its answers show that no row of a task
    discriminates. A context is seeded by its task, length and number alone: other tasks and lengths change nothing.
    """
    measured = Measured()
    parts = list(itertools.product(contexts, tasks.items()))
    for part, (length, (name, task)) in enumerate(parts):
        wanted = range(contexts_wanted(setting, name, task, length, questions))
        drawn = [draw(setting, name, task, length, number) for number in wanted]
        rows = {(question.row, length) for context in drawn for question in context.questions}
        caches = ("fp16", *setting.specs)
        for place, kv_name in enumerate(caches):
            if place and all(measured.cells[row].verdict() == grid.BLIND for row in rows):
                break
            for number, context in enumerate(drawn):
                share = (part + (place + number / len(drawn)) / len(caches)) / len(parts)
                progress(f"{name} at {length:,}, {kv_name}: context {number + 1} of {len(drawn)}", share)
                measured.ask(setting, context, length, number, kv_name)
    return measured


def draw(setting: Setting, name: str, task: Task, length: int, number: int) -> Context:
    """Context `number` of a task at a length, the same whatever else is drawn."""
    rng = _rng(setting, name, length, number)
    drawn = task(rng, setting.form.wording)
    start = rng.randrange(len(setting.filler.sentences))
    return build_context(setting.loaded, setting.form, setting.filler, drawn, length, start)


def contexts_wanted(setting: Setting, name: str, task: Task, length: int, questions: int) -> int:
    """How many contexts of a task give every row at least `questions`."""
    number = least = 0
    while least < questions:
        drawn = task(_rng(setting, name, length, number), setting.form.wording)
        least += min(Counter(question.row for question in drawn.questions).values())
        number += 1
    return number


def _rng(setting: Setting, name: str, length: int, number: int) -> random.Random:
    return random.Random(f"{setting.seed}/{name}/{length}/{number}")  # noqa: S311 - a reproducible draw


def outcome(
    args: argparse.Namespace, setting: Setting, contexts: Sequence[int], measured: Measured, row: str
) -> Outcome:
    """What was measured as data, a table and a picture, judged. args: model, device, text and seed of the run."""
    form = setting.form
    results: list[dict[str, Any]] = []
    for kv in setting.specs:
        for (name, context), cell in measured.cells.items():
            results.append({"kv": kv, "row": name, "context": context, **cell.result(kv)})
            if kv in cell.packed:
                results[-1]["bits_per_value"] = measured.bits[kv, context]
    cells = measured.cells.values()
    asked = {kv: sum(len(cell.exact) for cell in cells if kv in ("fp16", *cell.packed)) for kv in measured.seconds}
    verdicts = {kv: [cell for cell in results if cell["kv"] == kv] for kv in setting.specs}
    data: dict[str, Any] = {
        **provenance(args.device),
        "model": model_name(args.model),
        "dtype": str(setting.loaded.model.dtype).removeprefix("torch."),
        "text": Path(args.text).name,
        "contexts": list(contexts),
        "form": form.name,
        "seed": args.seed,
        "rule": {"accuracy_16bit": grid.ACCURACY, "questions": grid.QUESTIONS, "contexts": grid.CONTEXTS,
                 "loss": grid.LOSS},
        "passed": all(map(grid.passes, verdicts.values())),
        "seconds_per_question": {kv: seconds / asked[kv] for kv, seconds in measured.seconds.items()},
        "results": results,
    }  # fmt: skip
    seconds = ", ".join(f"{kv} {each:.2f}" for kv, each in data["seconds_per_question"].items())
    lines = [
        f"{data['model']}, {data['dtype']}, {form.name} form, filler from {data['text']}: the same "
        f"{asked['fp16']:,} questions through the 16-bit and, where it can do them, each packed cache",
        *(grid.verdict_line(kv, cells) for kv, cells in verdicts.items()),
        *measured.summaries.values(),
        f"seconds per question, its share of reading the context included: {seconds}",
    ]
    headers, rows = grid.table(results, row)
    return Outcome(data, headers, rows, lines, data["passed"], grid_picture(data, row))
