"""The batches of a load: read, then passed from stage to stage, each stage one batch ahead of the next.

A stage is a generator over the one before it. `ahead` runs a generator in a thread of its own, one item ahead of its
consumer, so that while one batch is encoded the next is rendered and the one after it is read.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gpuload.arrays import RowNumbers
from gpuload.engines.protocol import Prompts, RenderedText, Tokenized
from gpuload.sources.read import Source


@dataclass
class Batch:
    """Some rows of one source, and what the stages have made of them so far.

    A batch from the token cache has `tokens` from the start, and neither prompts nor text: it passes the stages that
    render and encode unchanged.

    Attributes:
        source: number of the source.
        rows: (n,) row numbers in that source.
        table: the rows' columns, in host memory.
        prompts: the rows' prompts, as the engine reads them.
        text: the rendered prompts.
        tokens: the token ids.
        compared: how many of the rows were compared with the tokenizer.
    """

    source: int
    rows: RowNumbers
    table: pa.Table
    prompts: Prompts | None = None
    text: RenderedText | None = None
    tokens: Tokenized | None = None
    compared: int = 0


Parts = Iterator[tuple[pa.Table, Prompts | Tokenized]]
"""The rows of one source in order: their columns, and their prompts or their ids."""


def read(
    sources: Sequence[Source],
    open_source: Callable[[Source], Parts],
    wanted: RowNumbers | None,
    seconds: dict[str, float],
) -> Iterator[Batch]:
    """Reads the rows of all sources, batch by batch.

    Args:
        open_source: reads one source: an engine's `read`, or the token cache's.
        wanted: which rows to read, numbered over all sources, in any order; None for all. Batches are in file order.
        seconds: the time spent is added to its "read".
    """
    ascending = None if wanted is None else np.sort(wanted)
    source_start = 0
    for number, source in enumerate(sources):
        if ascending is not None:
            first, last = np.searchsorted(ascending, [source_start, source_start + source.num_rows])
            if first == last:
                source_start += source.num_rows
                continue
        row = 0
        parts = open_source(source)
        while (part := _timed_next(parts, seconds)) is not None:
            table, data = part
            rows = np.arange(row, row + table.num_rows)
            row += table.num_rows
            if ascending is not None:
                first, last = np.searchsorted(ascending, [source_start + rows[0], source_start + rows[-1] + 1])
                if last - first < len(rows):
                    picked = ascending[first:last] - source_start
                    at = picked - rows[0]
                    table, data, rows = table.take(pa.array(at)), data.take(at), picked
            if len(rows):
                if isinstance(data, Tokenized):
                    yield Batch(number, rows, table, tokens=data)
                else:
                    yield Batch(number, rows, table, prompts=data)
            if ascending is not None and source_start + row > ascending[-1]:
                return
        source_start += source.num_rows


def stage(
    name: str, work: Callable[[Batch], None], batches: Iterator[Batch], seconds: dict[str, float]
) -> Iterator[Batch]:
    """Applies `work` to each batch that has no tokens yet, and adds the time to `seconds[name]`."""
    for batch in batches:
        if batch.tokens is None:
            started = time.perf_counter()
            work(batch)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
        yield batch


def ahead(batches: Iterator[Batch], thread: Executor) -> Iterator[Batch]:
    """Yields the same batches, and makes the next one in `thread` while the consumer works on this one."""
    coming = thread.submit(next, batches, None)
    while (batch := coming.result()) is not None:
        coming = thread.submit(next, batches, None)
        yield batch


def choose_rows(total: int, max_samples: int, shuffle: bool, seed: int | None) -> RowNumbers | None:
    """Which rows `max_samples` takes, in order; None for all. Drawn as verl draws them, so that both take the same."""
    if not 0 < max_samples < total:
        return None
    if not shuffle:
        return np.arange(max_samples)
    return np.random.default_rng(seed).choice(total, size=max_samples, replace=False)


def wanted_order(origin: RowNumbers, sources: Sequence[Source], wanted: RowNumbers | None) -> RowNumbers | None:
    """How to bring rows that were read in file order into the order of `wanted`; None if they are in it.

    Args:
        origin: (n, 2) source, and row in that source, of each kept row.
    """
    if wanted is None or bool(np.all(np.diff(wanted) > 0)):
        return None
    starts = np.cumsum([0] + [source.num_rows for source in sources])
    by_number = np.argsort(wanted)
    # The position in `wanted` of each kept row; sorting by it gives the order.
    found = np.searchsorted(wanted, starts[origin[:, 0]] + origin[:, 1], sorter=by_number)
    return np.argsort(by_number[found])


def _timed_next(parts: Parts, seconds: dict[str, float]) -> tuple[pa.Table, Prompts | Tokenized] | None:
    started = time.perf_counter()
    part = next(parts, None)
    seconds["read"] = seconds.get("read", 0.0) + time.perf_counter() - started
    return part
