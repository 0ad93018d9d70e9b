"""The columns that are only passed through: kept as Arrow, made Python objects when a row is asked for.

Files of one data set disagree on their columns and types, and casting to a common type would change values (a struct
gains the other files' keys, 1 becomes 1.0). So record batches stay as they were read, side by side, and a column that
a file does not have is None in its rows.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.errors import DataError
from gpuload.read import JSON_TYPE

_MERGE_BYTES = 256 << 20


class Columns:
    """Rows of Python objects over Arrow record batches whose schemas may differ.

    Args:
        tables: the rows, in order.
        index: (n,) which of these rows there are, in which order; None for all.
    """

    def __init__(self, tables: Iterable[pa.Table], index: np.ndarray[Any, Any] | None = None):
        self._batches = _merge_equal(tables)
        self._starts = np.cumsum([0] + [batch.num_rows for batch in self._batches])
        self._index = np.arange(self._starts[-1]) if index is None else index
        self.names = list(dict.fromkeys(name for batch in self._batches for name in batch.schema.names))

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return sum(batch.nbytes for batch in self._batches)

    def take(self, rows: np.ndarray[Any, Any], names: Sequence[str] | None = None) -> dict[str, list[Any]]:
        """The given rows as one list of Python objects per column.

        Args:
            rows: (m,) row numbers.
            names: of the columns; None for all.
        """
        names = self.names if names is None else names
        stored = self._index[rows]
        batch_of = np.searchsorted(self._starts, stored, side="right") - 1
        taken: dict[str, list[Any]] = {name: [None] * len(rows) for name in names}
        for number in np.unique(batch_of):
            slots = np.flatnonzero(batch_of == number)
            batch = self._batches[number]
            picked = batch.select([name for name in names if name in batch.schema.names]).take(
                pa.array(stored[slots] - self._starts[number])
            )
            for name, column in zip(picked.schema.names, picked.columns, strict=True):
                values = to_python(column)
                if len(slots) == len(rows):
                    taken[name] = values
                else:
                    for slot, value in zip(slots, values, strict=True):
                        taken[name][slot] = value
        return taken

    def table(self) -> pa.Table:
        """All rows as one Arrow table, types promoted where files differ.

        Raises:
            DataError: a column's types cannot be made one without changing values; `take` gives them as they are.
        """
        tables = [pa.Table.from_batches([batch]) for batch in self._batches]
        try:
            merged = pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(
                f"the files' columns have types that no single table can hold ({error}): use dataset[i] instead"
            ) from error
        whole = len(self._index) == merged.num_rows and bool(np.all(np.diff(self._index) == 1))
        return merged if whole else merged.take(pa.array(self._index))

    def schema(self) -> pa.Schema:
        """The columns with the types of the first file that has them."""
        fields = {field.name: field for batch in reversed(self._batches) for field in batch.schema}
        return pa.schema([fields[name] for name in self.names])


def to_python(column: pa.Array) -> list[Any]:
    """Arrow values as Python objects, JSON text decoded."""
    values: list[Any] = column.to_pylist()
    if column.type == JSON_TYPE:
        return [None if value is None else json.loads(value) for value in values]
    return values


def _merge_equal(tables: Iterable[pa.Table]) -> list[pa.RecordBatch]:
    """One batch for each run of tables with equal schemas: taking rows costs a call per batch that has some."""
    merged: list[pa.RecordBatch] = []
    run: list[pa.Table] = []

    def flush() -> None:
        if run:
            merged.extend(batch for batch in pa.concat_tables(run).combine_chunks().to_batches() if batch.num_rows)
            run.clear()

    size = 0
    for table in tables:
        if run and (not table.schema.equals(run[0].schema) or size + table.nbytes > _MERGE_BYTES):
            flush()
            size = 0
        size += table.nbytes
        run.append(table)
    flush()
    return merged
