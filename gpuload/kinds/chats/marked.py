"""Whether data says itself which answers have loss: `loss_on` becomes "marked" then."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrow import as_arrow, as_numpy, fill_null
from gpuload.sources.columns import to_python
from gpuload.sources.read import Source, one_column
from gpuload.sources.types import JSON_TYPE, fields_of
from gpuload.template.loss_marks import KEYS, is_likely_mark, marks_of

_ASSISTANTS = {"role": ("assistant",), "from": ("gpt", "assistant", "function_call")}
"""Field with the role of a message → the roles of an assistant."""

_KEY = '"(' + "|".join(KEYS) + r')"\s*:'


def marks_in(source: Source, name: str) -> tuple[str, ...]:
    """The keys that say which answers have loss, in the first part of a column in which an assistant's message has any.

    A column whose type has no such fields is not read.
    """
    kind = source.schema.field(name).type
    if kind != JSON_TYPE and not _fields(kind):
        return ()
    chunks = (chunk for column in one_column(source, name) for chunk in column.chunks)
    return next(filter(None, map(_in_json if kind == JSON_TYPE else _in_structs, chunks)), ())


def _fields(kind: pa.DataType) -> list[str]:
    """The fields of messages that may be marks."""
    names = [key for key in KEYS if key in fields_of(kind)]
    kinds = {key: kind.value_type.field(key).type for key in names}
    tests = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating)
    return [key for key in names if any(test(kinds[key]) for test in tests)]


def _in_structs(column: pa.Array) -> tuple[str, ...]:
    messages = column.flatten()
    ours = np.zeros(len(messages), bool)
    for field, roles in _ASSISTANTS.items():
        if field in fields_of(column.type):
            role = pc.struct_field(messages, field).cast(pa.large_string())
            ours |= as_numpy(fill_null(pc.is_in(role, as_arrow(roles, pa.large_string())), False))
    messages = messages.filter(as_arrow(ours))
    values = {key: pc.unique(pc.struct_field(messages, key)).to_pylist() for key in _fields(column.type)}
    return tuple(key for key, some in values.items() if any(is_likely_mark(key, value) for value in some))


def _in_json(column: pa.Array) -> tuple[str, ...]:
    rows = column.filter(fill_null(pc.match_substring_regex(column.storage, _KEY), False))
    for row in to_python(rows):
        marks = {key: value for message in _answers(row) for key, value in marks_of(message).items()}
        if found := tuple(key for key, value in marks.items() if is_likely_mark(key, value)):
            return found
    return ()


def _answers(row: Any) -> Iterator[Mapping[str, Any]]:
    """The messages of assistants in a row of any form."""
    some: Iterable[Any] = row if isinstance(row, list) else ()
    for message in some:
        if isinstance(message, dict) and any(message.get(field) in roles for field, roles in _ASSISTANTS.items()):
            yield message
