"""The shapes of rows, for verification: a fast path may be wrong for few rows only because they look otherwise.

The *shape* of a row is the sequence of its messages' forms. The *form* of a message is its role and which fields it
has: text, an empty list, or anything else. Both are found in what was read, before anything is made of it, and by
column: as numbers that are equal for equal shapes, in all batches and all processes of a load.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import on_host
from gpuload.core.arrow import as_numpy
from gpuload.core.memory import garbage_collection_paused
from gpuload.engines.conversations import EMPTY, NULL, OTHER, TEXTS, Conversations, from_arrow
from gpuload.engines.host.texts import HostTexts, Ints
from gpuload.engines.protocol import ArrowPrompts, Prompts
from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, is_messages


class Shapes(NamedTuple):
    """The shapes of the first n rows of a batch.

    Attributes:
        shapes: (n,) int64, a number for each row's shape.
        forms: (k,) int64, a number for each form of a message that is in them.
        rows: (k,) int64, the first row with this form.
    """

    shapes: Ints
    forms: Ints
    rows: Ints


_JSON_ROWS = 256  # that are parsed between two looks at the time


def shapes_of(prompts: Prompts, is_over: Callable[[], bool] = lambda: False) -> Shapes:
    """The shapes of all rows. On a device, numbers of rows and of forms come to the host, and no text but roles.

    Args:
        is_over: whether the time for this is over. Then JSON, which is parsed row by row, is not looked at any further,
            and the last rows have no shapes.
    """
    if isinstance(prompts, Conversations):
        with prompts.ops.current():
            return _of_conversations(prompts)
    assert isinstance(prompts, ArrowPrompts)
    if prompts.column.type == JSON_TYPE:
        return _of_json(prompts.column, is_over)
    return _of_column(prompts.column)


@garbage_collection_paused()
def _of_json(column: pa.Array, is_over: Callable[[], bool]) -> Shapes:
    found = [_of_values([])]
    for low in range(0, len(column), _JSON_ROWS):
        if is_over():
            break
        try:
            values = to_python(column.slice(low, _JSON_ROWS))
        except ValueError:  # a row is no JSON, and rejected: the others from here on have no shapes
            break
        part = _of_values(values)
        found.append(part._replace(rows=part.rows + low))
    shapes, forms, rows = (np.concatenate([part[k] for part in found]) for k in range(3))
    return Shapes(shapes, *_first(forms, rows))


def _of_column(column: pa.Array) -> Shapes:
    kind = column.type
    if kind == JSON_TYPE:
        return _of_values(to_python(column))
    if pa.types.is_dictionary(kind) and not pa.types.is_nested(kind.value_type):
        return _plain(column)
    if pa.types.is_dictionary(kind):
        return _of_column(column.dictionary_decode())
    if is_messages(kind) and "role" in [field.name for field in kind.value_type]:
        return _of_conversations(from_arrow(HostTexts(), column))
    if pa.types.is_struct(kind):
        parts = [(field.name, _of_column(child)) for field, child in zip(kind, column.flatten(), strict=True)]
        shapes = sum((part.shapes * _number(name) for name, part in parts), np.zeros(len(column), np.int64))
        forms, rows = (np.concatenate([part[k] for _, part in parts]) for k in (1, 2))
        return Shapes(shapes, *_first(forms, rows))
    return _plain(column)


def _plain(column: pa.Array) -> Shapes:
    """A column whose values have one form: text, numbers, lists of other things than messages."""
    nothing = np.zeros(0, np.int64)
    return Shapes(as_numpy(column.is_valid()).astype(np.int64), nothing, nothing)


def _of_conversations(column: Conversations) -> Shapes:
    ops, xp = column.ops, column.ops.xp
    code = xp.where(column.present, 1, 0)
    for one in column.fields:
        if one.name == "role" and one.texts is not None and len(one.kind):
            example, role, _ = ops.distinct(one.texts)
            names = ops.bytes_at(one.texts, on_host(example).tolist())
            numbers = xp.asarray(np.array([_number(name) for name in names], np.int64))
            code = code + xp.where(one.kind == TEXTS, numbers[role], 0)
        else:
            code = code + one.kind * _number(one.name)  # a field that is null is as good as absent
    code = code.astype(np.int64, copy=False)
    shapes = on_host(xp.where(column.valid, ops.shape_hashes(column.first, column.count, code), 0))
    forms, message = xp.unique(code, return_index=True)
    # The row of a message is the last one that begins at or before it; after `take`, not every message is in a row.
    rows = xp.searchsorted(column.first, message, side="right") - 1
    inside = (rows >= 0) & (message < column.first[rows] + column.count[rows])
    return Shapes(shapes, on_host(forms[inside]).astype(np.int64), on_host(rows[inside]).astype(np.int64))


def _of_values(values: list[Any]) -> Shapes:
    """The same for rows as Python objects."""
    shapes, forms = np.zeros(len(values), np.int64), dict[int, int]()
    for row, value in enumerate(values):
        numbers = tuple(_forms(value))
        shapes[row] = hash(numbers)
        for number in numbers:
            forms.setdefault(number, row)
    return Shapes(shapes, *(np.array(list(each), np.int64) for each in (forms, forms.values())))


def _forms(value: Any, name: str = "") -> Iterator[int]:
    """A number for the form of each message of one row, or of a part of it, with the part's name."""
    if isinstance(value, list):
        for message in value:
            if not isinstance(message, dict):
                yield _number(repr((name, _kind(message))))
                continue
            # What the form is made of is looked up before the form: nearly all messages have one of few.
            kinds = [None if each == [] else type(each) for each in message.values()]
            key = (name, role if isinstance(role := message.get("role"), str) else _kind(role), *message, *kinds)
            if (number := _numbers.get(key)) is None:
                present = [(field, _kind(each)) for field, each in sorted(message.items()) if field != "role"]
                form = name, key[1], *(each for each in present if each[1] != NULL)
                if len(_numbers) >= _MOST_NUMBERS:
                    _numbers.clear()
                number = _numbers[key] = _number(repr(form))
            yield number
    elif isinstance(value, dict):
        for key, of in value.items():
            yield from _forms(of, key)
    else:
        yield _number(repr((name, _kind(value))))


_numbers: dict[tuple[Any, ...], int] = {}
_MOST_NUMBERS = 1 << 12


def _kind(value: Any) -> int:
    if value is None:
        return NULL
    return TEXTS if isinstance(value, str) else EMPTY if value == [] else OTHER


def _first(forms: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Each form once, with the first of its rows."""
    order = np.argsort(rows, kind="stable")
    found, at = np.unique(forms[order], return_index=True)
    return found, rows[order][at]


@lru_cache(1024)
def _number(name: str | bytes) -> int:
    """A number for the name of a role or of a field: odd, so that no two values of a field have the same product."""
    raw = name if isinstance(name, bytes) else name.encode(errors="backslashreplace")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big", signed=True) | 1
