"""Local files → Arrow tables of some thousand rows, by row groups, parts or pieces of JSON."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from gpuload.core.errors import MORE_MEMORY, DataError, HostMemoryError, SourceError
from gpuload.core.options import nearest
from gpuload.sources.arrow_files import mapped_table
from gpuload.sources.batches import BATCH_BYTES, BATCH_ROWS, bounded, read_row_group
from gpuload.sources.fetch import SourceFile
from gpuload.sources.footer import check_names, column_digest, damage_of, decoded_size, read_footer
from gpuload.sources.local import LocalFile, opened
from gpuload.sources.parallel import in_order, row_group_parts
from gpuload.sources.types import as_readable, check_prompt_type, is_messages, is_text, readable

if TYPE_CHECKING:
    from gpuload.sources.remote import RemoteFile


@dataclass(frozen=True)
class Source:
    """One file or frame, opened."""

    name: str  # the file as the user named it, for messages
    num_rows: int
    nbytes: int  # of the file, or of the frame in memory
    schema: pa.Schema  # its columns
    batches: Callable[[], Iterator[pa.Table]]  # yields the rows in order as tables of at most `BATCH_ROWS` rows
    identity: bytes  # bytes that identify the content; part of a dataset's fingerprint
    parquet: str | None = None  # path of a parquet file, which an engine can read by itself
    frame: Any = None  # a `cudf.DataFrame`, whose columns a GPU engine uses zero-copy
    # As `batches`, without the named columns, by several threads; with the named column alone. None: it saves nothing.
    without: Callable[..., Iterator[pa.Table]] | None = None
    only: Callable[[str], Iterator[pa.Table]] | None = None
    # Digest of the values of the named columns as they are in the file now; None for a frame in memory.
    content: Callable[..., bytes] | None = None
    form: str = ""  # what a column is made of that is not in the file
    # About how many bytes the values of the named columns have in memory; None for all columns.
    decoded_bytes: Callable[[Collection[str] | None], int] = lambda names: 0
    file: LocalFile | RemoteFile | None = None  # that `batches` reads; None where everything is in memory already
    first_row: int = 0  # number of the first row in its file, of a source that is a part of one
    parsed: bool = False  # whether JSON in its columns was parsed when it was opened


def check_unchanged(sources: Iterable[Source]) -> None:
    """Checks, after the last row was read, that no file changed meanwhile; a `SourceError` if the rows of one may be
    mixed from two versions of it."""
    for source in sources:
        if source.file is not None:
            source.file.check()


def open_file(
    file: SourceFile, index_columns: bool = False, groups: range | None = None, only: str | None = None
) -> Source:
    """Opens one file: reads the metadata of a parquet or Arrow file, parses a JSON file piece by piece.

    Args:
        index_columns: include the columns in which pandas stored a frame's index.
        groups: the row groups of a parquet file that the source has; None for all rows.
        only: the column of a parquet file that the source has; None for all columns.

    Raises:
        SourceError: the file is damaged, or its content does not match its extension.
    """
    if file.format == "parquet":
        return _open_parquet(file, index_columns, groups, only)
    return _open_arrow(file) if file.format == "arrow" else _open_json(file)


def with_prompts(source: Source, prompt_key: str) -> Iterator[tuple[pa.Table, pa.Array]]:
    """The rows of a source in order: tables of all columns, each with its prompt column as one plain array."""
    for table in source.batches():
        yield table, one_array(table.column(prompt_key))


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column of a table as one plain array."""
    whole = column.combine_chunks()
    return whole.dictionary_decode() if pa.types.is_dictionary(whole.type) else whole


def other_columns(source: Source, prompt_key: str, keep_prompts: bool, *known: str) -> Iterator[pa.Table]:
    """The rows of a source in order, for a caller that has the prompts and further `known` columns already: where
    possible, they are not read, except for the prompts with `keep_prompts`."""
    if source.without is None:
        return source.batches()
    names = source.schema.names
    hidden = [name for name in names if name in known or (name == prompt_key and not keep_prompts)]
    if len(hidden) == len(names):  # nothing to read; but a table without columns would not know its number of rows
        counts = (min(BATCH_ROWS, source.num_rows - row) for row in range(0, source.num_rows, BATCH_ROWS))
        return (pa.table({prompt_key: pa.nulls(count)}) for count in counts)
    return source.without(*hidden)


