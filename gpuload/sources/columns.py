"""Pass-through columns: stored as Arrow, converted to Python objects on access.

Files of one dataset disagree on their columns and types, and casting to a common type would change values (a struct
would gain the other files' keys, 1 would become 1.0). So tables stay as they were read, and a column that a file does
not have is None in its rows.
"""

import copy
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Self

import numpy as np
import pyarrow as pa

from gpuload.core.arrow import as_arrow, without_rows
from gpuload.core.errors import DataError
from gpuload.sources.digest import column_digests
from gpuload.sources.python import to_objects
from gpuload.sources.types import JSON_TYPE

_MERGE_BYTES = 256 << 20
_FEW = 8  # rows of a part: to join views of them takes less time than to gather them


class Columns:
    """Rows of Python objects over Arrow tables whose schemas may differ: of all their rows, those with the numbers
    `index` (n,), in this order, or all. `names` are those of all columns, in order of appearance."""

    def __init__(self, tables: Iterable[pa.Table], index: np.ndarray[Any, Any] | None = None):
        counts, parts = _merge_equal(tables)
        self._set(counts, parts, [part.schema for part in parts], index)

    @classmethod
    def of_parts(
        cls, counts: Sequence[int], parts: Sequence[pa.Table], schemas: Sequence[pa.Schema], index: np.ndarray[Any, Any]
    ) -> Self:
        """Columns over tables that are made when they are needed, whose numbers of rows and schemas are known."""
        made = cls.__new__(cls)
        made._set(counts, parts, schemas, index)
        return made

    def _set(
        self,
        counts: Sequence[int],
        parts: Sequence[pa.Table],
        schemas: Sequence[pa.Schema],
        index: np.ndarray[Any, Any] | None,
    ) -> None:
        self._parts, self._schemas = parts, schemas
        kinds: list[pa.Schema] = []  # different ones
        for schema in schemas:
            if not any(schema.equals(kind) for kind in kinds):
                kinds.append(schema)
        self._kinds = [next(n for n, kind in enumerate(kinds) if kind.equals(schema)) for schema in schemas]
        self._starts = np.cumsum([0, *counts])
        self._index = np.arange(self._starts[-1]) if index is None else index
        self._made: dict[str, np.ndarray[Any, Any]] = {}  # columns of numbers that no file has
        self.names = list(dict.fromkeys(name for schema in schemas for name in schema.names))

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def take(self, rows: np.ndarray[Any, Any], names: Sequence[str] | None = None) -> dict[str, list[Any]]:
        """Converts the given rows (m,) to Python objects: column name → list of m values, None for rows whose file does
        not have the column. `names` are those of the columns, None for all."""
        names = self.names if names is None else names
        taken: dict[str, list[Any]] = {name: [None] * len(rows) for name in names}
        taken |= {name: self._made[name][rows].tolist() for name in names if name in self._made}
        for slots, picked in self._picked(rows, names):
            in_order = len(slots) == len(rows) and bool(np.all(np.diff(slots) > 0))
            places = slots.tolist()
            for name, column in zip(picked.schema.names, picked.columns, strict=True):
                values = _values(name, column)
                if in_order:
                    taken[name] = values
                else:
                    column_of = taken[name]
                    for slot, value in zip(places, values, strict=True):
                        column_of[slot] = value
        return taken

    def place(self, row: int) -> tuple[pa.Table, int]:
        """The table that has a row, and the row's number there: for callers to whom `take` is too slow."""
        stored = int(self._index[row])
        part = int(np.searchsorted(self._starts, stored, side="right")) - 1
        return self._parts[part], stored - int(self._starts[part])

    def take_table(self, rows: np.ndarray[Any, Any], schema: pa.Schema) -> pa.Table:
        """The given rows (m,) as one Arrow table, with at least one column of `promoted_schema`; null in rows whose
        file does not have it."""
        slots, tables = [np.zeros(0, np.int64)], [without_rows(schema)]
        for some, picked in self._picked(rows, schema.names):
            slots.append(some)
            # A table without columns does not know how many rows it has.
            nulls = {schema.names[0]: pa.nulls(len(some), schema.field(0).type)}
            tables.append(picked if picked.num_columns else pa.table(nulls))
        whole = _concatenated(tables, "leave it out with columns=")
        taken = whole.take(as_arrow(np.argsort(np.concatenate(slots))))
        return self._with_made(taken, {name: self._made[name][rows] for name in schema.names if name in self._made})

    def _picked(
        self, rows: np.ndarray[Any, Any], names: Sequence[str]
    ) -> Iterator[tuple[np.ndarray[Any, Any], pa.Table]]:
        """The (m,) given rows, those of parts with one schema at once: their places among these, and their columns."""
        stored = self._index[rows]
        part_of = np.searchsorted(self._starts, stored, side="right") - 1
        by_part = np.argsort(part_of, kind="stable")
        part_of = part_of[by_part]
        places = stored[by_part] - self._starts[part_of]
        firsts = np.flatnonzero(np.diff(part_of, prepend=-1))
        bounds = np.append(firsts, len(by_part)).tolist()
        # Of each kind of schema: its columns among the names, the places of its rows among the given ones, the rows.
        found: dict[int, tuple[list[str], list[np.ndarray[Any, Any]], list[pa.Table]]] = {}
        for number, (first, end) in zip(part_of[firsts].tolist(), itertools.pairwise(bounds), strict=True):
            kind = self._kinds[number]
            if kind not in found:
                there = set(self._schemas[number].names) - self._made.keys()
                found[kind] = ([name for name in names if name in there], [], [])
            shown, some, tables = found[kind]
            part = self._parts[number].select(shown)
            some.append(by_part[first:end])
            if end - first <= _FEW:
                tables += [part.slice(place, 1) for place in places[first:end].tolist()]
            else:
                tables.append(part.take(as_arrow(places[first:end])))
        for _, some, tables in found.values():
            whole = tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks()
            yield np.concatenate(some), whole

    def select(self, rows: np.ndarray[Any, Any]) -> Self:
        """(m,) row numbers → those rows, over the same tables."""
        selected = copy.copy(self)
        selected._index = self._index[rows]
        selected._made = {name: values[rows] for name, values in self._made.items()}
        return selected

    def with_columns(self, made: Mapping[str, np.ndarray[Any, Any]]) -> Self:
        """The same rows with further columns of (n,) int64 numbers. They hide columns of files with these names."""
        other = copy.copy(self)
        other._made = {**self._made, **made}
        other.names = list(dict.fromkeys([*self.names, *made]))
        return other

    def without(self, names: Set[str]) -> Self:
        """The same rows without the columns of these names."""
        other = copy.copy(self)
        other.names = [name for name in self.names if name not in names]
        return other

    @staticmethod
    def _with_made(table: pa.Table, made: Mapping[str, np.ndarray[Any, Any]]) -> pa.Table:
        """A table with columns of numbers in place of those with their names, or at its end."""
        for name, values in made.items():
            at = table.schema.get_field_index(name)
            numbers = as_arrow(values)
            table = table.append_column(name, numbers) if at < 0 else table.set_column(at, name, numbers)
        return table

    def digests(self) -> dict[str, str]:
        """Column name → digest of its values and of the order of the rows, in 24 hexadecimal digits."""
        # Only the rows that are served count: files on disk have others, too.
        served = self._index if bool(np.all(np.diff(self._index) > 0)) else np.unique(self._index)
        order = np.searchsorted(served, self._index).astype(np.int64).tobytes()
        digests = column_digests(self._served(served))
        found = {name: hashlib.sha256(digest + order).hexdigest()[:24] for name, digest in digests.items()}
        made = {name: hashlib.sha256(np.ascontiguousarray(each).data) for name, each in self._made.items()}
        return found | {name: digest.hexdigest()[:24] for name, digest in made.items()}

    def _served(self, rows: np.ndarray[Any, Any]) -> Iterator[tuple[int, pa.Table]]:
        """Some rows, given in ascending order, as tables with the number of their first row among them."""
        firsts = np.searchsorted(rows, self._starts)
        for number, (first, end) in enumerate(itertools.pairwise(firsts.tolist())):
            part, places = self._parts[number], rows[first:end] - self._starts[number]
            yield first, part if len(places) == part.num_rows else part.take(as_arrow(places))

    def table(self) -> pa.Table:
        """All rows as one Arrow table, with types promoted where files differ; a `DataError` if no type has all values
        of a column, which `take` returns unchanged."""
        names = [name for name in self.names if name not in self._made]
        if not names:
            return self._with_made(pa.table({}), self._made)
        counts = np.diff(self._starts).tolist()
        # A table without columns does not know how many rows it has.
        tables = [
            part if part.num_columns else pa.table({names[0]: pa.nulls(count)})
            for part, count in zip(self._parts, counts, strict=True)
        ]
        merged = _concatenated(tables, "access rows with dataset[i] instead").select(names)
        whole = len(self._index) == merged.num_rows and bool(np.all(np.diff(self._index) == 1))
        merged = merged if whole else merged.take(as_arrow(self._index))
        return self._with_made(merged, self._made).select(self.names)

    def promoted_schema(self, names: Sequence[str]) -> pa.Schema:
        """Some columns, with types promoted where files differ; a `DataError` if no type has all values of a column."""
        fields = []
        for name in names:
            found = [schema.field(name) for schema in self._schemas if name in schema.names]
            if name in self._made:
                found = [pa.field(name, pa.int64())]
            fields.append(promoted(found, "leave it out with columns="))
        return pa.schema(fields)

    def schema(self) -> pa.Schema:
        """The columns with the types of the first file that has them."""
        fields = {field.name: field for schema in reversed(self._schemas) for field in schema}
        fields |= {name: pa.field(name, pa.int64()) for name in self._made}
        return pa.schema([fields[name] for name in self.names])


