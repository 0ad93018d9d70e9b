"""Pass-through columns on disk, mapped into memory.

    part 0, part 1, ...   Arrow streams, each with a schema and one table of up to `PART_BYTES`
    index                 JSON: where each part is, its rows and checksum, and what else is known of the file's rows
    8 bytes, 8 bytes      length and checksum of the index

Each part has its own dictionaries and its own schema, so it can be read without the others. Its checksum is compared
when it is first used.
"""

import base64
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import pyarrow as pa

from gpuload.cache.faults import damaged, missing
from gpuload.core.arrays import RowNumbers
from gpuload.sources.columns import Columns

PART_BYTES = 32 << 20
_ALIGNMENT = 64
_END = struct.Struct("<qq")


@dataclass(frozen=True)
class ColumnPart:
    """One table in a file.

    Attributes:
        start, end: the first byte of its stream, and the one after the last.
        checksum: of these bytes.
        rows: of the table.
        schema: of the table.
    """

    start: int
    end: int
    checksum: int
    rows: int
    schema: pa.Schema


class ColumnFile:
    """The tables of one file, in place.

    Attributes:
        path: of the file.
        parts: what is known of each table.
        key: of the file.
        rows: of all tables.
        invalid: number of a row → which of its columns is not valid.
    """

    def __init__(self, path: Path, memory: pa.Buffer, parts: Sequence[ColumnPart], facts: Mapping[str, Any]):
        self.path, self._memory = path, memory
        self.key: str = facts["key"]
        self.rows: int = facts["rows"]
        self.parts = parts or [ColumnPart(0, 0, 0, self.rows, pa.schema([]))]  # rows without columns
        self.invalid = {int(row): why for row, why in facts["invalid"].items()}
        self._tables: dict[int, pa.Table] = {}

    def table(self, number: int) -> pa.Table:
        """One of the tables. Its checksum is compared the first time.

        Raises:
            StoreError: it has been damaged.
        """
        part = self.parts[number]
        if not part.schema:
            return part.schema.empty_table()
        if number not in self._tables:
            stream = self._memory.slice(part.start, part.end - part.start)
            if zlib.crc32(stream) != part.checksum:
                raise damaged(self.path)
            with pa.ipc.open_stream(stream) as reader:
                self._tables[number] = reader.read_all()
        return self._tables[number]

    def __reduce__(self) -> tuple[Any, ...]:  # another process maps the file itself
        return _mapped_again, (self.path, self.key, self.rows)


def open_columns(path: Path, key: str) -> ColumnFile | None:
    """Opens the file with this key; None if there is none, or a damaged one, or another."""
    try:
        with pa.memory_map(str(path)) as mapped:
            memory = mapped.read_buffer()
        size, checksum = _END.unpack(memory.slice(memory.size - _END.size))
        index = memory.slice(memory.size - _END.size - size, size)
        facts = json.loads(index.to_pybytes())
        if zlib.crc32(index) != checksum or facts["key"] != key:
            return None
        schemas = [pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) for text in facts["schemas"]]
        parts = [ColumnPart(start, end, crc, rows, schemas[n]) for start, end, crc, rows, n in facts["parts"]]
        return ColumnFile(path, memory, parts, facts)
    except Exception:  # whatever the damage, the columns are read again
        return None


def _mapped_again(path: Path, key: str, rows: int) -> ColumnFile:
    found = open_columns(path, key)
    if found is None or found.rows != rows:
        raise missing(path)
    return found


