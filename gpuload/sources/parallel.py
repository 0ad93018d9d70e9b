"""Parts of a file, or several files, decoded by several threads, and delivered in order.

    1. a thread decodes a part, which is some consecutive row groups, or a file
    2. the consumer gets the tables of the first part as they are decoded, then those of the next one
    3. what is decoded and not yet delivered is bounded: beyond that, a thread leaves its part after the next table, and
       the consumer has the part continued when there is room

With k threads and cores, and enough parts, the consumer waits for about a k-th of the decoding. Threads do not wait for
the consumer, so a consumer that ends early leaves none behind.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

PART_ROWS = 1 << 16
"""A part has at least so many rows: to open a file with a thousand row groups takes some milliseconds."""

_MOST_THREADS = 8
AHEAD_BYTES = min(pa.cpu_count(), _MOST_THREADS) << 25
"""Of all parts of all files together: 32 MiB per thread."""

_END, _LEFT = object(), object()


def row_group_parts(rows: Sequence[int], least: int = 0) -> list[range]:
    """The row groups of a file, with these numbers of rows, in parts of some consecutive ones, which have `least` rows
    at least, except for the last one; 0 for `PART_ROWS`."""
    parts, first, size = [], 0, 0
    for group, count in enumerate(rows):
        size += count
        if size >= (least or PART_ROWS) or group == len(rows) - 1:
            parts.append(range(first, group + 1))
            first, size = group + 1, 0
    return parts


class HasBytes(Protocol):
    """A table, or something else with a size."""

    @property
    def nbytes(self) -> int: ...


_Item = TypeVar("_Item", bound=HasBytes)


class _Part(Generic[_Item]):
    """One part."""

    def __init__(self, tables: Iterator[_Item]) -> None:
        self.tables = tables  # a generator, executed by at most one thread at a time
        self.left = True  # whether no thread is decoding the part, although it has not ended
        # Tables, `_LEFT` where a thread has left the part, and at last `_END` or an exception.
        self.decoded: SimpleQueue[Any] = SimpleQueue()


class _Waiting:
    """The bytes that are decoded and not yet delivered, for one consumer: `most` of them, and `AHEAD_BYTES` for all
    consumers."""

    _lock, _of_all = threading.Lock(), 0

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self.closed = False

    def add(self, nbytes: int) -> None:
        with _Waiting._lock:
            self._bytes += nbytes
            _Waiting._of_all += nbytes

    def has_room(self) -> bool:
        return self._bytes < self._most and _Waiting._of_all < AHEAD_BYTES and not self.closed

    @staticmethod
    def in_child() -> None:
        """A process that was forked has none of the threads, and consumes nothing of what they decoded."""
        _Waiting._lock, _Waiting._of_all = threading.Lock(), 0

    def forget(self) -> None:
        """Nothing will be delivered any more."""
        self.add(-self._bytes)


os.register_at_fork(after_in_child=_Waiting.in_child)


def in_order(parts: Sequence[Iterator[_Item]], most: int | None = None) -> Iterator[_Item]:
    """Yields the tables of all parts, one part after the other. An exception of a part is raised in its place.

    There are as many threads as Arrow has: one per core, or `OMP_NUM_THREADS`. Beyond one table per thread, `most`
    bytes are decoded in advance; None for `AHEAD_BYTES`, which is the bound of all calls together.
    """
    ahead, threads = _Waiting(AHEAD_BYTES if most is None else most), min(pa.cpu_count(), _MOST_THREADS)
    waiting = [_Part(tables) for tables in parts]
    pool = ThreadPoolExecutor(threads, "columns")
    try:
        while waiting:
            part = waiting[0]
            for some in waiting[:threads]:
                if some.left and (some is part or ahead.has_room()):
                    some.left = False
                    pool.submit(_decode, some, ahead)
            item = part.decoded.get()
            if item is _END:
                waiting.pop(0)
            elif isinstance(item, BaseException):
                raise item
            elif item is not _LEFT:
                ahead.add(-item.nbytes)
                yield item
    finally:
        ahead.closed = True
        pool.shutdown(cancel_futures=True)
        ahead.forget()


def _decode(part: _Part[Any], ahead: _Waiting) -> None:
    """Decodes the next table of a part, and more of them while there is room."""
    try:
        for table in part.tables:
            part.decoded.put(table)
            ahead.add(table.nbytes)
            if not ahead.has_room():
                part.left = True
                part.decoded.put(_LEFT)  # the consumer may be waiting for another table
                return
        part.decoded.put(_END)
    except BaseException as error:
        part.decoded.put(error)
