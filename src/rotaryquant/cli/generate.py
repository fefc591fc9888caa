"""`rotaryquant generate`: one answer, streamed, and a table of what the KV cache took."""

import argparse
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotaryquant.cli import common, figures
from rotaryquant.cli.screen import note, print_json, print_table
from rotaryquant.cli.sizes import parse_size, show_bytes
from rotaryquant.errors import ConfigError

if TYPE_CHECKING:
    from rotaryquant.llm import LLM, TextStream


def _parse(words: Sequence[str]) -> argparse.Namespace:
    made = common.parser(
        "generate",
        "Answer one prompt. The text goes to stdout, what is in force and the figures go to stderr. A model with a "
        "chat template gets the prompt as a user's message.",
    )
    common.add_model(made)
    made.add_argument("--prompt", metavar="TEXT", help="the prompt, or - to read it from stdin (default: a demo text)")
    made.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    common.add_sampling(made, max_tokens=256)
    made.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    made.add_argument("--memory", type=parse_size, metavar="SIZE", help="refuse what will not fit, such as 16GB")
    common.add_loading(made)
    return made.parse_args(words)


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    args = _parse(words)
    if args.raw and args.system:
        raise ConfigError("--system needs the chat template, which --raw leaves out; drop one of them")
    text = _prompt_text(args.prompt)
    if not text.strip():
        raise ConfigError("--prompt is empty; give it some text")
    if not all(args.stop):
        raise ConfigError("--stop is empty; give it some text, or leave it out")
    options = common.sampling_options(args)
    budget = Budget(args) if args.memory is not None else None
    llm = common.load(args, check=budget.check_folder) if budget is not None else common.load(args)
    stream = llm.stream(_prompt(llm, text, args), stop=args.stop, **options)
    if budget is not None:
        budget.check(llm.config, stream.usage.prompt_tokens)
    in_force = llm.summary()
    note(f"{llm.name}: {in_force}")
    pieces = []
    for piece in stream:
        pieces.append(piece)
        if not args.json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    measured = figures.measure(llm, stream)
    if args.json:
        print_json(_as_json(llm, stream, "".join(pieces), measured))
        return 0
    sys.stdout.write("\n")
    sys.stdout.flush()
    note("")
    if llm.summary() != in_force:  # protection decides when the first block is packed
        note(f"{llm.summary()}\n")
    print_table(figures.rows(measured, stream, args.memory), file=sys.stderr)
    return 0


def _prompt_text(given: str | None) -> str:
    if given is None:
        return resources.files("rotaryquant.cli").joinpath("demo_prompt.txt").read_text(encoding="utf-8").strip()
    return sys.stdin.read() if given == "-" else given


def _prompt(llm: "LLM", text: str, args: argparse.Namespace) -> str | list[dict[str, str]]:
    """The text as it is, or as messages where the model has a template for them."""
    if args.raw or not llm.tokenizer.chat_template:
        if args.system:
            raise ConfigError(f"{llm.name} has no chat template, so --system has no place; put it into the prompt")
        return text
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": text}]


def _as_json(llm: "LLM", stream: "TextStream", text: str, measured: figures.Figures) -> dict[str, Any]:
    return {
        "model": llm.name,
        "text": text,
        "finish_reason": stream.finish_reason,
        "usage": stream.usage.as_dict(),
        "seed": stream.seed,
        "first_ids": stream.prompt.first_ids,
        "bos": stream.prompt.bos_source,
        "figures": measured.as_dict(),
        "report": llm.enabled.report().as_dict() if llm.enabled is not None else None,
    }


class Budget:
    """`--memory`: weights, KV cache and this process must fit, or the run is refused before they are loaded.

    Working memory of a forward is not foreseen; the table compares the peak with the budget afterwards.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from rotaryquant.config import parse_kv

        if not args.device.startswith("cpu"):
            raise ConfigError(f"--memory is checked for the memory of this process, not for device {args.device}")
        self.limit: int = args.memory
        self.max_tokens: int = args.max_tokens
        self.kv = parse_kv(args.kv)
        self.element_bytes = {"float32": 4}.get(args.dtype, 2)
        self.forced = args.dtype != "auto"
        self.process = self.weights = 0

    def check_folder(self, folder: Path) -> None:
        """Refuse a model folder whose weights and shortest run do not fit. Raises ConfigError."""
        from rotaryquant.integrations.transformers.checkpoints import read_config
        from rotaryquant.weights.headers import read_folder

        tensors = read_folder(folder)
        self.process = figures.peak_memory()
        if self.forced:
            self.weights = sum(tensor.elements for tensor in tensors) * self.element_bytes
        else:
            self.weights = sum(tensor.nbytes for tensor in tensors)
            self.element_bytes = 4 if {tensor.dtype for tensor in tensors} == {"F32"} else 2
        self.check(read_config(folder), 1)

    def check(self, config: Any, prompt_tokens: int) -> None:
        """Refuse a prompt and answer that do not fit. Raises ConfigError naming the numbers."""
        from rotaryquant.integrations.transformers.geometry import read_geometry, text_config
        from rotaryquant.kv.footprint import Footprint

        footprint = Footprint(read_geometry(text_config(config)), self.kv)
        tokens = prompt_tokens + self.max_tokens
        cache = footprint.held_bytes(tokens, self.element_bytes)
        prompt = footprint.prompt_bytes(prompt_tokens, self.element_bytes)
        total = self.process + self.weights + cache + prompt
        if total > self.limit:
            raise ConfigError(
                f"--memory {show_bytes(self.limit)} is too small: weights {show_bytes(self.weights)} + KV cache of "
                f"{tokens:,} tokens {show_bytes(cache)} + prompt while it is read {show_bytes(prompt)} + this "
                f"process {show_bytes(self.process)} = {show_bytes(total)}; use a smaller model, fewer tokens or a "
                f"smaller --kv"
            )
