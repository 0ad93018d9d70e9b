"""Where the modules of gpuload 0.1 are now.

For one release, modules can be imported by their old names, with a warning, and pickles that name them can be read.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "gpuload.arrays": "gpuload.core.arrays",
    "gpuload.cache.disk": "gpuload.pipeline.keep_on_disk",
    "gpuload.cache.shared": "gpuload.cache.shared_store",
    "gpuload.chats.dataset": "gpuload.kinds.chats.dataset",
    "gpuload.chats.device": "gpuload.kinds.training_device",
    "gpuload.chats.engine": "gpuload.kinds.chats.engine",
    "gpuload.chats.formats": "gpuload.kinds.chats.formats",
    "gpuload.chats.load": "gpuload.kinds.load_chats",
    "gpuload.chats.reference": "gpuload.kinds.chats.reference",
    "gpuload.errors": "gpuload.core.errors",
    "gpuload.fingerprint": "gpuload.dataset.fingerprint",
    "gpuload.lazy": "gpuload.core.lazy",
    "gpuload.load": "gpuload.kinds.load",
    "gpuload.loader": "gpuload.dataset.loader",
    "gpuload.loss": "gpuload.core.marks",
    "gpuload.options": "gpuload.core.options",
    "gpuload.origins": "gpuload.dataset.origins",
    "gpuload.pairs.dataset": "gpuload.kinds.pairs.dataset",
    "gpuload.pairs.device": "gpuload.kinds.training_device",
    "gpuload.pairs.engine": "gpuload.kinds.pairs.engine",
    "gpuload.pairs.formats": "gpuload.kinds.pairs.formats",
    "gpuload.pairs.load": "gpuload.kinds.load_pairs",
    "gpuload.pairs.parts": "gpuload.core.marks",
    "gpuload.pairs.reference": "gpuload.kinds.pairs.reference",
    "gpuload.reference.training": "gpuload.kinds.training_reference",
    "gpuload.report": "gpuload.dataset.report",
    "gpuload.row_reader": "gpuload.dataset.arrow",
    "gpuload.verify": "gpuload.pipeline.verify",
}
"""Old name → new name."""

_PACKAGES = ("gpuload.chats", "gpuload.pairs")


def old_names(old: str, new: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has moved."""

    def look_up(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(new), name)
        warnings.warn(f"{old} has moved: import {name} from {new}", DeprecationWarning, stacklevel=2)
        return found

    return look_up


class OldModules(MetaPathFinder, Loader):
    """Finds modules by their old names: empty ones, which look names up in the new module."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name in MOVED or name in _PACKAGES:
            return ModuleSpec(name, self, is_package=name in _PACKAGES)
        return None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        if old in MOVED:
            module.__dict__["__getattr__"] = old_names(old, MOVED[old])
