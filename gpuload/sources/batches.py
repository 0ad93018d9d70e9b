"""Tables of bounded size: at most `BATCH_ROWS` rows, and about `BATCH_BYTES` of values.

A row group may hold gigabytes: prompts of a megabyte, or, in a file of some kilobytes, a million references to one long
dictionary entry. So its size in memory is bounded twice: before it is decoded, by its metadata, and afterwards by the
values themselves.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gpuload.core.arrow import as_arrow
from gpuload.core.errors import SourceError
from gpuload.sources.footer import is_of
from gpuload.sources.types import as_readable, is_list, is_text, with_types, without_views

BATCH_ROWS = 8192
BATCH_BYTES = 1 << 23
"""Of one with 64 MiB, whose ids and masks no cache of a processor holds, 16 KB rows with masks take half as much time
again, and several threads wait for the largest."""

FIRST_PART = 8  # of the parts in which a device gets rows, the first one is so many times smaller
SHARE_OF_PROMPTS = 4  # tables that are so much larger than their prompts are not joined further: the host holds them

_MOST_ROW_BYTES = (1 << 31) - 1
_MORE_THAN_2_GIB = "Nested data conversions not implemented"  # Arrow's message for a nested column
_WIDTH = 8  # bytes of a number or an offset
_UNCLEAR_BYTES = 1 << 29  # a dictionary-encoded column chunk that cannot exceed this is not examined
_UNCLEAR_ROWS = 512  # of one that can, if it is small, no more rows are decoded at a time: dictionaries end at 1 MB
_SHORT, _SHORT_COMPRESSED = 64, 16  # bytes per value below which most values may be references to long entries


def bounded(tables: Iterable[pa.Table], name: str, joined: int | None = None) -> Iterator[pa.Table]:
    """The rows of a source with this name in tables of at most `BATCH_ROWS` rows and `BATCH_BYTES`; a row that is
    larger is on its own. Small tables are `joined` up to so many bytes, `BATCH_BYTES` by default. A `SourceError` if a
    row has more bytes than fit into one Arrow array."""
    waiting: list[pa.Table] = []
    done = rows = nbytes = 0
    try:
        for table in tables:
            for part, size in _halves(table):
                if waiting and (rows + part.num_rows > BATCH_ROWS or nbytes + size > (joined or BATCH_BYTES)):
                    yield _joined(waiting)
                    waiting, done, rows, nbytes = [], done + rows, 0, 0
                waiting.append(part)
                rows, nbytes = rows + part.num_rows, nbytes + size
    except pa.ArrowCapacityError as error:
        raise SourceError(
            f"{name}: row {done + rows} or a later one has more than 2 GiB of data: remove it or split it"
        ) from error
    if waiting:
        yield _joined(waiting)


def _joined(tables: list[pa.Table]) -> pa.Table:
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def _halves(table: pa.Table) -> Iterator[tuple[pa.Table, int]]:
    """A table in parts within the bounds, each with its bytes; a `pa.ArrowCapacityError` if a row has more than fit
    into one Arrow array."""
    size = sum(decoded_bytes(chunk) for column in table.columns for chunk in column.chunks)
    if table.num_rows == 1 and size > _MOST_ROW_BYTES:
        raise pa.ArrowCapacityError(f"a row of {size:,} bytes")
    if table.num_rows < 2 or (size <= BATCH_BYTES and table.num_rows <= BATCH_ROWS):
        yield table, size
        return
    half = min(table.num_rows // 2, BATCH_ROWS)
    yield from _halves(table.slice(0, half))
    yield from _halves(table.slice(half))


def decoded_bytes(array: Any) -> int:
    """Bytes of the values of an Arrow array, with dictionaries resolved."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        if not is_text(kind.value_type):
            return _WIDTH * len(array)
        return pc.sum(pc.take(pc.binary_length(array.dictionary), array.indices)).as_py() or 0
    if is_list(kind) and len(array):
        low, high = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return _WIDTH * len(array) + decoded_bytes(array.values.slice(low, high - low))
    if pa.types.is_struct(kind):
        return sum(decoded_bytes(array.field(i)) for i in range(kind.num_fields))
    return int(array.nbytes)


