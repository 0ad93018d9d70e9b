"""JSON as columns.

JSON has no schema, so reading it must not invent one: Arrow would give every struct the union of all rows' keys, and a
template that prints `tool_calls` would print the nulls too. A column whose values change on a round trip through
Arrow's types is kept as JSON text (`arrow.json`) and decoded on access.

A file is read piece by piece, and each piece becomes Arrow at once, because Python objects take several times the
memory. What a column is made of, all rows decide: a later piece may have another type, or keys that the first one
lacks. So pieces get the type of the whole column at the end, and pieces whose values turn out to be JSON text are read
again. Of a large file, the types are kept only, and each piece is read again for its rows.
"""

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO

import pyarrow as pa

from gpuload.core.arrow import as_arrow
from gpuload.core.errors import SourceError
from gpuload.core.memory import garbage_collection_paused
from gpuload.sources.columns import to_python
from gpuload.sources.json_rows import JsonPiece, Row, UnclearError, pieces_of, read_blocks, rows_of, text_of, value_of
from gpuload.sources.local import LocalFile
from gpuload.sources.remote import RemoteFile
from gpuload.sources.types import JSON_TYPE, as_json, json_type
from gpuload.sources.urls import changed

_AS_TEXT = frozenset(("tools",))
"""Columns that nothing reads but templates, row by row, as Python objects: a type of Arrow would only take time."""

HELD_BYTES = 1 << 30
"""Of the columns of a file that are kept in memory."""


@dataclass
class _Column:
    """What is known of a column."""

    kind: pa.DataType | None  # the type of all values so far; None if no type of Arrow keeps them
    escaped: bool = False  # whether texts have lone surrogates, so that JSON must be written again
    nbytes: int = 0  # of its values


@dataclass
class _Kept:
    """The rows of a piece."""

    rows: int
    arrays: dict[str, Any] | None  # their columns, as they were made; None if they are not kept
    start: int  # of their lines
    nbytes: int  # likewise


class JsonColumns:
    """The columns of an open file, with a name for messages.

    Attributes:
        rows: number of rows.
        nbytes: of the file.
        digest: of its bytes.
        schema: its columns, in the order in which they first occur.
        held: whether all of them are in memory, and the file is not read again.

    Raises:
        SourceError: it is not JSON, or a row is not an object.
        RecursionError: it is nested too deeply.
    """

    @garbage_collection_paused()
    def __init__(self, name: str, raw: BinaryIO):
        self._name = name
        try:
            self._read(raw, whole=False)
        except UnclearError:
            raw.seek(0)
            self._read(raw, whole=True)
        self.held = all(part.arrays is not None for part in self._parts)
        types = {each: JSON_TYPE if column.kind is None else column.kind for each, column in self._columns.items()}
        self.schema = pa.schema(list(types.items()))
        self._tables = [None if part.arrays is None else self._table(part, raw) for part in self._parts]
        for part in self._parts:
            part.arrays = None

    def _read(self, raw: BinaryIO, whole: bool) -> None:
        self._columns: dict[str, _Column] = {}
        self._parts: list[_Kept] = []
        self.nbytes, digest, size = 0, hashlib.sha256(), 0

        def as_texts() -> bool:
            return any(column.kind is None for column in self._columns.values())

        for piece in pieces_of(self._name, read_blocks(raw, digest), whole, as_texts):
            arrays = self._arrays(piece)
            size += sum(array.nbytes for array in arrays.values())
            for each, array in arrays.items():
                self._columns[each].nbytes += array.nbytes
            kept = arrays if size <= HELD_BYTES or not piece.nbytes else None
            self._parts.append(_Kept(len(piece.rows), kept, piece.start, piece.nbytes))
            del piece, arrays  # before the next one is parsed
        self.nbytes, self.digest = raw.tell(), digest.digest()
        self.rows = sum(part.rows for part in self._parts)

    def bytes_of(self, names: Collection[str] | None) -> int:
        """About how many bytes the values of some columns have; None for all."""
        return sum(column.nbytes for name, column in self._columns.items() if names is None or name in names)

    def tables(self, file: LocalFile | RemoteFile) -> Iterator[pa.Table]:
        """All rows, in order, in one table if they are held; a `SourceError` if the file was changed."""
        if self.held:
            yield pa.concat_tables(self._tables)
            return
        try:
            with file.open() as raw:
                for part, table in zip(self._parts, self._tables, strict=True):
                    yield self._again(part, raw) if table is None else table
        except (SourceError, ValueError, FileNotFoundError, pa.ArrowException) as error:
            raise changed(self._name) from error  # the same bytes could be read before

    def _arrays(self, piece: JsonPiece) -> dict[str, Any]:
        """The columns of a piece, with the types that its rows alone have, as far as no earlier row decides."""
        arrays: dict[str, Any] = {}
        for name in dict.fromkeys(chain.from_iterable(piece.rows)):
            if any("\ud800" <= letter <= "\udfff" for letter in name):
                row = sum(part.rows for part in self._parts) + [name in row for row in piece.rows].index(True)
                raise SourceError(f"{self._name} row {row}: the key {name!r} has a lone surrogate: rename it")
            column = self._columns.setdefault(name, _Column(None if name in _AS_TEXT else pa.null()))
            made = None if column.kind is None else _typed(column, _values(name, piece.rows))
            arrays[name] = _as_text(column, name, piece.with_texts()) if made is None else made
        return arrays

    def _table(self, part: _Kept, raw: BinaryIO) -> pa.Table:
        """The columns of a part, with the types of the whole file."""
        assert part.arrays is not None
        made = {}
        for name, column in self._columns.items():
            array = part.arrays.get(name, pa.nulls(part.rows))
            if column.kind is not None:
                made[name] = _widened(array, column.kind)
            elif array.type == JSON_TYPE and not column.escaped:
                made[name] = array
            elif part.nbytes and not (column.escaped or pa.types.is_null(array.type)):  # texts as in the file
                return self._again(part, raw)
            else:
                made[name] = as_json(to_python(array))
        return pa.table(made, self.schema)

    @garbage_collection_paused()
    def _again(self, part: _Kept, raw: BinaryIO) -> pa.Table:
        """The same, of a part of JSON lines that is read again."""
        raw.seek(part.start)
        rows = rows_of(self._name, raw.read(part.nbytes), 1, as_texts=True)
        made = {
            name: _as_text(column, name, rows) if column.kind is None else as_arrow(_values(name, rows), column.kind)
            for name, column in self._columns.items()
        }
        return pa.table(made, self.schema)


