"""Columns of images as Python objects, whose bytes are not copied."""

from typing import Any

import pyarrow as pa

from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, is_list


def values_of(column: pa.Array) -> list[Any]:
    """The values of a column as Python objects: binaries as views of Arrow's memory, which they keep alive."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return values_of(column.dictionary_decode())
    if kind == JSON_TYPE:
        return to_python(column)
    if isinstance(kind, pa.BaseExtensionType):
        return values_of(column.storage)
    if not has_binaries(kind):
        return to_python(column)
    valid = column.is_valid().to_pylist()
    if is_list(kind):
        values, offsets = values_of(column.values), column.offsets.to_pylist()
        return [values[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(column))]
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        rows = zip(*(values_of(field) for field in column.flatten()), strict=True)
        return [dict(zip(names, row, strict=True)) if valid[i] else None for i, row in enumerate(rows)]
    whole = column.cast(pa.large_binary())
    _, offsets, data = whole.buffers()
    at = memoryview(offsets).cast("q")[whole.offset : whole.offset + len(whole) + 1]
    view = memoryview(data if data is not None else b"")
    return [view[at[i] : at[i + 1]] if valid[i] else None for i in range(len(whole))]


def has_binaries(kind: pa.DataType) -> bool:
    """Whether values of a type have bytes."""
    if is_list(kind):
        return has_binaries(kind.value_type)
    if pa.types.is_struct(kind):
        return any(has_binaries(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
