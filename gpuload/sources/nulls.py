"""Nulls in nested values.

All structs of an Arrow column have all fields, so a field that one row has is null in all others, and a template that
prints a whole struct prints these nulls.
"""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrow import as_arrow
from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, as_json, json_text


def without_nulls(value: Any) -> Any:
    """The same value without keys that are null, at any depth, as TRL's `remove_none_values` makes it. Nulls in lists
    stay."""
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return value


def column_without_nulls(column: pa.Array) -> pa.Array:
    """(n,) values → the same without keys that are null: unchanged if there are none, otherwise as JSON; a `TypeError`
    if a value is nothing that JSON has."""
    if column.type == JSON_TYPE:
        return changed_json(column, "null", without_nulls)
    return as_json([without_nulls(each) for each in to_python(column)]) if has_null_fields(column) else column


def changed_json(column: pa.Array, pattern: str, change: Callable[[Any], Any]) -> pa.Array:
    """(n,) JSON → the same, with another value for each row whose text has a pattern."""
    found = [bool(each) for each in pc.match_substring_regex(column.storage, pattern).to_pylist()]
    if not any(found):
        return column
    from gpuload.sources.json_values import parse_json

    texts = zip(column.storage.to_pylist(), found, strict=True)
    made = [json_text(change(parse_json(text))) if changes else text for text, changes in texts]
    return pa.ExtensionArray.from_storage(column.type, as_arrow(made, column.type.storage_type))


def has_null_fields(column: pa.Array) -> bool:
    """Whether a field of a struct is null, at any depth, in a column of an Arrow type."""
    kind = column.type
    if pa.types.is_struct(kind):
        return any(child.null_count or has_null_fields(child) for child in column.flatten())
    return bool(pa.types.is_nested(kind)) and hasattr(column, "flatten") and has_null_fields(column.flatten())
