"""In which parts a device gets the rows of a source, and how the columns that pass through are joined to them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from gpuload.core.errors import DeviceError
from gpuload.engines.conversations import Conversations
from gpuload.sources.later import LaterTable
from gpuload.sources.read import Source, check_unchanged, other_columns


def chunk_sizes(source: Source, prompt_key: str, nbytes: int) -> tuple[int, int]:
    """How many bytes of prompts cuDF reads at a time: first, and then.

    The first chunk is smaller if there are several: it is rendered while the next one is read. All are smaller where
    other columns are much larger than prompts: the host holds tables of as many rows.

    Args:
        source: a parquet file.
        nbytes: as many as the device may hold.
    """
    prompts, whole = source.decoded_bytes([prompt_key]), source.decoded_bytes(None)
    then = max(min(nbytes, _LEAST_CHUNK), min(nbytes, _SHARE_OF_PROMPTS * nbytes * prompts // max(1, whole)))
    return (max(min(then, _LEAST_CHUNK), then // _FIRST) if prompts > then else then), then


MOST_JOINED = 64 << 20  # bytes of prompts from which on a part of a load keeps a device busy
_FIRST = 8  # of a part: the first one
_LEAST_CHUNK = 8 << 20
_SHARE_OF_PROMPTS = 4  # tables that are so much larger than their prompts are not joined further: the host holds them


def zip_with_tables(
    chunks: Iterator[Conversations], source: Source, prompt_key: str, keep_prompts: bool
) -> Iterator[tuple[LaterTable, Conversations]]:
    """Joins two readings of one source, each in parts of its own sizes: every chunk of prompts with the table of its
    rows, which a thread decodes meanwhile: a chunk does not wait for it.

    Raises:
        SourceError: the file was changed meanwhile.
        DeviceError: the numbers of rows differ. The tables raise the same.
    """
    tables, waiting, done = other_columns(source, prompt_key, keep_prompts), list[pa.Table](), 0
    thread = ThreadPoolExecutor(1, "pass-through")
    first = [thread.submit(next, tables, None)]  # starts the threads that decode the next ones

    def decode(rows: int, last: bool) -> pa.Table:
        have = sum(table.num_rows for table in waiting)
        while have < rows or last:
            if (table := first.pop().result() if first else next(tables, None)) is None:
                break
            waiting.append(table)
            have += table.num_rows
        if have < rows or (last and have > rows):
            raise _different_rows(source)
        whole = pa.concat_tables(waiting)
        waiting[:] = [whole.slice(rows)]
        return whole.slice(0, rows)

    try:
        for chunk in chunks:
            done += len(chunk)
            if done > source.num_rows:
                raise _different_rows(source)
            yield LaterTable(len(chunk), thread.submit(decode, len(chunk), done == source.num_rows).result), chunk
        if done != source.num_rows:
            raise _different_rows(source)
    finally:  # also if the consumer ends early
        thread.shutdown(wait=False)  # decodes what was asked for


def _different_rows(source: Source) -> DeviceError:
    check_unchanged([source])
    return DeviceError(f"{source.name}: cuDF and Arrow read different numbers of rows: use device='cpu'")
