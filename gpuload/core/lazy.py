"""What is made when it is first used: names of a package, and the Python objects of a batch."""

import importlib
import os
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
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


def _in_child() -> None:
    """Python 3.11 has a lock for each `cached_property`, of all objects together. In a process that was forked while
    another thread made such a value, nobody would release it."""
    for module in [module for name, module in sys.modules.items() if name.startswith("gpuload.")]:
        for kind in [each for each in vars(module).values() if isinstance(each, type)]:
            for value in vars(kind).values():
                if isinstance(value, cached_property) and hasattr(value, "lock"):
                    value.lock = threading.RLock()


if sys.version_info < (3, 12) and hasattr(os, "register_at_fork"):  # the latter: not on Windows
    os.register_at_fork(after_in_child=_in_child)


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
