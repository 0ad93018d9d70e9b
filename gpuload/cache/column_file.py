"""Pass-through columns on disk, mapped into memory.

A `BlockFile` whose blocks are Arrow streams, each with a schema and one table of up to `PART_BYTES`. So each part has
its own dictionaries and its own schema, and can be read without the others. It is compared with its checksum when it is
first used.
"""

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from gpuload.cache.block_file import BlockFile, BlockWriter, Gone
from gpuload.cache.gather import MappedTables
from gpuload.core.arrays import RowNumbers
from gpuload.core.arrow import without_rows
from gpuload.sources.columns import Columns

PART_BYTES = 32 << 20


class ColumnFile(BlockFile):
    """The tables of one file, in place."""

    def __init__(self, path: Path, memory: pa.Buffer, facts: Mapping[str, Any]):
        super().__init__(path, memory, facts)
        schemas = [pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) for text in facts["schemas"]]
        parts = [(rows, schemas[number]) for rows, number in facts["parts"]]
        # Of each table, how many rows it has, and its schema; or rows without columns.
        self.parts: list[tuple[int, pa.Schema]] = parts or [(self.num_rows, pa.schema([]))]
        self.invalid = {int(row): why for row, why in facts["invalid"].items()}  # row → which column is not valid
        self._tables: dict[int, pa.Table] = {}

    @property
    def of(self) -> str:
        """Which entry it was written with, see `EntryWriter`; empty if with none."""
        return str(self.facts["of"])

    def rows(self, low: int, high: int) -> pa.Table:
        """Rows `low` to `high` (exclusive) of parts with one schema; a `StoreError` if they have been damaged."""
        first, found = 0, []
        for number, (rows, _) in enumerate(self.parts):
            if first < high and low < first + rows:
                begin, end = max(low - first, 0), min(high - first, rows)
                found.append(self.table(number).slice(begin, end - begin))
            first += rows
        return pa.concat_tables(found)

    def table(self, number: int) -> pa.Table:
        """One of the tables; a `StoreError` if it has been damaged."""
        _, schema = self.parts[number]
        if not schema:
            return without_rows(schema)
        if number not in self._tables:
            with pa.ipc.open_stream(self.block(number)) as reader:
                self._tables[number] = reader.read_all()
        return self._tables[number]


class ColumnWriter(BlockWriter):
    """Writes such a file. For the arguments see `BlockWriter`."""

    def __init__(self, path: Path, key: str, source: str):
        super().__init__(path, key, source)
        self.of = ""  # see `ColumnFile`
        self._schemas: list[pa.Schema] = []
        self._parts: list[list[int]] = []
        self._invalid: dict[int, str] = {}
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0

    def add(self, table: pa.Table, rows: int, invalid: Mapping[int, str]) -> None:
        """Appends rows and their columns, maybe none; `invalid`: number of a row in the table → which of its columns is
        not valid."""
        self._invalid |= {self.rows + row: why for row, why in invalid.items()}
        self.rows += rows
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
        self._finish(schemas=schemas, parts=self._parts, invalid=self._invalid, of=self.of)

    def _flush(self) -> None:
        """Writes the tables that wait as one part."""
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting).combine_chunks()
        self._waiting, self._waiting_bytes = [], 0
        if table.schema not in self._schemas:
            self._schemas.append(table.schema)
        self._begin()
        with pa.PythonFile(_Sink(self._write), "w") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        self._parts.append([table.num_rows, self._schemas.index(table.schema)])


class _Sink(io.RawIOBase):
    """A file that Arrow writes to without a copy of the whole stream."""

    def __init__(self, write: Callable[[Any], None]):
        self.write = write  # type: ignore[method-assign]

    def writable(self) -> bool:
        return True


def columns_of(files: Sequence[ColumnFile], index: RowNumbers) -> "MappedColumns":
    """The columns of several files, in place: the rows (n,) with these numbers, counted over all files."""
    counts, schemas = zip(*(part for file in files for part in file.parts), strict=True) if files else ((), ())
    columns = MappedColumns.of_parts(counts, Tables(files), schemas, index)
    columns.files = files
    return columns


def _columns_of_those_there(files: Sequence[Any], index: RowNumbers) -> Any:
    return next((file for file in files if isinstance(file, Gone)), None) or columns_of(files, index)


class MappedColumns(Columns):
    """Columns in files."""

    files: Sequence[ColumnFile]

    def _picked(self, rows: RowNumbers, names: Sequence[str]) -> Iterator[tuple[RowNumbers, pa.Table]]:
        names = [name for name in names if name not in self._made]
        table = self._buffers.take(self._index[rows], names) if self.files and names else None
        if table is None:
            yield from super()._picked(rows, names)
        else:
            yield np.arange(len(rows)), table

    @cached_property
    def _buffers(self) -> MappedTables:
        return MappedTables([file.memory for file in self.files], self._parts, self._schemas, self._starts)

    def __reduce__(self) -> tuple[Any, ...]:
        # Where parts begin is in the files: one that was made again since has the same rows, but maybe in other parts.
        return _columns_of_those_there, (self.files, self._index), {"_made": self._made, "names": self.names}


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
