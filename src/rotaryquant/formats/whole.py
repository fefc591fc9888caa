"""Files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(target: str | Path) -> Iterator[str]:
    """The name of a file beside `target` to write, which takes its place at the end; after an error nothing is left.

    Raises OSError where the folder cannot be written.
    """
    path = Path(target)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield name
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
