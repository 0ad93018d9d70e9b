"""Shared by all contenders: task, clocks, memory meter, epochs, digests, answer."""

import contextlib
import ctypes
import gc
import hashlib
import json
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bench.environment import PACKAGES, versions

STARTED = time.perf_counter()


def task_given() -> dict[str, Any]:
    """Return the task of the command line."""
    return dict(json.loads(sys.argv[1]))


def answer(**facts: Any) -> None:
    """Print the line that the runner reads, with the versions of the packages that were imported."""
    print(
        "\n" + json.dumps(facts | {"versions": versions(name for name in PACKAGES if name in sys.modules)}), flush=True
    )


class Meter:
    """Meter of seconds, CPU seconds (with those of child processes that have ended) and peak memory, started by its
    construction.

    The baseline is the resident memory at that moment, after unused memory of the allocator was returned to the system;
    otherwise the work could reuse it unseen. The peak is the kernel's high-water mark, reset at the start. Modules that
    are imported meanwhile are part of the answer: contenders import what they need before the clock starts.
    """

    def __init__(self) -> None:
        self.setup_seconds = time.perf_counter() - STARTED
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        self._baseline = _status_bytes("VmRSS")
        self._modules = set(sys.modules)
        self._cpu = _cpu_seconds()
        self._started = time.perf_counter()

    def stop(self) -> dict[str, Any]:
        """Return the measurement as facts for `answer`."""
        seconds = time.perf_counter() - self._started
        return {
            "seconds": seconds,
            "cpu_seconds": _cpu_seconds() - self._cpu,
            "setup_seconds": self.setup_seconds,
            "imported": sorted(set(sys.modules) - self._modules),
            "baseline_rss": self._baseline,
            "peak_rss": _status_bytes("VmHWM"),
            "largest_child_peak_rss": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        }


class Clock:
    """Seconds of named pieces of work, and CPU seconds: of all threads, and of child processes that have ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started, cpu = time.perf_counter(), _cpu_seconds()
        yield
        self.seconds[name] = time.perf_counter() - started
        self.cpu_seconds[name] = _cpu_seconds() - cpu


def numbers_digest(rows: Iterable[Sequence[Any]]) -> str:
    """Return a digest of rows, each of which is some lists of numbers."""
    digest = hashlib.blake2b(digest_size=12)
    for row in rows:
        for values in row:
            digest.update(np.asarray(values, np.int64).tobytes())
    return digest.hexdigest()


def rows_digest(rows: Iterable[int]) -> str:
    """Return a digest of row numbers."""
    numbers = np.asarray(list(rows), "<i8")
    return hashlib.blake2b(numbers.tobytes(), digest_size=12).hexdigest()


def objects_digest(values: Iterable[Any]) -> str:
    """Return a digest of Python objects such as conversations, independent of the order of keys."""
    digest = hashlib.blake2b(digest_size=12)
    for value in values:
        digest.update(json.dumps(value, sort_keys=True, default=_plain).encode())
    return digest.hexdigest()


def tokens_digest(values: Any, lengths: Any) -> str:
    """Return a digest of a ragged array of ids."""
    digest = hashlib.blake2b(np.asarray(values, "<i4").tobytes(), digest_size=12)
    digest.update(np.asarray(lengths, "<i8").tobytes())
    return digest.hexdigest()


def dataset_rows(dataset: Any) -> list[int]:
    """Return the row numbers of a filtered `datasets.Dataset`, which stores them as a column."""
    indices = dataset._indices
    return list(range(len(dataset))) if indices is None else indices.column(0).to_pylist()


def epoch(loader: Iterable[Any], keys: Sequence[str], checked: bool) -> dict[str, float | int]:
    """Return the seconds of an epoch in which these keys of each batch are read.

    Args:
        loader: Makes the batches of an epoch in each iteration.
        keys: Keys of each batch.
        checked: Add up all ids in one more epoch, for a comparison with other contenders.
    """
    started = time.perf_counter()
    for batch in loader:
        for key in keys:
            batch[key]
    found: dict[str, float | int] = {"seconds": time.perf_counter() - started}
    if checked:
        sums = np.zeros(3, np.int64)
        for batch in loader:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            sums += [len(ids), int(mask.sum()), int((ids * mask).sum())]
        found |= dict(zip(("rows", "tokens", "sum_of_ids"), sums.tolist(), strict=True))
    return found


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _cpu_seconds() -> float:
    """All threads of this process and of its children that have ended, in programs and in the system for them."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _status_bytes(key: str) -> int:
    """A line of /proc/self/status, or on other systems the peak that getrusage reports."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
