"""Readable files and frames in memory → tables of Arrow, some thousand rows at a time.

Parquet is read row group by row group. JSON has no schema, so reading it must not invent one: Arrow would give every
struct the union of all rows' keys, and a template that prints `tool_calls` would print the nulls too. A JSON column
whose values do not survive the way through Arrow's types is kept as JSON text (`arrow.json`) and decoded when used.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from gpuload.errors import DataError, SourceError
from gpuload.options import nearest
from gpuload.sources.fetch import SourceFile

BATCH_ROWS = 8192
JSON_TYPE = pa.json_(pa.large_string())
_SLACK = 128  # bytes by which old writers understate a column's size: the header of its dictionary


@dataclass(frozen=True)
class Source:
    """Rows to read.

    Attributes:
        name: the file as the user called it, for messages.
        num_rows: how many there are.
        nbytes: of the file, or of the frame in memory.
        schema: its columns.
        batches: gives the rows in order as tables of at most `BATCH_ROWS` rows.
        identity: tells whether this is the same content as at another time: a part of the fingerprint.
        parquet: the file, where it is one that an engine can read by itself.
        frame: a `cudf.DataFrame`, whose columns an engine may use as they lie in device memory.
        without: gives the rows as `batches` does, but without one column; of parquet files and `frame` only.
        content: digests a column's values as they are in the file now; None for a frame in memory.
    """

    name: str
    num_rows: int
    nbytes: int
    schema: pa.Schema
    batches: Callable[[], Iterator[pa.Table]]
    identity: bytes
    parquet: str | None = None
    frame: Any = None
    without: Callable[[str], Iterator[pa.Table]] | None = None
    content: Callable[[str], bytes] | None = None


def open_file(file: SourceFile, index_columns: bool = False) -> Source:
    """Opens one file. A parquet file's metadata is read, a JSON file is parsed whole.

    Args:
        index_columns: with the columns in which pandas stored a frame's index.

    Raises:
        SourceError: the file is damaged or is not what its ending says.
    """
    return _open_parquet(file, index_columns) if file.format == "parquet" else _open_json(file)


def open_frame(frame: Any, name: str) -> Source:
    """A `pyarrow.Table`, `pandas.DataFrame`, `datasets.Dataset` or `cudf.DataFrame` as it lies in memory."""
    if type(frame).__module__.split(".")[0] == "cudf":
        return _open_cudf(frame, name)
    table = _as_table(frame)
    sample = table.slice(0, 64).to_pydict() if table.num_rows else {}
    return Source(
        name,
        table.num_rows,
        table.nbytes,
        table.schema,
        lambda: _slices(table),
        f"{table.num_rows} {table.nbytes} {sample}".encode(errors="backslashreplace"),
    )


def _open_cudf(frame: Any, name: str) -> Source:
    def tables(hidden: list[str]) -> Iterator[pa.Table]:
        return _slices(frame.drop(columns=hidden).to_arrow(preserve_index=False))

    sample = frame.head(64).to_arrow(preserve_index=False)
    nbytes = int(frame.memory_usage(index=False, deep=True).sum())
    identity = f"{len(frame)} {nbytes} {sample.to_pydict()}".encode(errors="backslashreplace")
    return Source(
        name,
        len(frame),
        nbytes,
        sample.schema,
        lambda: tables([]),
        identity,
        frame=frame,
        without=lambda column: tables([column]),
    )


def with_prompts(source: Source, prompt_key: str) -> Iterator[tuple[pa.Table, pa.Array]]:
    """The rows of a source in order: tables of all columns, and the prompt column of each as one plain array."""
    for table in source.batches():
        column = table.column(prompt_key).combine_chunks()
        yield table, column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def is_frame(data: object) -> bool:
    """Whether `load` was given a frame rather than files."""
    return isinstance(data, pa.Table) or type(data).__module__.split(".")[0] in ("pandas", "datasets", "cudf")


def check_prompt_column(source: Source, prompt_key: str) -> None:
    """Raises DataError, naming the columns there are and the likely one, where the prompt column is missing."""
    if prompt_key not in source.schema.names:
        raise DataError(
            f"{source.name}: no column {prompt_key!r}{_likely(source.schema, prompt_key)}. "
            f"Its columns are {', '.join(source.schema.names)}"
        )


def invalid_rows(table: pa.Table) -> dict[int, str]:
    """Row → why its bytes are not text. Arrow reads strings unchecked; checking a whole batch costs next to nothing."""
    invalid: dict[int, str] = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if _is_valid(column):
            continue
        for row in range(table.num_rows):
            if not _is_valid(column.slice(row, 1).combine_chunks()):
                invalid[row] = f"column {name!r} is not valid UTF-8"
    return invalid


def _is_valid(column: Any) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _likely(schema: pa.Schema, prompt_key: str) -> str:
    """The column that holds messages, or else the one with the nearest name."""
    for column in schema:
        if (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) and pa.types.is_struct(
            column.type.value_type
        ):
            return f": did you mean prompt_key={column.name!r}?"
    close = nearest(prompt_key, set(schema.names))
    return close if "did you mean" in close else ""


def _as_table(frame: Any) -> pa.Table:
    if isinstance(frame, pa.Table):
        return frame
    if type(frame).__module__.startswith("pandas"):
        return pa.Table.from_pandas(frame, preserve_index=False)
    # A datasets.Dataset; one that was filtered or shuffled is its table plus a list of row numbers.
    frame = frame.with_format(None)
    if getattr(frame, "_indices", None) is not None:
        frame = frame.flatten_indices()
    return frame.data.table


def _slices(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, BATCH_ROWS):
        yield table.slice(start, BATCH_ROWS)


# -- parquet ---------------------------------------------------------------------------------------------------------


def _open_parquet(file: SourceFile, index_columns: bool) -> Source:
    try:
        with pq.ParquetFile(file.path) as parquet:
            metadata, schema = parquet.metadata, parquet.schema_arrow
        with open(file.path, "rb") as raw:
            size, footer = _footer(raw)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{file.name}: {_damage(file.path, error)}") from error
    hidden = set() if index_columns else _index_columns(schema)
    return Source(
        file.name,
        metadata.num_rows,
        size,
        pa.schema([column for column in schema if column.name not in hidden]),
        lambda: _read_parquet(file, hidden),
        # The footer holds sizes, offsets and statistics of every column chunk.
        str(size).encode() + footer,
        parquet=file.path,
        without=lambda name: _read_parquet(file, hidden | {name}),
        content=lambda name: _column_digest(file, name),
    )


def _footer(raw: BinaryIO) -> tuple[int, bytes]:
    """The size of a parquet file, and its last part, which says where everything else is."""
    size = raw.seek(0, 2)
    raw.seek(max(0, size - 8))
    length = int.from_bytes(raw.read(4), "little")
    raw.seek(max(0, size - 8 - length))
    return size, raw.read()


def _column_digest(file: SourceFile, name: str) -> bytes:
    """Of the footer, and of one column's pages as they lie in the file. Anything less may stay the same when a value
    is changed in place: size, times, the footer's statistics."""
    digest = hashlib.blake2b(digest_size=16)
    with open(file.path, "rb") as raw:
        digest.update(_footer(raw)[1])
        metadata = pq.read_metadata(raw)
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            for number in range(row_group.num_columns):
                chunk = row_group.column(number)
                if (chunk.path_in_schema + ".").startswith(name + "."):
                    start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
                    raw.seek(start)
                    left = chunk.total_compressed_size + _SLACK
                    while left and (block := raw.read(min(left, 1 << 20))):
                        digest.update(block)
                        left -= len(block)
    return digest.digest()


