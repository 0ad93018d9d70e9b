"""In which parts a device gets the rows of a source, and how the columns that pass through are joined to them."""

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

import pyarrow as pa

from gpuload.engines.failures import MisreadError
from gpuload.engines.protocol import ArrowPrompts, Prompts
from gpuload.sources.batches import FIRST_PART, SHARE_OF_PROMPTS
from gpuload.sources.later import LaterTable
from gpuload.sources.read import Source, check_unchanged, one_array, one_column, other_columns

Read = TypeVar("Read", bound=Prompts)


def chunk_sizes(source: Source, prompt_key: str, nbytes: int) -> tuple[int, int]:
    """How many bytes of prompts cuDF reads at a time: first, and then.

    The first chunk is smaller if there are several: it is rendered while the next one is read. All are smaller where
    other columns are much larger than prompts: the host holds tables of as many rows. The device may hold `nbytes`.
    """
    prompts, whole = source.decoded_bytes([prompt_key]), source.decoded_bytes(None)
    then = max(min(nbytes, _LEAST_CHUNK), min(nbytes, SHARE_OF_PROMPTS * nbytes * prompts // max(1, whole)))
    return (max(min(then, _LEAST_CHUNK), then // FIRST_PART) if prompts > then else then), then


def is_small(source: Source, prompt_key: str, nbytes: int | None) -> bool:
    """Whether a parquet file is one of many small ones: Arrow reads them, so that they are joined to large parts. The
    prompts of all files have `nbytes`, None where that is not known."""
    size = source.decoded_bytes([prompt_key])
    return source.parquet is not None and size < _LEAST_CHUNK and _MANY * size <= (nbytes or 0)


MOST_JOINED = 64 << 20  # bytes of prompts from which on a part of a load keeps a device busy
_LEAST_CHUNK = 8 << 20
_MANY = 8


def arrow_prompts(source: Source, prompt_key: str, first: int = 0) -> Iterator[ArrowPrompts]:
    """The prompts of a source from some row on, as Arrow reads them, without the other columns."""
    for column in one_column(source, prompt_key):
        skipped = min(first, len(column))
        first -= skipped
        if skipped < len(column):
            yield ArrowPrompts(one_array(column).slice(skipped))


def zip_with_tables(
    chunks: Iterator[Read], source: Source, prompt_key: str, keep_prompts: bool, thread: Executor
) -> Iterator[tuple[LaterTable, Read]]:
    """Joins two readings of one source, each in parts of its own sizes: every chunk of prompts with the table of its
    rows, which is decoded meanwhile, so that a chunk does not wait for it: by one thread for the tables of all sources,
    in the order in which they are needed.

    Raises:
        SourceError: the file was changed meanwhile.
        MisreadError: the numbers of rows differ. The tables raise the same.
    """
    tables, waiting, done = other_columns(source, prompt_key, keep_prompts), list[pa.Table](), 0
    row_bytes = source.decoded_bytes(None) / max(1, source.num_rows)
    first = [thread.submit(next, tables, None)]  # starts the threads that decode the next ones

    def decode(rows: int, last: bool, before: Future[pa.Table] | None) -> pa.Table:
        if before is not None:
            before.result()  # after an error `tables` is at its end, as if it had fewer rows
        have = sum(table.num_rows for table in waiting)
        while have < rows or last:
            if (table := first.pop().result() if first else next(tables, None)) is None:
                break
            waiting.append(table)
            have += table.num_rows
        if have < rows or (last and have > rows):
            raise _misread(source)
        whole = pa.concat_tables(waiting)
        waiting[:] = [whole.slice(rows)]
        return whole.slice(0, rows)

    table = None
    for chunk in chunks:
        rows = len(chunk)
        done += rows
        if done > source.num_rows:
            raise _misread(source)
        table = thread.submit(decode, rows, done == source.num_rows, table)
        yield LaterTable(rows, table.result, int(row_bytes * rows)), chunk
    if done != source.num_rows:
        raise _misread(source)


MISREAD: set[str] = set()  # parquet files of which cuDF has read other rows than Arrow in this process


def _misread(source: Source) -> MisreadError:
    check_unchanged([source])
    MISREAD.add(str(source.parquet))
    return MisreadError(f"{source.name}: cuDF and Arrow read different numbers of rows: use device='cpu'")
