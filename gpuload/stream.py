"""The batches of a load and the belt they travel on: read, one batch ahead, timed.

Each stage is a generator over the one before it. `ahead` runs a generator in a thread of its own, one item ahead of
its consumer, so that while one batch is encoded the next is rendered and the one after it is read.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.arrays import Ragged
from gpuload.engines.protocol import Text
from gpuload.sources.read import Source

RowNumbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Batch:
    """Some rows of one source, with what the stages have made of them so far.

    Attributes:
        source: number of the source.
        rows: (n,) row numbers in that source.
        table: their columns.
        prompts: their prompts, as the engine's `read` gave them.
        rendered: their texts.
        tokens: their ids, wherever the engine has them.
        left: how many of them the engine's own tokenizer left to another one.
    """

    source: int
    rows: RowNumbers
    table: pa.Table
    prompts: pa.Array
    rendered: Text | None = None
    tokens: Ragged | None = None
    left: int = 0

    def fetch(self, rows: RowNumbers) -> pa.Array:
        """The prompts of some of the rows, wherever they lie, on the host."""
        fetch: Callable[[list[int]], pa.Array] | None = getattr(self.prompts, "fetch", None)
        return fetch(rows.tolist()) if fetch else self.prompts.take(pa.array(rows))


def read(
    sources: Sequence[Source],
    open_source: Callable[[Source], Iterator[tuple[pa.Table, pa.Array]]],
    wanted: RowNumbers | None,
    seconds: dict[str, float],
) -> Iterator[Batch]:
    """The rows of all sources, batch by batch.

    Args:
        open_source: an engine's `read`.
        wanted: which rows to read, numbered over all sources, in any order; None for all.
        seconds: the time spent is added to its "read".
    """
    ascending = None if wanted is None else np.sort(wanted)
    source_start = 0
    for number, source in enumerate(sources):
        row = 0
        parts = open_source(source)
        while (part := _timed_next(parts, seconds)) is not None:
            table, prompts = part
            rows = np.arange(row, row + table.num_rows)
            row += table.num_rows
            if ascending is not None:
                first, last = np.searchsorted(ascending, [source_start + rows[0], source_start + rows[-1] + 1])
                if last - first < len(rows):
                    picked = ascending[first:last] - source_start
                    at = pa.array(picked - rows[0])
                    table, prompts, rows = table.take(at), prompts.take(at), picked
            if len(rows):
                yield Batch(number, rows, table, prompts)
            if ascending is not None and source_start + row > ascending[-1]:
                return
        source_start += source.num_rows


def stage(
    name: str, work: Callable[[Batch], None], batches: Iterator[Batch], seconds: dict[str, float]
) -> Iterator[Batch]:
    """`work` done on each batch, its time added to `seconds[name]`."""
    for batch in batches:
        started = time.perf_counter()
        work(batch)
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
        yield batch


def ahead(batches: Iterator[Batch], thread: Executor) -> Iterator[Batch]:
    """The same batches, the next one made in `thread` while the consumer is busy with this one."""
    coming = thread.submit(next, batches, None)
    while (batch := coming.result()) is not None:
        coming = thread.submit(next, batches, None)
        yield batch


def _timed_next(
    parts: Iterator[tuple[pa.Table, pa.Array]], seconds: dict[str, float]
) -> tuple[pa.Table, pa.Array] | None:
    started = time.perf_counter()
    part = next(parts, None)
    seconds["read"] = seconds.get("read", 0.0) + time.perf_counter() - started
    return part
