"""Rows of a dataset as Arrow record batches of bounded size, made one after the other."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, RowNumbers, offsets_of
from gpuload.core.arrow import as_arrow, as_numpy
from gpuload.core.errors import OptionError
from gpuload.core.options import nearest
from gpuload.sources.columns import Columns

INT32_LIST = pa.list_(pa.int32())

_TOKENS = 1 << 22  # of one batch: 16 MiB of ids
_ROWS = 10_000


def row_reader(
    tokens: RowNumbers,
    fields: Sequence[pa.Field],
    make: Callable[[RowNumbers], list[pa.Array]],
    others: Columns,
    names: Sequence[str] | None,
) -> pa.RecordBatchReader:
    """A stream of n rows, as many in a batch as their `tokens` (n,) allow. `make` returns the values of the columns
    `fields` for (m,) row numbers; `names` chooses from the `others`, None: all whose names no field has.

    All columns of a batch have the same rows, so columns of equally long lists also have equal offsets, as TRL's
    packing requires.

    Raises:
        OptionError: a name is not that of another column.
        DataError: a column's types differ from file to file, and have no common type.
    """
    own = {field.name for field in fields}
    if names is None:
        names = [name for name in others.names if name not in own]
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in others.names or name in own:
            known = set(others.names) - own
            raise OptionError(
                f"columns: {name!r} is not a column that can be passed through{nearest(str(name), known)}"
            )
    passed = others.promoted_schema(names)

    def batches() -> Iterator[pa.RecordBatch]:
        for rows in parts(tokens):
            arrays = make(rows)
            if names:
                arrays += [column.combine_chunks() for column in others.take_table(rows, passed).columns]
            yield pa.record_batch(arrays, schema=schema)

    schema = pa.schema([*fields, *passed])
    return pa.RecordBatchReader.from_batches(schema, batches())


def names_of(fields: Iterable[pa.Field], others: Columns) -> list[str]:
    """The names of the columns of `row_reader`, with all other columns."""
    return list(dict.fromkeys([*(field.name for field in fields), *others.names]))


def parts(tokens: RowNumbers) -> Iterator[RowNumbers]:
    """Row numbers of n rows in order, part by part; `tokens` (n,) says how many tokens each row has."""
    # A part ends where the running total passes a multiple of `_TOKENS`, so it has at most that many tokens and a row.
    passes = np.flatnonzero(np.diff(offsets_of(tokens)[1:] // _TOKENS)) + 1
    bounds = np.unique(np.concatenate([np.arange(0, len(tokens), _ROWS), passes, [len(tokens)]]))
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        yield np.arange(low, high)


def ragged(table: pa.Table, name: str) -> Ragged:
    """The rows of a column of lists of int32, none of them null: what `lists` was made of."""
    column = table.column(name).combine_chunks()
    return Ragged(as_numpy(column.flatten()), offsets_of(as_numpy(column.value_lengths())))


def lists(values: np.ndarray, offsets: RowNumbers) -> pa.ListArray:
    """(m,) lists of values, with offsets (m + 1,), which are few enough for 32 bits."""
    return pa.ListArray.from_arrays(as_arrow(offsets, pa.int32()), as_arrow(values))
