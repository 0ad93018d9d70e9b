"""The batches of a load: read, then passed from stage to stage, in order.

    read          several files at once, where that is safe
    shared_out    smaller batches, if there would be fewer than threads can work on
    ahead         runs a generator in a thread of its own, one batch ahead of its consumer
    one_by_one    stages with a thread each, one batch after the other: on a device
    side_by_side  several batches at once, each in a thread that takes it through all stages: on the host
    in_turn       all stages in the calling thread: small data on the host

So while one batch is compared with the tokenizer, others are rendered and encoded, and the next one is read.
"""

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import RowNumbers
from gpuload.core.arrow import as_arrow
from gpuload.engines.protocol import Prompts, Tokenized
from gpuload.pipeline.parts import Batch, Encoded, SomeRows, SourceRows
from gpuload.sources.parallel import in_order
from gpuload.sources.read import Source

Some = TypeVar("Some")

_MOST_THREADS = 16


def _thread_count() -> int:
    return min(int(pa.cpu_count()), _MOST_THREADS)


MOST_BYTES = _thread_count() << 26
"""Columns of the batches that are rendered and encoded at once: 64 MiB per thread, unless one batch has more."""

_PIECE_ROWS = 2048
"""Rows that are not shared out among threads: a batch has fixed costs."""

_PIECE_BYTES = 1 << 24
"""Bytes of all columns of so many rows that are one batch, also of images."""

_READ_BYTES = 1 << 25  # of files that are read in advance, beyond one table per thread


Stage = Callable[[Any], SomeRows]
"""What makes the next one of these of a batch."""

Parts = Iterator[tuple[pa.Table, Prompts | Tokenized]]
"""The rows of one source in order: their columns, and their prompts or their ids."""


def read(
    sources: Sequence[Source],
    open_source: Callable[[int], Parts],
    wanted: RowNumbers | None,
    seconds: dict[str, float],
    several: bool = False,
) -> Iterator[Batch | Encoded]:
    """Reads the rows of all sources, batch by batch.

    Args:
        open_source: number of a source → its rows, see `InMemory.open`.
        wanted: which rows to read, numbered over all sources, in any order; None for all. Batches are in file order.
        seconds: the time spent is added to its "read".
        several: read several sources at once, each in a thread. Otherwise all are read by the calling thread.
    """
    bounds = np.cumsum([0] + [source.num_rows for source in sources])
    ascending = None if wanted is None else np.sort(wanted)
    parts = []
    for number, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        rows = None
        if ascending is not None:
            first, last = np.searchsorted(ascending, [start, end])
            rows = ascending[first:last] - start
        if rows is None or len(rows):
            parts.append(_batches(number, sources[number].first_row, open_source, rows, seconds))
    return in_order(parts, _READ_BYTES) if several and len(parts) > 1 else chain.from_iterable(parts)


def _batches(
    number: int,
    first_row: int,
    open_source: Callable[[int], Parts],
    wanted: RowNumbers | None,
    seconds: dict[str, float],
) -> Iterator[Batch | Encoded]:
    """The batches of one source.

    Args:
        first_row: see `Source`.
        wanted: ascending row numbers in this source, not none of them; None for all.
    """
    row = 0
    parts = _timed_parts(open_source, number, seconds)
    for table, data in parts:
        rows = np.arange(row, row + table.num_rows)
        row += table.num_rows
        if wanted is not None:
            first, last = np.searchsorted(wanted, [rows[0], row])
            if last - first < len(rows):
                at = wanted[first:last] - rows[0]
                table, data, rows = table.take(as_arrow(at)), data.take(at), wanted[first:last]
        if len(rows):
            rows = rows + first_row
            if isinstance(data, Tokenized):
                yield Encoded((SourceRows(number, rows, table),), data, invalid=data.invalid)
            else:
                yield Batch((SourceRows(number, rows, table),), data)
        if wanted is not None and row > wanted[-1]:
            return


def has_work_for_threads(rows: int, nbytes: int) -> bool:
    """Whether a load on the host gains by threads, which it does not where its rows are about one batch.

    Nothing is done at the same time then, and a thread costs milliseconds at its first memory: Arrow's pool gives each
    thread pages of its own, of two megabytes where the kernel allows it, and the kernel clears them.

    Args:
        rows: how many will be loaded.
        nbytes: about how many bytes all their columns have.
    """
    return rows > _PIECE_ROWS or nbytes > _PIECE_BYTES


