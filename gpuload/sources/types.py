"""Which Arrow types can hold prompts: strings, and lists of messages."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from gpuload.core.arrow import as_arrow
from gpuload.core.errors import DataError

JSON_TYPE = pa.json_(pa.large_string())
"""Values that Arrow's types would change (see `read.py`), kept as JSON text."""


def as_json(values: Sequence[Any]) -> pa.Array:
    """Python values as a column of JSON text; None is null. A `TypeError` if a value is nothing that JSON has."""
    encoded = as_arrow([None if value is None else json_text(value) for value in values], pa.large_string())
    return pa.ExtensionArray.from_storage(JSON_TYPE, encoded)


def json_type(values: Sequence[Any]) -> pa.DataType | None:
    """The type that pyarrow would infer for values that were JSON, without importing pandas; None if they have no type
    in common, or objects in the same place have not the same keys in the same order, which no type keeps."""
    (*types,) = set(map(type, values)) - {type(None)}
    if not types:
        return pa.null()
    if len(types) > 1:
        return None
    if types[0] is list:
        inner = json_type(list(itertools.chain.from_iterable(filter(None, values))))
        return None if inner is None else pa.list_(inner)
    if types[0] is dict:
        rows = [value for value in values if value is not None]
        names, *others = set(map(tuple, rows))
        if others:
            return None
        fields = {name: json_type([row[name] for row in rows]) for name in names}
        return None if None in fields.values() else pa.struct(list(fields.items()))
    return {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}.get(types[0])


def json_text(value: Any) -> str:
    """A Python value as JSON text."""
    return json.dumps(value, default=_not_json)


def _not_json(value: Any) -> Any:
    raise TypeError(
        f"a value has the type {type(value).__name__}, which JSON has not: remove its field, or make it text"
    )


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are strings, dictionary-encoded or not."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_plain(kind: pa.DataType) -> bool:
    """Whether values of this type are plain data as Python objects: texts, numbers, truth values, lists and structs."""
    if kind == JSON_TYPE or is_text(kind) or pa.types.is_null(kind) or pa.types.is_boolean(kind):
        return True
    if pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return True
    if pa.types.is_struct(kind):
        return all(is_plain(field.type) for field in kind)
    return is_list(kind) and is_plain(kind.value_type)


def readable(schema: pa.Schema) -> pa.Schema:
    """The types as which columns are read: those of `without_views`, and JSON for a column with JSON text anywhere in
    its values, such as the arguments of calls: what `datasets.Json` keeps so are objects for everybody who reads its
    rows."""
    known, made = _last[0]
    if not schema.equals(known, check_metadata=True):
        fields = [field.with_type(JSON_TYPE) if _parser(field.type) else field for field in schema]
        made = without_views(pa.schema(fields, schema.metadata))
        _last[0] = schema, made
    return made


_last = [(pa.schema([]), pa.schema([]))]  # what was asked for last: the tables of a file have one schema


def without_views(schema: pa.Schema) -> pa.Schema:
    """The same columns with plain strings, binaries and lists for views of them, of which Arrow has no kernels that
    take or filter rows; and with plain lists of structs, which messages are, for those of a fixed size."""
    return pa.schema([field.with_type(_without_views(field.type)) for field in schema], schema.metadata)


def as_readable(table: pa.Table, stored: pa.Schema | None = None) -> pa.Table:
    """A table with the types of `readable`; a `pa.ArrowInvalid` if a text is not the JSON that its column says it is.
    `stored` are the types that its columns have in a file of which dictionaries were read; None: they are its own."""
    schema = readable(stored or table.schema)
    for at, (old, new) in enumerate(zip(table.schema, schema, strict=True)):
        if new.type == JSON_TYPE and old.type != JSON_TYPE:
            parse = _parser(old.type)
            assert parse is not None
            try:
                values = [None if value is None else parse(value) for value in table.column(at).to_pylist()]
            except (RecursionError, ValueError) as error:
                raise pa.ArrowInvalid(f"column {old.name!r}: {error}") from error
            table = table.set_column(at, new, as_json(values))
    return table if schema.equals(table.schema) else with_types(table, schema)


def with_types(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table with the types of a schema, which has the same columns. Only columns of other types are cast: of slices
    of nested nulls, Arrow's cast makes invalid arrays, so such columns are copied first; of views of lists, too."""
    made = []
    for column, kind in zip(table.columns, schema.types, strict=True):
        if column.type != kind:
            if "list_view" in str(column.type):  # a copy is no help
                column = pa.chunked_array([as_arrow(column.to_pylist(), kind)])
            else:
                column = (_copied(column) if "null" in str(column.type) else column).cast(kind)
        made.append(column)
    return pa.Table.from_arrays(made, schema=schema)


def _copied(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The same values in arrays that begin with them."""
    table = pa.table({"": column})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all().column(0)


def _parser(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What puts the values of JSON texts into their places in a value; None for a type without such texts."""
    if isinstance(kind, pa.JsonType):
        from gpuload.sources.json_values import parse_json

        return parse_json
    if pa.types.is_struct(kind):
        fields = {field.name: parse for field in kind if (parse := _parser(field.type))}
        return (lambda value: value | _each(fields, value)) if fields else None
    lists = pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType
    inner = _parser(kind.value_type) if isinstance(kind, lists) else None
    return inner and (lambda value: [None if item is None else inner(item) for item in value])


def _each(parsers: Mapping[str, Callable[[Any], Any]], value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if value[name] is None else parse(value[name]) for name, parse in parsers.items()}


def _without_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_views(kind.value_type), kind.ordered)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    of_structs = pa.types.is_fixed_size_list(kind) and pa.types.is_struct(kind.value_type)
    if is_list(kind) or of_structs or isinstance(kind, (pa.ListViewType, pa.LargeListViewType)):
        make = pa.large_list if isinstance(kind, (pa.LargeListType, pa.LargeListViewType)) else pa.list_
        return make(kind.value_field.with_type(_without_views(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)), kind.list_size)
    if pa.types.is_map(kind):
        key, item = (field.with_type(_without_views(field.type)) for field in (kind.key_field, kind.item_field))
        return pa.map_(key, item, kind.keys_sorted)
    return kind


def is_list(kind: pa.DataType) -> bool:
    """Whether values of this type are lists with 32-bit or 64-bit offsets."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_messages(kind: pa.DataType) -> bool:
    """Whether values of this type are conversations: lists of structs."""
    return is_list(kind) and bool(pa.types.is_struct(kind.value_type))


def fields_of(kind: pa.DataType) -> set[str]:
    """The fields that messages of a type have; none if it is no type of messages."""
    return {field.name for field in kind.value_type} if is_messages(kind) else set()


def check_prompt_type(kind: pa.DataType, where: str) -> None:
    """Checks that a column of this type can hold prompts; a `DataError`, which says `where` it is, if it holds
    something else, or messages without a role."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if is_text(kind) or kind == JSON_TYPE or pa.types.is_null(kind):
        return
    lists = (pa.types.is_list_view, pa.types.is_large_list_view, pa.types.is_fixed_size_list)
    if (is_list(kind) or any(test(kind) for test in lists)) and pa.types.is_struct(kind.value_type):
        names = [field.name for field in kind.value_type]
        if "role" not in names:
            raise DataError(f"{where}: messages have the fields {', '.join(names)}; expected role and content")
        return
    raise DataError(f"{where} has type {kind}; expected list<struct<role, content>> or string")
