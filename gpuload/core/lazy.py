"""What is made when it is first used: names of a package, and the Python objects of a batch."""

import importlib
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gpuload.core.memory import garbage_collection_paused


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package whose names are imported on first access.

    `homes` has the module of each name, such as ".dataset" for one of the package; ".dataset:Rows" if the name is
    another one there.
    """

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, other = homes[name].partition(":")
        with garbage_collection_paused():  # imports make many objects, and hardly any garbage
            return getattr(importlib.import_module(module, package), other or name)

    return look_up, lambda: sorted(homes)


def imported(name: str) -> ModuleType:
    """A module that replaces itself in `sys.modules` while it is imported, as transformers does.

    A thread that comes to `from name import ...` meanwhile waits, and then gets the module that was replaced, which has
    hardly any names.
    """
    importlib.import_module(name)
    return sys.modules[name]


@dataclass(frozen=True)
class Later:
    """A value that has not been read yet."""

    make: Callable[[], Any]  # makes the value

    def __repr__(self) -> str:
        return "<not read yet>"


class LazyDict(UserDict[str, Any]):
    """A mapping like a dict. Values given as `Later` are made when they are first read, and then kept.

    Examples:
        >>> batch = LazyDict(a=1, b=Later(lambda: [2]))
        >>> batch["b"], dict(batch)
        ([2], {'a': 1, 'b': [2]})
    """

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        if isinstance(value, Later):
            value = self.data[key] = value.make()
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as values: what makes them may need a GPU."""
        return type(self), (dict(self),)
