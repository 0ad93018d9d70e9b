"""Shared by all contenders: task, clock, memory meter, digests, answer."""

import contextlib
import ctypes
import gc
import hashlib
import itertools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
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
    otherwise the work could reuse it unseen. The peak is the kernel's high-water mark, reset at the start.
    """

    def __init__(self) -> None:
        self.setup_seconds = time.perf_counter() - STARTED
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        self._baseline = _status_bytes("VmRSS")
        self._cpu = _cpu_seconds()
        self._started = time.perf_counter()

    def stop(self) -> dict[str, float | int]:
        """Return the measurement as facts for `answer`."""
        seconds = time.perf_counter() - self._started
        return {
            "seconds": seconds,
            "cpu_seconds": _cpu_seconds() - self._cpu,
            "setup_seconds": self.setup_seconds,
            "baseline_rss": self._baseline,
            "peak_rss": _status_bytes("VmHWM"),
            "largest_child_peak_rss": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        }


def rows_digest(rows: Iterable[int]) -> str:
    """Return a digest of row numbers."""
    numbers = np.asarray(list(rows), "<i8")
    return hashlib.blake2b(numbers.tobytes(), digest_size=12).hexdigest()


def prompts_digest(values: Iterable[Any]) -> str:
    """Return a digest of conversations, independent of the order of a message's keys."""
    digest = hashlib.blake2b(digest_size=12)
    for value in values:
        digest.update(json.dumps(value, sort_keys=True).encode())
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


def rate(draw: Callable[[Any], Any], batches: Sequence[Any], seconds: float) -> float:
    """Return rows per second of drawing batches, sequences of row numbers, in a cycle; the first is not counted."""
    draw(batches[0])
    rows = 0
    started = time.perf_counter()
    for batch in itertools.cycle(batches):
        draw(batch)
        rows += len(batch)
        elapsed = time.perf_counter() - started
        if elapsed >= seconds:
            return rows / elapsed
    raise ValueError("no batches")


def shuffled_batches(rows: Sequence[int], size: int) -> list[list[int]]:
    """Return full batches of rows, in an order that is the same for every contender."""
    order = np.random.default_rng(0).permutation(np.asarray(rows))
    size = min(size, len(order))
    return [order[i : i + size].tolist() for i in range(0, len(order) - size + 1, size)]


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
