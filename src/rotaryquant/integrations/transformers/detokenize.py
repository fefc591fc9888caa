"""From token ids to text, piece by piece: no character is cut, and nothing of a stop text slips out."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_UNKNOWN = "\ufffd"

#: Bytes of a character that may still be missing; some decoders show one mark for each byte.
_MAX_HELD = 3


def decode_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of `ids`: special tokens skipped, white space left as it is."""
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class StreamDecoder:
    """Text of a growing sequence of ids; the pieces joined equal `decode_text` of all ids.

    Only a window of the newest ids is decoded again for each token. It starts at ids that have text of their own,
    since decoders strip a space from the start of what they are given. A decoder that falls back to bytes shows a
    whole run of bytes as unknown while one of them is, even characters that were complete before: those stay given,
    and if the run never becomes valid, what follows them is decoded on its own (the only case without equality).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._text: list[str] = []
        self._start = 0  # of the window
        self._settled = 0  # ids whose text has been given completely
        self._given = ""  # the part of the window's text that has been given

    def push(self, token: int) -> str:
        """Text that `token` completes, maybe none."""
        self.ids.append(token)
        window, held = decode_text(self.tokenizer, self.ids[self._start :]), 0
        while held < min(_MAX_HELD, len(window)) and window[-1 - held] == _UNKNOWN:
            held += 1
        if window.startswith(self._given):
            piece = window[len(self._given) : max(len(window) - held, len(self._given))]
        elif held:
            piece = ""  # complete characters inside a run of bytes that is not finished
        else:
            piece = decode_text(self.tokenizer, self.ids[self._settled :])
        self._given += piece
        if held == 0:
            self._move_window()
        self._text.append(piece)
        return piece

    def flush(self) -> str:
        """The rest, incomplete characters as U+FFFD. Call once, at the end."""
        given, full = "".join(self._text), decode_text(self.tokenizer, self.ids)
        piece = full[len(given) :]
        if not full.startswith(given):
            piece = decode_text(self.tokenizer, self.ids[self._settled :])
        self._text.append(piece)
        return piece

    def _move_window(self) -> None:
        """Start the window at the ids that came since the last complete character, if they have text alone."""
        tail = decode_text(self.tokenizer, self.ids[self._settled :])
        if tail:
            self._start, self._given = self._settled, tail
            self._settled = len(self.ids)


class StopText:
    """Holds back text that may become one of the stop texts, and cuts at the first that does."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.found = False
        self._held = ""

    def push(self, piece: str) -> str:
        """Text that is safe to give; sets `found` and gives nothing behind a stop text."""
        if self.found:
            return ""
        text = self._held + piece
        hits = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if hits:
            self.found, self._held = True, ""
            return text[: min(hits)]
        keep = max((self._overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, now that no stop text can follow."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
