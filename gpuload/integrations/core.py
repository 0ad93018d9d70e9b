"""What integrations with trainers share: settings in the trainer's configuration, and lines in its log.

An integration replaces one step of a trainer. It says so in one line, takes every setting that it does not know for an
error, and falls back to the trainer's own code, with the reason, for data that it cannot prepare exactly.
"""

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import RowNumbers, offsets_of
from gpuload.core.errors import DeviceError, GpuloadError, OptionError
from gpuload.core.options import nearest, plain
from gpuload.sources.types import is_messages, is_text

_Made = TypeVar("_Made")
_Item = TypeVar("_Item")

LOAD_OPTIONS = ("device", "gpu_memory_limit", "verify", "progress", "token_cache", "token_cache_bytes")
"""Options of `gpuload.load` that do not change rows: every integration takes them."""


def settings_under(key: str, given: Any, known: Collection[str]) -> dict[str, Any]:
    """Read gpuload's section of a trainer's configuration, such as "data.gpuload": a mapping of any configuration
    library, or None. An `OptionError` if it is something else, or has an unknown key (the message names the nearest
    known one).
    """
    section = {} if given is None else plain(given)
    if not isinstance(section, Mapping):
        raise OptionError(f"{key}={section!r}: expected keys under it, such as {key}.device=auto")
    for name in section:
        if name not in known:
            raise OptionError(f"unknown key {key}.{name}{nearest(str(name), set(known))}")
    return dict(section)


def check_switches(key: str, settings: Mapping[str, Any], names: Collection[str]) -> None:
    """Check that settings are true or false; an `OptionError` if one is something else."""
    for name in names:
        if not isinstance(settings[name], bool):
            raise OptionError(f"{key}.{name}={settings[name]!r}: expected true or false")


def release_of(package: str, trainer: str) -> str:
    """A trainer's name with its version, such as "TRL 1.16.0"; the name alone for a checkout that is not installed."""
    try:
        return f"{trainer} {version(package)}"
    except PackageNotFoundError:
        return trainer


def imported(names: Mapping[str, Sequence[str]]) -> tuple[dict[str, Any], str | None]:
    """Private parts of a trainer, which any release may move: of module → what is used of it, such as "Dataset" or
    "Dataset.method", name → what was imported, and which one is missing, if there is one."""
    found: dict[str, Any] = {}
    for module, wanted in names.items():
        try:
            home = importlib.import_module(module)
        except ImportError as error:
            return found, f"{module} cannot be imported ({error})"
        for name in wanted:
            try:
                found[name] = attrgetter(name)(home)
            except AttributeError:
                return found, f"{module} has no {name}"
    return found, None


def log_fallback(logger: logging.Logger, trainer: str, reason: str) -> None:
    """Say that a trainer's own code, such as "verl's own dataset class", prepares the data, and why gpuload does
    not."""
    logger.warning("gpuload: falls back to %s: %s", trainer, reason)


def log_own_rows(logger: logging.Logger, trainer: str, reasons: Counter[str], total: int) -> None:
    """Say how many of all rows the trainer prepares itself, if there are any: reason → number of rows."""
    if reasons:
        named = "; ".join(f"{reason} ({count:,})" for reason, count in reasons.most_common(3))
        counts = f"{reasons.total():,}", f"{total:,}"
        logger.warning("gpuload: %s prepares %s of %s rows itself, when they are read: %s", trainer, *counts, named)


def log_ignored(logger: logging.Logger, settings: Mapping[str, Any], reason: str) -> None:
    """Say which settings of the trainer have no effect, if there are any. `reason` ends the sentence."""
    if settings:
        named = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        logger.warning("gpuload: %s %s no effect: %s", named, "has" if len(settings) == 1 else "have", reason)


def unless_unsupported(make: Callable[[], _Made], logger: logging.Logger, trainer: str) -> _Made | None:
    """The result of `make`; None where gpuload cannot do the work, and a line in the log says why the trainer's code
    does it. A `DeviceError` if a device that the user has named is not available, or has too little memory."""
    try:
        return make()
    except DeviceError:
        raise
    except GpuloadError as error:
        log_fallback(logger, trainer, str(error))
        return None


def runs(items: Sequence[_Item], sizes: RowNumbers, most: int) -> Iterator[Sequence[_Item]]:
    """Cuts a sequence into runs of about `most`, by the sizes (n,) of its items; an item that is larger is not cut."""
    run = offsets_of(sizes)[:-1] // most  # of each item
    for number in np.unique(run).tolist():
        low, high = np.searchsorted(run, [number, number + 1])
        yield items[low:high]


def are_messages(kind: pa.DataType) -> bool:
    """Whether values of a type are messages whose content is text."""
    fields = {field.name: field.type for field in kind.value_type} if is_messages(kind) else {}
    return "role" in fields and "content" in fields and is_text(fields["content"])