Reopen = Callable[..., pq.ParquetFile]
"""Opens the same file with further arguments of `ParquetFile`."""


def read_row_group(parquet: pq.ParquetFile, reopen: Reopen, group: int, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Decodes some columns of one row group.

    Raises:
        pa.ArrowCapacityError: a row has more bytes than fit into one Arrow array.
        pa.ArrowException: the file is damaged.
    """
    metadata = parquet.metadata.row_group(group)
    chunks = [metadata.column(i) for i in range(metadata.num_columns)]
    chunks = [chunk for chunk in chunks if is_of(chunk, columns)]
    size = {chunk.path_in_schema: max(chunk.total_uncompressed_size, chunk.num_values * _WIDTH) for chunk in chunks}
    step, repeated = BATCH_ROWS, []
    for chunk in chunks:
        name = chunk.path_in_schema
        longest = _longest_possible(chunk)
        if chunk.num_values * longest <= _UNCLEAR_BYTES:
            continue
        suspicious = min(size[name] / _SHORT, chunk.total_compressed_size / _SHORT_COMPRESSED) < chunk.num_values
        if not suspicious and chunk.num_values <= 8 * _UNCLEAR_ROWS:
            step = min(step, _UNCLEAR_ROWS)  # cheaper than a look at the dictionary
            continue
        longest = _longest(parquet.metadata, reopen, group, chunk)
        if chunk.num_values * longest > _UNCLEAR_BYTES:
            step = min(step, max(1, _UNCLEAR_BYTES // longest))
            repeated += [name] * suspicious
    while step > 1 and step * sum(size.values()) > BATCH_BYTES * metadata.num_rows:
        step //= 2
    if not repeated:
        yield from map(as_readable, _tables(parquet, group, columns, step))
        return
    stored = pa.schema([parquet.schema_arrow.field(name) for name in columns])
    with reopen(metadata=parquet.metadata, read_dictionary=repeated) as encoded:
        for table in _tables(encoded, group, columns, step):
            for part, _ in _halves(with_types(table, without_views(table.schema))):
                # `take` copies the rows: a cast of a slice of lists would decode all of the lists' values.
                yield as_readable(part.take(as_arrow(np.arange(part.num_rows))), stored)


def _longest_possible(chunk: Any) -> int:
    """Bytes of the longest value that a dictionary in this column chunk can have; 0 without one."""
    return chunk.total_uncompressed_size if chunk.has_dictionary_page and chunk.physical_type == "BYTE_ARRAY" else 0


def _longest(metadata: Any, reopen: Reopen, group: int, chunk: Any) -> int:
    """Bytes of the longest dictionary entry of a column chunk: its first value comes with the whole dictionary."""
    name = chunk.path_in_schema
    with reopen(metadata=metadata, read_dictionary=[name]) as file:
        array = next(file.iter_batches(1, row_groups=[group], columns=[name], use_threads=False)).column(0)
    while not pa.types.is_dictionary(array.type) and array.type.num_fields == 1:
        array = array.field(0) if pa.types.is_struct(array.type) else array.values
    entries = array.dictionary if pa.types.is_dictionary(array.type) else []
    # A first row without values may come without the dictionary.
    return pc.max(pc.binary_length(entries)).as_py() if len(entries) else _longest_possible(chunk)


def _tables(parquet: pq.ParquetFile, group: int, columns: Sequence[str], step: int) -> Iterator[pa.Table]:
    """The rows of a row group, `step` at a time, or fewer where these are too large."""
    done = 0
    while True:
        skip = done
        try:
            for batch in parquet.iter_batches(step, row_groups=[group], columns=list(columns)):
                if skip < batch.num_rows:
                    yield pa.Table.from_batches([batch.slice(skip)])
                    done += batch.num_rows - skip
                skip = max(0, skip - batch.num_rows)
                if step > 1 and batch.nbytes > _UNCLEAR_BYTES:
                    break
            else:
                return
        except pa.ArrowNotImplementedError as error:
            if _MORE_THAN_2_GIB not in str(error):
                raise
            if step == 1:
                raise pa.ArrowCapacityError(str(error)) from error
        step = max(1, step // 32)