def one_column(source: Source, name: str) -> Iterator[pa.ChunkedArray]:
    """The values of one column in order, without reading the others where possible."""
    tables = source.batches() if source.only is None else source.only(name)
    return (table.column(name) for table in tables)


def check_column_names(source: Source) -> None:
    """Checks that no two columns of a source have one name; a `DataError` if they have."""
    for name, count in Counter(source.schema.names).items():
        if count > 1:
            raise DataError(f"{source.name}: two columns have the name {name!r}: rename one of them")


def check_prompt_column(source: Source, prompt_key: str) -> None:
    """Checks that a source has the prompt column; a `DataError` if not, whose message names the likely column, and all
    there are, or if two columns have one name."""
    check_column_names(source)
    if prompt_key not in source.schema.names:
        likely = _likely(source.schema, prompt_key)
        raise DataError(
            f"{source.name}: no column {prompt_key!r}{likely or '.'} The columns are {', '.join(source.schema.names)}"
            f"{'' if likely else ': prompt_key=... names the one with prompts'}"
        )


def check_prompts(source: Source, prompt_key: str) -> None:
    """Checks that a source has the prompt column, of a type that can hold prompts; a `DataError` if not."""
    check_prompt_column(source, prompt_key)
    check_prompt_type(source.schema.field(prompt_key).type, f"{source.name}: column {prompt_key!r}")


_QUESTIONS = ("question", "query", "problem", "instruction", "input", "text", "content")
"""Columns that have prompts as text in other data, the likeliest first."""


def _likely(schema: pa.Schema, prompt_key: str) -> str:
    """Suggests the column that holds messages, or else the one with the nearest name."""
    for column in schema:
        if is_messages(column.type):
            return f": did you mean prompt_key={column.name!r}?"
    close = nearest(prompt_key, set(schema.names))
    if "did you mean" in close:
        return close
    asked = next((name for name in _QUESTIONS if name in schema.names and is_text(schema.field(name).type)), None)
    return f": did you mean prompt_key={asked!r}?" if asked else ""


def bytes_of(table: pa.Table, names: Collection[str] | None) -> int:
    if names is None:
        return int(table.nbytes)
    return sum(table.column(name).nbytes for name in names if name in table.schema.names)


def first_rows(table: pa.Table) -> bytes:
    """Some rows as bytes: not all values have a Python equivalent."""
    with pa.BufferOutputStream() as sink:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(0, 64).combine_chunks())
        return bytes(sink.getvalue())


def slices(tables: Iterable[pa.Table], name: str) -> Iterator[pa.Table]:
    """Tables of at most `BATCH_ROWS` rows."""
    firsts = ((table, first) for table in tables for first in range(0, table.num_rows, BATCH_ROWS))
    return bounded((table.slice(first, BATCH_ROWS) for table, first in firsts), name)


# -- parquet ---------------------------------------------------------------------------------------------------------


def _open_parquet(file: SourceFile, index_columns: bool, some: range | None, only: str | None) -> Source:
    try:
        with opened(file) as (local, raw), pq.ParquetFile(raw) as parquet:
            metadata, schema = parquet.metadata, readable(parquet.schema_arrow)
            size, footer = read_footer(raw)
        if metadata.num_row_groups:
            check_names(schema, footer)
    except SourceError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: of a column's name
        raise SourceError(f"{file.name}: {damage_of(file.path, error)}") from error
    hidden = set() if index_columns else _index_columns(schema)
    hidden |= set(schema.names) - {only} if only else set()
    counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    groups = range(len(counts)) if some is None else some
    rows = metadata.num_rows if some is None else sum(counts[groups.start : groups.stop])
    parts = [range(groups.start + p.start, groups.start + p.stop) for p in row_group_parts([counts[g] for g in groups])]

    # A file of one table is read by the thread that asks for it: of several files, there is one for each.
    small = len(parts) == 1 and rows <= BATCH_ROWS and decoded_size(metadata, None) <= BATCH_BYTES

    def read(hidden: Set[str]) -> Iterator[pa.Table]:
        decoded = [_decode(local, hidden, part) for part in parts]
        return _read_parquet(local, rows, decoded[0] if small else in_order(decoded))

    return Source(
        file.name,
        rows,
        size,
        pa.schema([column for column in schema if column.name not in hidden]),
        lambda: read(hidden),
        # The footer has the sizes, offsets and statistics of every column chunk.
        str(size).encode() + footer,
        parquet=file.path if some is None and file.remote is None else None,
        without=lambda *names: read(hidden | {*names}),
        only=lambda name: read(set(schema.names) - {name}),
        content=lambda *names: column_digest(local, *names, groups=some),
        decoded_bytes=lambda names: decoded_size(metadata, names),
        file=local,
        first_row=sum(counts[: groups.start]),
    )


