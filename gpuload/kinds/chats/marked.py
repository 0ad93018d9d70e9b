"""Whether data says itself which answers have loss: `loss_on` becomes "marked" then. And which weights it has."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrow import as_arrow, as_numpy, fill_null
from gpuload.core.errors import DataError
from gpuload.core.marks import MOST_WEIGHTS
from gpuload.sources.columns import to_python
from gpuload.sources.read import Source, one_column
from gpuload.sources.types import JSON_TYPE, fields_of, is_text
from gpuload.template.loss_marks import KEYS, OTHERS, is_likely_mark, marks_of, weight_of

_ASSISTANTS = {"role": ("assistant",), "from": ("gpt", "assistant", "function_call")}
"""Field with the role of a message → the roles of an assistant."""

_KEY = '"(' + "|".join(KEYS) + r')"\s*:'
_WEIGHT = r'"weight"\s*:\s*([2-9]|[01][0-9]|[01]\.0*[1-9]|[01](\.[0-9]*)?[eE])'  # a number that is neither 0 nor 1

_NEVER = (*OTHERS, "human", "observation")
"""Roles, under any of the names of `_ASSISTANTS`, whose messages are never answers."""


def marks_in(source: Source, name: str) -> tuple[str, ...]:
    """The keys that say which answers have loss, in the first part of a column in which an assistant's message has any.

    A column whose type has no such fields is not read.
    """
    kind = source.schema.field(name).type
    if kind != JSON_TYPE and not _fields(kind):
        return ()
    chunks = (chunk for column in one_column(source, name) for chunk in column.chunks)
    return next(filter(None, map(_in_json if kind == JSON_TYPE else _in_structs, chunks)), ())


def weights_in(columns: Sequence[tuple[Source, str]]) -> tuple[float, ...]:
    """The weights of answers other than 0 and 1, as float32, ascending: in the columns with messages of some sources.

    A column whose type has no weights is not read.

    Raises:
        DataError: there are more than tokens can have.
    """
    found: set[float] = set()
    for source, name in columns:
        kind = source.schema.field(name).type
        if kind != JSON_TYPE and "weight" not in _fields(kind):
            continue
        values = _weights_in_json if kind == JSON_TYPE else _weights_in_structs
        for column in one_column(source, name):
            for chunk in column.chunks:
                found |= {weight for value in values(chunk) if (weight := weight_of(value)) not in (None, 1)}
        if len(found) > MOST_WEIGHTS:
            raise DataError(
                f"{source.name}: messages have more than {MOST_WEIGHTS} different weights other than 0 and 1: round "
                "them, or pass loss_on='assistant' to ignore marks"
            )
    return tuple(sorted(found))


def _weights_in_structs(column: pa.Array) -> list[Any]:
    messages = column.flatten()
    other = np.ones(len(messages), bool)
    for field in _ASSISTANTS:
        if field in fields_of(column.type):
            role = pc.struct_field(messages, field).cast(pa.large_string())
            other &= as_numpy(pc.is_in(role, as_arrow(_NEVER, pa.large_string())))
    values: list[Any] = pc.unique(pc.struct_field(messages.filter(as_arrow(~other)), "weight")).to_pylist()
    return values


def _weights_in_json(column: pa.Array) -> Iterator[Any]:
    for row in to_python(column.filter(fill_null(pc.match_substring_regex(column.storage, _WEIGHT), False))):
        for message in row if isinstance(row, list) else ():
            if isinstance(message, dict) and not {message.get(field) for field in _ASSISTANTS} <= {*_NEVER}:
                yield message.get("weight")


def _fields(kind: pa.DataType) -> list[str]:
    """The fields of messages that may be marks."""
    names = [key for key in KEYS if key in fields_of(kind)]
    kinds = {key: kind.value_type.field(key).type for key in names}
    tests = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, is_text)
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