def _values(name: str, rows: list[Row]) -> list[Any]:
    """(n,) values of a column, None where a row has none."""
    return [value_of(row.get(name)) for row in rows]


def _as_text(column: _Column, name: str, rows: list[Row]) -> pa.Array:
    """(n,) values as JSON, null where a row has none: as it is in the file, if it is known."""
    if not column.escaped:
        try:
            texts = as_arrow([text_of(row.get(name)) for row in rows], pa.large_string())
            return pa.ExtensionArray.from_storage(JSON_TYPE, texts)
        except UnicodeEncodeError:  # lone surrogates, which JSON text can escape
            column.escaped = True
    return as_json(_values(name, rows))


def _typed(column: _Column, values: list[Any]) -> Any:
    """(n,) values with a type of Arrow, if that changes nothing in this and the earlier pieces: no missing key, no 1 to
    1.0, no order of keys. None otherwise, for this and all later pieces."""
    try:
        # None: no type has all of them, or one that turns 1 into 1.0.
        if (kind := json_type(values)) is not None:
            column.kind = _common(column.kind, kind)
            if column.kind is not None:
                array = as_arrow(values, kind)
                if _is_kept(kind):
                    return array
                found = array.to_pylist()
                # Equal values of one type, whose keys have one order, are the same; but NaN does not equal itself.
                if found == values or json.dumps(found) == json.dumps(values):
                    return array
    except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError):
        pass
    column.kind = None
    return None


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """What `json_type` returns for the values of both types; None if they have no type in common, or objects in the
    same place other keys."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_list(one) and pa.types.is_list(other):
        inner = _common(one.value_type, other.value_type)
        return None if inner is None else pa.list_(inner)
    if pa.types.is_struct(one) and pa.types.is_struct(other) and one.names == other.names:
        fields = {a.name: _common(a.type, b.type) for a, b in zip(one, other, strict=True)}
        return None if None in fields.values() else pa.struct(list(fields.items()))
    return None


def _widened(array: Any, kind: pa.DataType) -> Any:
    """The same values with a type in which nulls have become another one."""
    if array.type == kind:
        return array
    if isinstance(array, pa.ChunkedArray):
        return pa.chunked_array([_widened(chunk, kind) for chunk in array.chunks], kind)
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    if pa.types.is_list(kind):
        parts, buffers = [_widened(array.values, kind.value_type)], array.buffers()[:2]
    else:
        parts, buffers = [_widened(array.field(i), kind[i].type) for i in range(len(kind))], array.buffers()[:1]
    return pa.Array.from_buffers(kind, len(array), buffers, offset=array.offset, children=parts)


def _is_kept(kind: pa.DataType) -> bool:
    """Whether Arrow has just the values that JSON has, in objects with the same keys."""
    if pa.types.is_list(kind):
        return _is_kept(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_kept(field.type) for field in kind)
    return bool(pa.types.is_string(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind))