def _read_parquet(file: LocalFile | RemoteFile, num_rows: int, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    rows = 0
    for table in bounded(tables, file.name):
        rows += table.num_rows
        yield table
    if rows != num_rows:
        raise SourceError(
            f"{file.name}: damaged parquet file ({rows:,} rows instead of {num_rows:,}): download it again"
        )


def _decode(file: LocalFile | RemoteFile, hidden: Set[str], groups: range) -> Iterator[pa.Table]:
    """The tables of some row groups."""
    try:
        with file.open() as raw, parquet_file(raw) as parquet:
            columns = [name for name in parquet.schema_arrow.names if name not in hidden]
            for group in groups:
                yield from read_row_group(parquet, partial(parquet_file, raw), group, columns)
    except (pa.ArrowCapacityError, SourceError):
        raise
    except MemoryError as error:
        raise HostMemoryError(f"{file.name}: out of memory while reading ({error}): {MORE_MEMORY}") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: of a column chunk's name
        file.check()  # otherwise it is damage
        raise SourceError(f"{file.name}: damaged parquet file ({error}): download it again") from error


def parquet_file(source: Any, **more: Any) -> pq.ParquetFile:
    """Opens a parquet file, a path or a file object, for reading rows, without reading a column chunk as a whole before
    it is decoded. Pages with a checksum are compared with it."""
    return pq.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True, **more)


def _index_columns(schema: pa.Schema) -> set[str]:
    """The columns in which pandas stored a frame's index. They are not data; pandas does not return them as columns."""
    index = (schema.pandas_metadata or {}).get("index_columns", [])
    return {name for name in index if isinstance(name, str)} & set(schema.names)


# -- JSON ------------------------------------------------------------------------------------------------------------


def _open_json(file: SourceFile) -> Source:
    from gpuload.sources.json_columns import JsonColumns

    try:
        with opened(file) as (local, raw):
            columns = JsonColumns(file.name, raw)
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"{file.name}: {error.strerror}") from error
    except RecursionError as error:
        raise SourceError(f"{file.name}: JSON that is nested too deeply: flatten it") from error
    except MemoryError as error:
        raise HostMemoryError(f"{file.name}: out of memory while reading ({error}): {MORE_MEMORY}") from error
    return Source(
        file.name,
        columns.rows,
        columns.nbytes,
        columns.schema,
        lambda: slices(columns.tables(local), file.name),
        columns.digest,
        content=lambda *names: columns.digest,
        decoded_bytes=columns.bytes_of,
        file=None if columns.held else local,
        parsed=True,
    )


# -- Arrow -----------------------------------------------------------------------------------------------------------


def _open_arrow(file: SourceFile) -> Source:
    try:
        with opened(file) as (local, _):
            local.check()  # the path is opened once more
            table = mapped_table(file.path)
    except SourceError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{file.name}: not a whole file of Arrow's stream format ({error}): save it again") from error
    assert isinstance(local, LocalFile)
    size, schema = os.path.getsize(file.path), readable(table.schema)

    def digest(*names: str) -> bytes:
        with local.open() as raw:
            return hashlib.file_digest(raw, "sha256").digest()  # type: ignore[arg-type]

    return Source(
        file.name,
        table.num_rows,
        size,
        schema,
        lambda: bounded(_read_stream(local), file.name),
        f"{size} {table.num_rows} ".encode() + first_rows(table),
        content=digest,
        decoded_bytes=partial(bytes_of, table),
        file=local,
    )


def _read_stream(file: LocalFile) -> Iterator[pa.Table]:
    """The rows of a file, in the parts in which they were written."""
    try:
        with file.open() as raw, pa.ipc.open_stream(raw) as reader:
            for batch in reader:
                yield as_readable(pa.Table.from_batches([batch]))
    except (pa.ArrowException, OSError) as error:
        file.check()  # otherwise it is damage
        raise SourceError(f"{file.name}: damaged Arrow file ({error}): save the dataset again") from error