def shared_out(batches: Iterator[Batch | Encoded], rows: int) -> Iterator[Batch | Encoded]:
    """The same rows in smaller batches where there are so few that some threads of `side_by_side` would get none.

    Args:
        batches: of a load on the host.
        rows: how many there are in all.
    """
    most = max(_PIECE_ROWS, -(-rows // _thread_count()))
    for batch in batches:
        if isinstance(batch, Encoded) or len(batch) <= most or len(batch.parts) > 1:  # the last: small ones, joined
            yield batch
            continue
        (part,) = batch.parts
        for some in np.array_split(np.arange(len(batch)), -(-len(batch) // most)):
            own = SourceRows(part.source, part.rows[some], part.table.slice(int(some[0]), len(some)))
            yield Batch((own,), batch.prompts.take(some))


_counting = threading.Lock()


def _in_child() -> None:
    """A process that was forked has none of the threads that were counting."""
    global _counting
    _counting = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def passed_on(
    batches: Iterator[Any],
    stages: Mapping[str, Stage],
    last: Callable[[Encoded], Encoded],
    seconds: dict[str, float],
    stack: ExitStack | None,
    on_device: bool,
) -> Iterator[Encoded]:
    """Passes batches through stages, in order.

    Args:
        stages: name → what it does.
        last: is done with one batch after the other.
        seconds: the time spent is added under the stage's name.
        stack: ends the threads; None if all is done in the calling thread.
        on_device: each stage has one thread, with its stream.
    """
    if stack is None:
        return map(last, in_turn(stages, batches, seconds))
    reading, verifying = (stack.enter_context(ThreadPoolExecutor(1, name)) for name in ("read", "verify"))
    made = (one_by_one if on_device else side_by_side)(stages, ahead(batches, reading), seconds, stack)
    return ahead(map(last, made), verifying)


def _timed(name: str, work: Stage, seconds: dict[str, float]) -> Stage:
    """Applies `work` to a batch that has no tokens yet, and adds the time to `seconds[name]`."""

    def apply(batch: SomeRows) -> SomeRows:
        if isinstance(batch, Encoded):
            return batch
        started = time.perf_counter()
        made = work(batch)
        _add(seconds, name, started)
        return made

    return apply


def ahead(batches: Iterator[Some], thread: Executor) -> Iterator[Some]:
    """Yields the same batches, and makes the next one in `thread` while the consumer works on this one."""
    coming = thread.submit(next, batches, None)
    while (batch := coming.result()) is not None:
        coming = thread.submit(next, batches, None)
        yield batch


def one_by_one(
    stages: Mapping[str, Stage], batches: Iterator[Any], seconds: dict[str, float], stack: ExitStack
) -> Iterator[Any]:
    """Passes batches through stages, each of which has a thread, and works on one batch at a time.

    Args:
        stages: name → what it does.
        seconds: the time spent is added under the stage's name.
        stack: ends the threads.
    """
    for name, work in stages.items():
        thread = stack.enter_context(ThreadPoolExecutor(1, name))
        batches = ahead(map(_timed(name, work, seconds), batches), thread)
    return batches


def in_turn(stages: Mapping[str, Stage], batches: Iterator[Any], seconds: dict[str, float]) -> Iterator[Any]:
    """Passes each batch through all stages before the next one is read.

    Args:
        stages: name → what it does.
        seconds: the time spent is added under the stage's name.
    """
    for name, work in stages.items():
        batches = map(_timed(name, work, seconds), batches)
    return batches


def side_by_side(
    stages: Mapping[str, Stage], batches: Iterator[Any], seconds: dict[str, float], stack: ExitStack
) -> Iterator[Any]:
    """Passes several batches at once through stages, each in one thread, and yields them in order.

    There is one thread per core, or as many as `OMP_NUM_THREADS`. An error is raised in the place of its batch, also
    one that occurs where the batches come from.

    Args:
        stages: name → what it does. Several threads do it at once, with different batches.
        seconds: the time that all threads have spent is added under the stage's name.
        stack: ends the threads.
    """
    count = _thread_count()
    threads = ThreadPoolExecutor(count, "encode")
    stack.callback(threads.shutdown, cancel_futures=True)
    steps = [_timed(name, work, seconds) for name, work in stages.items()]

    def through(batch: SomeRows) -> SomeRows:
        for step in steps:
            batch = step(batch)
        return batch

    return _in_order(through, batches, threads, count + 1)


def _in_order(work: Stage, batches: Iterator[SomeRows], threads: Executor, most: int) -> Iterator[SomeRows]:
    """Applies `work` to batches in threads. At most `most` of them have begun and are not yet yielded."""
    coming: deque[tuple[Future[SomeRows], int]] = deque()
    nbytes = 0
    for batch in _with_error(batches):
        if isinstance(batch, Exception):
            failed: Future[SomeRows] = Future()
            failed.set_exception(batch)
            coming.append((failed, 0))
            break
        size = batch.nbytes
        while coming and (len(coming) == most or nbytes + size > MOST_BYTES):
            nbytes -= coming[0][1]
            yield coming.popleft()[0].result()
        coming.append((threads.submit(work, batch), size))
        nbytes += size
    while coming:
        yield coming.popleft()[0].result()


def _with_error(batches: Iterator[SomeRows]) -> Iterator[SomeRows | Exception]:
    """The same batches, and at the end the error that ended them, if any."""
    try:
        yield from batches
    except Exception as error:
        yield error


def choose_rows(total: int, max_samples: int, shuffle: bool, seed: int | None) -> RowNumbers | None:
    """Which rows `max_samples` takes, in order; None for all. Drawn as verl draws them, so that both take the same."""
    if not 0 < max_samples < total:
        return None
    if not shuffle:
        return np.arange(max_samples)
    return np.random.default_rng(seed).choice(total, size=max_samples, replace=False)


def wanted_order(numbers: RowNumbers, wanted: RowNumbers | None) -> RowNumbers | None:
    """How to bring rows that were read in file order into the order of `wanted`; None if they are in it.

    Args:
        numbers: (n,) numbers of the kept rows, over all sources.
    """
    if wanted is None or bool(np.all(np.diff(wanted) > 0)):
        return None
    by_number = np.argsort(wanted)
    # The position in `wanted` of each kept row; sorting by it gives the order.
    found = np.searchsorted(wanted, numbers, sorter=by_number)
    return np.argsort(by_number[found])


def _timed_parts(
    open_source: Callable[[int], Parts], number: int, seconds: dict[str, float]
) -> Iterator[tuple[pa.Table, Prompts | Tokenized]]:
    """The parts of a source. The time to open it and to read them is added to the "read" seconds."""
    started = time.perf_counter()
    parts = open_source(number)
    while True:
        part = next(parts, None)
        _add(seconds, "read", started)
        if part is None:
            return
        yield part
        started = time.perf_counter()


def _add(seconds: dict[str, float], name: str, started: float) -> None:
    with _counting:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
