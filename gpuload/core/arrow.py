"""Arrow arrays from NumPy's and from Python objects, and back, without pandas.

`pa.array`, `pa.scalar` and `to_numpy` import pandas if it is installed, whatever they are given, and so do Python
values as arguments of compute functions. In a new process that takes longer than all the rest of a small load, and
meanwhile no other thread has the interpreter lock. These functions read and write Arrow's buffers. Only values that
they do not know are converted by pyarrow.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import offsets_of

_MOST = (1 << 31) - 1  # of what 32-bit offsets can count


def as_arrow(values: Any, kind: pa.DataType | None = None) -> Any:
    """`pa.array(values, kind)`, and whatever that raises.

    Args:
        values: (n,) numbers or truth values in a NumPy array, zero-copy where the type stays; or Python objects, None
            for null.
        kind: the type; None for that of a NumPy array.
    """
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        made = _of_numbers(values)
        return made if kind is None or made.type == kind else made.cast(kind)
    try:
        made = None if kind is None else _of_objects(values, kind)
    except Exception:  # pyarrow says what is wrong
        made = None
    return pa.array(values, kind) if made is None else made


def without_rows(schema: pa.Schema) -> pa.Table:
    """A table with these columns and no rows; Arrow's `empty_table` knows no extension types inside of others."""
    return pa.Table.from_batches([], schema=schema)


def as_scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    """`pa.scalar(value, kind)`."""
    return as_arrow([value], kind)[0]


def as_numpy(array: pa.Array | pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """(n,) integers, floats or truth values, none of them null; zero-copy, and then not writable, for numbers in one
    chunk."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if array.null_count:
        raise ValueError("NumPy has no null among numbers")
    kind, low, high = array.type, array.offset, array.offset + len(array)
    data = array.buffers()[1] or b""
    if pa.types.is_boolean(kind):
        return np.unpackbits(np.frombuffer(data, np.uint8), count=high, bitorder="little")[low:].view(np.bool_)
    letter = "f" if pa.types.is_floating(kind) else "i" if pa.types.is_signed_integer(kind) else "u"
    return np.frombuffer(data, f"{letter}{kind.bit_width // 8}")[low:high]


def spanning(buffers: Sequence[pa.Buffer]) -> pa.Buffer:
    """One buffer from the first to the last byte of some, which it keeps. What is between them must not be read."""
    base = min(buffer.address for buffer in buffers)
    return pa.foreign_buffer(base, max(buffer.address + buffer.size for buffer in buffers) - base, list(buffers))


def fill_null(array: Any, value: Any) -> Any:
    """`pc.fill_null(array, value)`; the array itself if no value is null."""
    return array.fill_null(as_scalar(value, array.type)) if array.null_count else array


def _of_numbers(values: np.ndarray[Any, Any]) -> pa.Array:
    if values.dtype.kind == "b":
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, bitmap(values)])
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, data])


def bitmap(mask: np.ndarray[Any, Any]) -> pa.Buffer:
    """A mask as Arrow has it: a bit for each value."""
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


def _of_objects(values: Sequence[Any], kind: pa.DataType) -> pa.Array | None:
    """An array of Python objects; None, or any error, if this function does not know how it is made."""
    count, types = len(values), set(map(type, values))
    mask = None
    if type(None) in types:
        mask = bitmap(np.fromiter((value is not None for value in values), np.bool_, count))
        types.remove(type(None))

    def made(*buffers: pa.Buffer, children: Sequence[pa.Array] = ()) -> pa.Array:
        return pa.Array.from_buffers(kind, count, [mask, *buffers], children=list(children))

    def bounds(parts: Sequence[Any], wide: bool) -> pa.Buffer:
        offsets = offsets_of(np.fromiter(map(len, parts), np.int64, count))
        if not wide and offsets[-1] > _MOST:
            raise OverflowError("too much for one array: pyarrow makes several")
        return pa.py_buffer(offsets if wide else offsets.astype(np.int32))

    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        wide = pa.types.is_large_string(kind)
        if types <= {str} and (whole := "".join(filter(None, values))).isascii():  # as many bytes as characters
            return made(
                bounds([value or "" for value in values] if mask else values, wide), pa.py_buffer(whole.encode())
            )
        texts = [b"" if value is None else str.encode(value) for value in values]
        return made(bounds(texts, wide), pa.py_buffer(b"".join(texts)))
    if pa.types.is_large_binary(kind) and types <= {bytes}:
        texts = [value or b"" for value in values]
        return made(bounds(texts, True), pa.py_buffer(b"".join(texts)))
    if pa.types.is_boolean(kind) and types <= {bool}:
        return made(bitmap(np.fromiter(map(bool, values), np.bool_, count)))
    if (pa.types.is_int64(kind) and types <= {int}) or (pa.types.is_float64(kind) and types <= {float}):
        width = np.int64 if pa.types.is_int64(kind) else np.float64
        return made(pa.py_buffer(np.fromiter((0 if value is None else value for value in values), width, count)))
    if pa.types.is_integer(kind) and types <= {int}:
        return as_arrow(values, pa.int64()).cast(kind)
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and types <= {list}:
        parts = [value or [] for value in values]
        items = as_arrow([item for part in parts for item in part], kind.value_type)
        return made(bounds(parts, pa.types.is_large_list(kind)), children=[items])
    if pa.types.is_struct(kind) and types <= {dict}:
        rows = [value or {} for value in values]
        return made(children=[as_arrow([row.get(field.name) for row in rows], field.type) for field in kind])
    return pa.nulls(count) if pa.types.is_null(kind) and not types else None
