"""transformers learns of packed weights as soon as both it and this package are imported, in either order.

A checkpoint with packed weights that transformers does not know would be loaded as random numbers and a warning. So
importing `rotaryquant` leaves a note with Python's import system: once the part of transformers that keeps quantizers
has been imported, ours is added to it by its public registration. Until then nothing of transformers is imported.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

#: Where transformers keeps its quantizers, and what adds ours.
_WHERE, _OURS = "transformers.quantizers.auto", "rotaryquant.integrations.transformers.packed_weights"


class _Then(importlib.abc.Loader):
    """A module's own loader, and ours imported behind it."""

    def __init__(self, own: importlib.abc.Loader) -> None:
        self._own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As its own loader does."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As its own loader does, and then ours where what it needs is there."""
        self._own.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        importlib.import_module(_OURS)


class _Note(importlib.abc.MetaPathFinder):
    """Finds one module as the finders behind it do, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of that module with our loader around its own."""
        if name != _WHERE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


def register() -> None:
    """Register now where transformers' quantizers are imported, else when they are."""
    if _WHERE in sys.modules:
        importlib.import_module(_OURS)
    elif not any(isinstance(finder, _Note) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Note())