def _read_parquet(file: SourceFile, hidden: set[str]) -> Iterator[pa.Table]:
    try:
        with pq.ParquetFile(file.path, pre_buffer=True) as parquet:
            columns = [name for name in parquet.schema_arrow.names if name not in hidden]
            for group in range(parquet.num_row_groups):
                for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns):
                    yield pa.Table.from_batches([batch])
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{file.name}: damaged: {error}. Fetch the file again") from error


def _index_columns(schema: pa.Schema) -> set[str]:
    """The columns in which pandas stored a frame's index: not data, and pandas does not give them back as such."""
    metadata = schema.pandas_metadata or {}
    return {name for name in metadata.get("index_columns", []) if isinstance(name, str)} & set(schema.names)


def _damage(path: str, error: Exception) -> str:
    """What a file that Arrow rejects looks like: parquet begins and ends with PAR1."""
    try:
        with open(path, "rb") as raw:
            head = raw.read(4)
            raw.seek(-min(4, raw.seek(0, 2)), 2)
            tail = raw.read(4)
    except OSError:
        return f"cannot be read: {error}"
    if not head:
        return "an empty file"
    if head != b"PAR1":
        return f"not a parquet file: it begins with {head!r}"
    if tail != b"PAR1":
        return "a truncated parquet file: its end is missing. Fetch the file again"
    return f"a damaged parquet file: {error}"


# -- JSON ------------------------------------------------------------------------------------------------------------


def _open_json(file: SourceFile) -> Source:
    try:
        with open(file.path, "rb") as raw:
            content = raw.read()
    except OSError as error:
        raise SourceError(f"{file.name}: {error.strerror}") from error
    rows = _parse(file.name, content)
    names = list(dict.fromkeys(key for row in rows for key in row))
    table = pa.table({name: _json_column([row.get(name) for row in rows]) for name in names})
    digest = hashlib.sha256(content).digest()
    return Source(
        file.name, len(rows), len(content), table.schema, lambda: _slices(table), digest, content=lambda name: digest
    )


def _parse(name: str, content: bytes) -> list[dict[str, Any]]:
    """The objects of a JSON array or of one line each."""
    if content.lstrip()[:1] == b"[":
        try:
            rows: list[Any] = json.loads(content)
        except ValueError as error:
            raise SourceError(f"{name}: not valid JSON: {error}") from error
        where = [f"item {i}" for i in range(len(rows))]
    else:
        rows, where = [], []
        for number, line in enumerate(content.split(b"\n"), 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise SourceError(f"{name}, line {number}: not valid JSON: {error}") from error
                where.append(f"line {number}")
    for row, place in zip(rows, where, strict=True):
        if not isinstance(row, dict):
            raise SourceError(f"{name}, {place}: expected an object with the row's columns, found {row!r:.60}")
    return rows


def _json_column(values: list[Any]) -> pa.Array:
    """Typed where the type changes nothing: not a missing key, not 1 to 1.0, not the order of keys."""
    text = json.dumps(values)
    try:
        column = pa.array(values)
        if json.dumps(column.to_pylist()) == text:
            return column
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        pass
    encoded = pa.array([None if value is None else json.dumps(value) for value in values], pa.large_string())
    return pa.ExtensionArray.from_storage(JSON_TYPE, encoded)
