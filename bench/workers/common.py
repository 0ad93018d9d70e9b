"""What all workers share: their job, the clock, the memory meter, digests, the answer."""

import contextlib
import ctypes
import gc
import hashlib
import itertools
import json
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

STARTED = time.perf_counter()
_PACKAGES = "gpuload gigatoken transformers tokenizers datasets verl pandas pyarrow numpy torch".split()


def job() -> dict[str, Any]:
    """What to do: the JSON object given on the command line."""
    return dict(json.loads(sys.argv[1]))


def answer(**facts: Any) -> None:
    """Prints the one line that the launcher reads."""
    print("\n" + json.dumps(facts | {"versions": _versions()}), flush=True)


class Meter:
    """Seconds and peak memory of a stretch of work.

    Made right before the work: the baseline is the memory in use then, with what the allocator holds unused given
    back, so that the work cannot hide in it. The peak is the kernel's own high-water mark, reset at the start.
    """

    def __init__(self) -> None:
        self.setup_seconds = time.perf_counter() - STARTED
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        self._baseline = _status_bytes("VmRSS")
        self._started = time.perf_counter()

    def stop(self) -> dict[str, float | int]:
        """What the work took, as facts for `answer`."""
        seconds = time.perf_counter() - self._started
        return {
            "seconds": seconds,
            "setup_seconds": self.setup_seconds,
            "baseline_rss": self._baseline,
            "peak_rss": _status_bytes("VmHWM"),
            "largest_child_peak_rss": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        }


def rows_digest(rows: Iterable[int]) -> str:
    """Tells sequences of row numbers apart."""
    numbers = np.asarray(list(rows), "<i8")
    return hashlib.blake2b(numbers.tobytes(), digest_size=12).hexdigest()


def texts_digest(values: Iterable[Any]) -> str:
    """Tells sequences of conversations apart, whatever the order of a message's keys."""
    digest = hashlib.blake2b(digest_size=12)
    for value in values:
        digest.update(json.dumps(value, sort_keys=True).encode())
    return digest.hexdigest()


def tokens_digest(values: Any, lengths: Any) -> str:
    """Tells ragged arrays of ids apart."""
    digest = hashlib.blake2b(np.asarray(values, "<i4").tobytes(), digest_size=12)
    digest.update(np.asarray(lengths, "<i8").tobytes())
    return digest.hexdigest()


def dataset_rows(dataset: Any) -> list[int]:
    """The rows of its files that a filtered `datasets.Dataset` has: it keeps them as a column of numbers."""
    indices = dataset._indices
    return list(range(len(dataset))) if indices is None else indices.column(0).to_pylist()


def rate(draw: Callable[[Sequence[int]], Any], batches: Sequence[Sequence[int]], seconds: float) -> float:
    """Rows per second of drawing batches, over and over, for some seconds; the first one is not counted."""
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
    """Full batches of the rows in an order that is the same for every contender."""
    order = np.random.default_rng(0).permutation(np.asarray(rows))
    size = min(size, len(order))
    return [order[i : i + size].tolist() for i in range(0, len(order) - size + 1, size)]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        if name in sys.modules:
            with contextlib.suppress(PackageNotFoundError):
                found[name] = version(name)
    return found


def _status_bytes(key: str) -> int:
    """A line of /proc/self/status, or what getrusage knows on machines without it."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