def promoted(fields: Sequence[pa.Field], instead: str) -> pa.Field:
    """A column with a type that has all values of some with its name; a `DataError`, which says what to do `instead`,
    if there is none."""
    try:
        return pa.unify_schemas([pa.schema([field]) for field in fields], promote_options="permissive").field(0)
    except pa.ArrowException as error:
        raise _no_common_type(fields[0].name, error, instead) from error


def _concatenated(tables: Sequence[pa.Table], instead: str) -> pa.Table:
    """Tables one after the other, with types promoted where they differ; a `DataError`, which says what to do
    `instead`, if no type has all values of a column: one of floats does not have all integers of 64 bits."""

    def concatenated(some: Sequence[pa.Table]) -> pa.Table:
        return pa.concat_tables(some, promote_options="permissive")

    try:
        return concatenated(tables)
    except pa.ArrowException:
        for name in dict.fromkeys(name for table in tables for name in table.schema.names):
            try:
                concatenated([table.select([name]) for table in tables if name in table.schema.names])
            except pa.ArrowException as error:
                raise _no_common_type(name, error, instead) from error
        raise


def _no_common_type(name: str, error: Exception, instead: str) -> DataError:
    return DataError(f"column {name!r} has no common Arrow type in the files ({error}): {instead}")


def to_python(column: pa.Array) -> list[Any]:
    """Converts Arrow values to Python objects; JSON text is decoded."""
    values = to_objects(column)
    if column.type == JSON_TYPE:
        from gpuload.sources.json_values import parse_json

        return [None if value is None else parse_json(value) for value in values]
    return values


