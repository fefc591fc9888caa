"""`rotaryquant chat`: a conversation whose cache is kept from turn to turn."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from rotaryquant.cli import common, figures
from rotaryquant.cli.screen import note, print_json, print_table
from rotaryquant.errors import ConfigError

if TYPE_CHECKING:
    from rotaryquant.llm import LLM, TextStream

_HELP = """/help    this text
/reset   forget the conversation
/report  what the KV cache took so far
/exit    leave (Ctrl-D as well)
Ctrl-C stops an answer; what was said stays in the conversation."""


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    made = common.parser(
        "chat",
        "Talk to a model; /help lists what else can be typed. With --json, lines of stdin are the user's messages and "
        "the whole conversation is printed at its end.",
    )
    common.add_model(made)
    common.add_sampling(made, max_tokens=512)
    common.add_loading(made)
    args = made.parse_args(words)
    options = common.sampling_options(args)
    llm = common.load(args)
    talk = Conversation(llm, args, options)
    talk.check()
    note(f"{llm.name}: {llm.summary()}")
    interactive = sys.stdin.isatty() and not args.json
    if interactive:
        note("/help lists commands, Ctrl-D leaves")
    for line in _lines(prompt="> " if interactive else ""):
        if not talk.handle(line):
            break
    if args.json:
        print_json({"model": llm.name, "turns": talk.turns})
    return 0


def _lines(prompt: str) -> Iterator[str]:
    """What the user types, line by line, until the input ends."""
    if prompt:
        with contextlib.suppress(ImportError):  # not on every system; it only makes editing pleasant
            import readline  # noqa: F401
    while True:
        try:
            yield input(prompt)
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            if not prompt:
                raise
            print("\n(Ctrl-D or /exit leaves)")


@contextlib.contextmanager
def _stoppable(stream: "TextStream") -> Iterator[None]:
    """The first Ctrl-C inside stops the stream between two tokens, the second interrupts the program."""

    def stop(number: int, frame: FrameType | None) -> None:
        stream.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """History and cache of a chat. turns: what was said, as plain data for `--json`."""

    def __init__(self, llm: "LLM", args: argparse.Namespace, options: dict[str, Any]) -> None:
        self.llm = llm
        self.options = options
        self.args = args
        self.turns: list[dict[str, Any]] = []
        self.last: TextStream | None = None
        self.start = [{"role": "system", "content": args.system}] if args.system else []
        self.messages = list(self.start)

    def check(self) -> None:
        """Raise ConfigError where this model cannot chat like this at all, before the user has typed anything."""
        self.llm.prompt([*self.start, {"role": "user", "content": "hi"}])

    def handle(self, line: str) -> bool:
        """Act on one line; False ends the conversation."""
        word = line.strip()
        if word == "/exit":
            return False
        if word == "/reset":
            self.messages, self.last = list(self.start), None
            self.llm.reset()
            note("the conversation is forgotten")
        elif word == "/report":
            self._report()
        elif word == "/help":
            note(_HELP)
        elif word.startswith("/") and " " not in word:
            note(f"unknown command {word}; /help lists them")
        elif word:
            self._answer(line)
        return True

    def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        try:
            stream = self.llm.stream(self.messages, reuse=True, **self.options)
        except ConfigError as error:
            if self.args.json:
                raise
            self.messages.pop()  # so that the next line is not refused for this one
            note(f"error: {error}\n/reset starts over")
            return
        said = self._say(stream)
        if stream.finish_reason == "cancelled" and not said:
            self.messages.pop()  # stopped before the answer began: as if it had not been asked
            note("(stopped)")
            return
        self.messages.append({"role": "assistant", "content": said})
        self.last = stream
        self.turns.append(
            {
                "user": text,
                "assistant": said,
                "finish_reason": stream.finish_reason,
                "usage": stream.usage.as_dict(),
                "figures": figures.measure(self.llm, stream).as_dict(),
            }
        )
        self._say_why(stream)

    def _say(self, stream: "TextStream") -> str:
        pieces = []
        with _stoppable(stream):
            for piece in stream:
                pieces.append(piece)
                if not self.args.json:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        if pieces and not self.args.json:
            sys.stdout.write("\n")
            sys.stdout.flush()
        return "".join(pieces)

    def _say_why(self, stream: "TextStream") -> None:
        """Tell why an answer ended early."""
        used = stream.usage.prompt_tokens + stream.usage.completion_tokens
        if stream.finish_reason == "cancelled":
            note("(stopped)")
        elif stream.finish_reason == "length" and used >= self.llm.max_context:
            note(f"(the context of {self.llm.max_context:,} tokens is full; /reset starts over)")
        elif stream.finish_reason == "length":
            note(f"(cut after --max-tokens {self.args.max_tokens})")

    def _report(self) -> None:
        note(self.llm.summary())
        if self.last is None:
            note("nothing was said yet")
        else:
            print_table(figures.rows(figures.measure(self.llm, self.last), self.last), file=sys.stderr)