class ColumnWriter:
    """Writes such a file.

    Args:
        path: where to write it.
        key: identifies what it has.
        source: the name of the file whose rows it gets, for lists of what is cached.

    Attributes:
        path: the same.
        key: the same.
        written: bytes so far.
        closed: whether the file is complete.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, key: str, source: str):
        self.path, self.key, self.written, self.closed = path, key, 0, False
        self._source = source
        self._schemas: list[pa.Schema] = []
        self._parts: list[list[int]] = []
        self._rows = self._checksum = 0
        self._invalid: dict[int, str] = {}
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self._file = open(path, "wb")  # noqa: SIM115

    def add(self, table: pa.Table, rows: int, invalid: Mapping[int, str]) -> None:
        """Appends rows.

        Args:
            table: their columns, maybe none.
            rows: how many there are.
            invalid: number of a row in the table → which of its columns is not valid.
        """
        self._invalid |= {self._rows + row: why for row, why in invalid.items()}
        self._rows += rows
        if not table.num_columns:  # such a table does not know its number of rows
            return
        if self._waiting and not table.schema.equals(self._waiting[0].schema):
            self._flush()
        self._waiting.append(table)
        self._waiting_bytes += table.nbytes
        if self._waiting_bytes >= PART_BYTES:
            self._flush()

    def close(self) -> None:
        """Completes the file."""
        self._flush()
        schemas = [base64.b64encode(schema.serialize()).decode() for schema in self._schemas]
        facts = {"key": self.key, "source": self._source, "rows": self._rows, "schemas": schemas, "parts": self._parts}
        index = json.dumps(facts | {"invalid": self._invalid}).encode()
        self._write(index + _END.pack(len(index), zlib.crc32(index)))
        self._file.close()
        self.closed = True

    def discard(self) -> None:
        """Removes the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _flush(self) -> None:
        """Writes the tables that wait as one part."""
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting).combine_chunks()
        self._waiting, self._waiting_bytes = [], 0
        if table.schema not in self._schemas:
            self._schemas.append(table.schema)
        self._write(bytes(-self.written % _ALIGNMENT))
        start, self._checksum = self.written, 0
        with pa.PythonFile(_Sink(self._write), "w") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        schema = self._schemas.index(table.schema)
        self._parts.append([start, self.written, self._checksum, table.num_rows, schema])

    def _write(self, data: Any) -> None:
        self._file.write(data)
        self._checksum = zlib.crc32(data, self._checksum)
        self.written += memoryview(data).nbytes


class _Sink:
    """A file that Arrow writes to without a copy of the whole stream."""

    def __init__(self, write: Callable[[Any], None]):
        self.write, self.closed = write, False

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def about_columns(path: Path) -> tuple[str, int] | None:
    """The name of the file of which a file of columns was made, and its rows; None if it is damaged."""
    try:
        with open(path, "rb") as file:
            file.seek(-_END.size, 2)
            size, _ = _END.unpack(file.read())
            file.seek(-_END.size - size, 2)
            facts = json.loads(file.read(size))
        return str(facts["source"]), int(facts["rows"])
    except Exception:  # whatever the damage: `open_columns` ignores such a file, too
        return None


def columns_of(files: Sequence[ColumnFile], index: RowNumbers) -> Columns:
    """The columns of several files, in place.

    Args:
        index: (n,) numbers of the rows to serve, counted over the rows of all files.
    """
    parts = [part for file in files for part in file.parts]
    counts, schemas = [part.rows for part in parts], [part.schema for part in parts]
    columns = MappedColumns.of_parts(counts, Tables(files), schemas, index)
    columns.files = files
    return columns


class MappedColumns(Columns):
    """Columns in files.

    Attributes:
        files: where they are.
    """

    files: Sequence[ColumnFile]

    def __reduce__(self) -> tuple[Any, ...]:
        # Where parts begin is in the files: one that was made again since has the same rows, but maybe in other parts.
        return columns_of, (self.files, self._index)


class Tables(Sequence[pa.Table]):
    """The tables of several files, one after the other."""

    def __init__(self, files: Sequence[ColumnFile]):
        self._places = [(file, number) for file in files for number in range(len(file.parts))]

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, number: int) -> pa.Table: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[pa.Table]: ...
    def __getitem__(self, number: int | slice) -> pa.Table | Sequence[pa.Table]:
        if isinstance(number, slice):
            return [file.table(each) for file, each in self._places[number]]
        file, each = self._places[number]
        return file.table(each)
