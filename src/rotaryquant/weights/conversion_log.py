"""What a conversion says of each tensor, kept while it runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rotaryquant.weights.shards import write_whole


class Log:
    """A line a tensor, kept while the run goes on, so that one that is stopped loses none. path: of the whole log."""

    def __init__(self, path: Path) -> None:
        self._whole, self._path = path, path.with_name(path.name + ".partial")

    def add(self, said: Mapping[str, Any]) -> None:
        """One more tensor; written before the tensor counts as there."""
        with self._path.open("a") as file:
            file.write(json.dumps(said) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        for path in (self._whole, self._path):
            for line in path.read_text().splitlines() if path.is_file() else ():
                try:
                    yield json.loads(line)
                except ValueError:  # cut off by a stop; the tensor was then written again, and so was its line
                    continue

    def finish(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """All lines in the order of the tensors, each tensor's last, as the whole log."""
        by_name = {line["name"]: line for line in self._lines()}
        lines = [by_name[name] for name in names]
        write_whole(self._whole, "".join(json.dumps(line) + "\n" for line in lines))
        self._path.unlink(missing_ok=True)
        return lines