def _values(name: str, column: pa.Array) -> list[Any]:
    """`to_python`, of a pass-through column; a `DataError` if Python has no such value: a date after the year 9999,
    JSON nested a thousand levels deep, a time zone that nobody knows ..."""
    try:
        return to_python(column)
    except (ArithmeticError, LookupError, RecursionError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"column {name!r} of type {column.type!s:.60} has a value without a Python equivalent ({error}): convert "
            "the column, to strings for example, or remove it"
        ) from error


def _merge_equal(tables: Iterable[pa.Table]) -> tuple[list[int], list[pa.Table]]:
    """Joins consecutive tables with equal schemas, because taking rows costs a call per table. Returns the number of
    rows of each joined table (a table without columns does not know it), and the tables."""
    counts: list[int] = []
    merged: list[pa.Table] = []
    run: list[pa.Table] = []

    def flush() -> None:
        if run:
            counts.append(sum(table.num_rows for table in run))
            merged.append(pa.concat_tables(run).combine_chunks())
            run.clear()

    size = 0
    for table in tables:
        if run and (not table.schema.equals(run[0].schema) or size + table.nbytes > _MERGE_BYTES):
            flush()
            size = 0
        size += table.nbytes
        run.append(table)
    flush()
    return counts, merged


def invalid_rows(table: pa.Table) -> dict[int, str]:
    """Row → which of its columns is not valid UTF-8. Arrow reads strings unchecked; validating a whole batch is cheap,
    so rows are only looked at one by one if the batch is invalid."""
    invalid: dict[int, str] = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if _is_valid(column):
            continue
        for row in range(table.num_rows):
            if not _row_is_valid(column.slice(row, 1).combine_chunks()):
                invalid[row] = f"column {name!r} is not valid UTF-8"
    return invalid


def _row_is_valid(value: pa.Array) -> bool:
    """Whether a single value is valid. A dictionary has values of other rows as well, which do not count."""
    if pa.types.is_struct(value.type):
        return all(map(_row_is_valid, value.flatten()))
    return _is_valid(value.dictionary_decode() if pa.types.is_dictionary(value.type) else value)


def _is_valid(column: Any) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def drained(tables: list[pa.Table]) -> Iterator[pa.Table]:
    """Removes the tables one by one, so that each is freed as soon as it has been copied."""
    while tables:
        yield tables.pop(0)
