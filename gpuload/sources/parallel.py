"""Parts of a file decoded by several threads, and delivered in order.

    1. a thread decodes a part, which is some consecutive row groups
    2. the consumer gets the tables of the first part as they are decoded, then those of the next one
    3. what is decoded and not yet delivered is bounded: beyond that, a thread leaves its part after the next table, and
       the consumer has the part continued when there is room

With k threads and cores, and enough parts, the consumer waits for about a k-th of the decoding. Threads do not wait for
the consumer, so a consumer that ends early leaves none behind.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pyarrow as pa

PART_ROWS = 1 << 16
"""A part has at least so many rows: to open a file with a thousand row groups takes some milliseconds."""

AHEAD_BYTES = 1 << 29

_MOST_THREADS = 8
_END, _LEFT = object(), object()


def row_group_parts(rows: Sequence[int]) -> list[range]:
    """The row groups of a file, in parts of at least `PART_ROWS` rows except for the last one.

    Args:
        rows: number of rows of each row group.
    """
    parts, first, size = [], 0, 0
    for group, count in enumerate(rows):
        size += count
        if size >= PART_ROWS or group == len(rows) - 1:
            parts.append(range(first, group + 1))
            first, size = group + 1, 0
    return parts


class _RowGroups:
    """One part.

    Attributes:
        tables: a generator, executed by at most one thread at a time.
        decoded: what was decoded: tables, `_LEFT` where a thread has left the part, and at last `_END` or an exception.
        left: whether no thread is decoding the part, although it has not ended.
    """

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self.tables, self.left = tables, True
        self.decoded: SimpleQueue[Any] = SimpleQueue()


class _Waiting:
    """The bytes that are decoded and not yet delivered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self.closed = False

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._bytes += nbytes

    def has_room(self) -> bool:
        return self._bytes < AHEAD_BYTES and not self.closed


def in_order(parts: Sequence[Iterator[pa.Table]]) -> Iterator[pa.Table]:
    """Yields the tables of all parts, one part after the other. An exception of a part is raised in its place.

    There are as many threads as Arrow has: one per core, or `OMP_NUM_THREADS`.

    Args:
        parts: one generator per part.
    """
    ahead, threads = _Waiting(), min(pa.cpu_count(), _MOST_THREADS)
    waiting = [_RowGroups(tables) for tables in parts]
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


def _decode(part: _RowGroups, ahead: _Waiting) -> None:
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
