"""Arrow values as Python objects, for versions of pyarrow whose own conversion makes a scalar object of every value.

Before version 25, `to_pylist` of a conversation with 18 messages takes 50 µs, nearly all of it for these scalars. Here
a column of structs is converted child by child and a column of lists as one array, so that a batch takes a few calls.
The objects are the same, and none of them that can be modified is in two rows.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrow import as_numpy, fill_null

_SCALARS = int(pa.__version__.partition(".")[0]) < 25


def to_objects(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """`column.to_pylist()`, in less time with older versions of pyarrow."""
    return by_columns(column) if _SCALARS else list(column.to_pylist())


def by_columns(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The same objects as `column.to_pylist()`, converted column by column. Types without a faster way use that."""
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in by_columns(chunk)]
    try:
        values = _converted(column)
    except (pa.ArrowException, RecursionError, ValueError):
        values = None  # it fails in `to_pylist` too, with the error that describes the value, or Arrow has no kernel
    return list(column.to_pylist()) if values is None else values


def _converted(array: pa.Array) -> list[Any] | None:
    """The values of an array, or None for a type that only `to_pylist` converts."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _listed(array)
    numbers = pa.types.is_boolean(kind) or pa.types.is_integer(kind)
    if numbers or pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return None if array.null_count else _listed(array)  # NumPy has no null among numbers
    if pa.types.is_dictionary(kind):
        return by_columns(array.dictionary_decode())
    if pa.types.is_struct(kind):
        return _dicts(array)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(array)
    return None


def _listed(array: pa.Array) -> list[Any]:
    return list(array.to_numpy(zero_copy_only=False).tolist())


def _dicts(array: pa.StructArray) -> list[Any] | None:
    names = [field.name for field in array.type]
    if not names or len(set(names)) < len(names):
        return None
    rows: list[Any] = [{} for _ in range(len(array))]
    for name, child in zip(names, array.flatten(), strict=True):
        for row, value in zip(rows, by_columns(child), strict=True):  # two to three times as fast as `dict(zip(...))`
            row[name] = value
    return _with_nulls(rows, array)


def _lists(array: pa.ListArray) -> list[Any]:
    values = by_columns(array.flatten())  # without values that a null hides
    ends = np.cumsum(as_numpy(fill_null(pc.list_value_length(array), 0))).tolist()
    starts = [0, *ends[:-1]]
    rows = [values[start:end] for start, end in zip(starts, ends, strict=True)] if ends else []
    return _with_nulls(rows, array)


def _with_nulls(rows: list[Any], array: pa.Array) -> list[Any]:
    if array.null_count:
        for row in np.flatnonzero(as_numpy(array.is_null())).tolist():
            rows[row] = None
    return rows
