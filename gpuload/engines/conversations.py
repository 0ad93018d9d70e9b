"""A column of conversations, flattened; on NumPy or CuPy arrays.

Arrow and cuDF keep conversations as list<struct<role, content, ...>>: fields in any order, strings large or small,
plain or dictionary-encoded, null at any level, sliced anywhere. A prompt and its completion are two such columns, with
fields of their own, and JSON has any keys in any message. Everything after this module sees one layout: the messages of
all rows one after the other, each field a column over them, and which keys each message has.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Array, offsets_of, ranges
from gpuload.core.arrow import as_arrow, as_numpy, fill_null
from gpuload.engines.protocol import TextColumn, TextOperations
from gpuload.sources.types import as_json, is_list, is_messages, is_text
from gpuload.template.program import TEXT, Shape

NULL, TEXTS, EMPTY, OTHER = range(4)
"""What one field of one message holds, as far as shapes are concerned: null, a text, an empty list, anything else."""

Fetch = Callable[[np.ndarray[Any, Any]], pa.Array]
"""(k,) row numbers → those rows as an Arrow array in host memory."""


@dataclass(eq=False)
class Field:
    """One field of all m messages."""

    name: str  # as in the file
    kind: Array  # (m,) int64, `NULL`, `TEXTS`, `EMPTY` or `OTHER`
    texts: TextColumn | None = None  # m texts, for a field of which some value may be one
    # For messages about a value that is something else: "a list", "a struct", "int64" ... Empty for a field of strings
    type_name: str = ""


@dataclass(eq=False)
class Conversations:
    """n conversations with m messages in all; `protocol.Prompts` of an engine that renders by column."""

    ops: TextOperations  # the engine's operations on texts, for the memory that holds all of this
    valid: Array  # (n,) bool, false where a row is null
    first: Array  # (n,) int64, the number of each row's first message
    count: Array  # (n,) int64, how many messages each row has
    present: Array  # (m,) bool, false where a message is null
    fields: list[Field]  # in the struct's order
    fetch: Fetch  # row numbers → those rows as an Arrow array in host memory
    # Where messages have different keys, each distinct list of them, in their order. None: each message has all fields
    keys: Sequence[tuple[str, ...]] | None = None
    # (m,) int64, the number in `keys` of each message's list. A field that is not in it is `NULL`
    keyed: Array | None = None
    # Row → why no prompt can be made of it, where that is known already
    rejected: Mapping[int, str] = field(default_factory=dict)
    # Row → why transformers must render it, where that is known already
    by_reference: Mapping[int, str] = field(default_factory=dict)
    objects: Sequence[Any] | None = None  # n rows as Python objects, if they came as such, from JSON

    def __len__(self) -> int:
        return len(self.first)

    def take(self, rows: Array) -> "Conversations":
        """Some of the rows (k,), over the same messages; their numbers ascend, and are in host memory."""
        numbers = np.asarray(rows)
        with self.ops.current():
            at = self.ops.xp.asarray(numbers)
            valid, first, count = self.valid[at], self.first[at], self.count[at]
        fetch = self.fetch
        return replace(
            self,
            valid=valid,
            first=first,
            count=count,
            fetch=lambda some: fetch(numbers[some]),
            rejected=_of_rows(self.rejected, numbers),
            by_reference=_of_rows(self.by_reference, numbers),
            objects=None if self.objects is None else [self.objects[row] for row in numbers.tolist()],
        )

    def to_arrow(self, rows: Array) -> pa.Array:
        """Some of the rows, copied to the host."""
        return self.fetch(np.asarray(rows))

    def text_field(self, name: str) -> TextColumn:
        """The texts of one field."""
        return next(one.texts for one in self.fields if one.name == name and one.texts is not None)

    def texts(self, row: int, shape: Shape) -> dict[tuple[int, str], str]:
        """The texts of one row by message number and field, copied to the host."""
        first = int(self.first[row])
        numbers: dict[str, list[int]] = {}
        for number, message in enumerate(shape):
            for name, value in message:
                if value == TEXT:
                    numbers.setdefault(name, []).append(number)
        return {
            (number, name): text.decode()
            for name, some in numbers.items()
            for number, text in zip(
                some, self.ops.bytes_at(self.text_field(name), [first + number for number in some]), strict=True
            )
        }


# -- from Arrow and from JSON ----------------------------------------------------------------------------------------


def _of_rows(reasons: Mapping[int, str], rows: Array) -> dict[int, str]:
    """The reasons of some rows, by their places among these."""
    return {at: reasons[row] for at, row in enumerate(rows.tolist()) if row in reasons}


def joined(*parts: pa.Array) -> pa.StructArray:
    """Columns of messages as one column of conversations: in each row the messages of all parts, with the keys that
    they have in their part. A row is null if one of its parts is."""
    return pa.StructArray.from_arrays(list(parts), [str(number) for number in range(len(parts))])


def row_messages(value: Any) -> list[Any]:
    """The messages of a row of a column that `from_arrow` or `from_rows` takes, as a Python object."""
    return list(itertools.chain(*value.values())) if isinstance(value, dict) else list(value)


def from_arrow(ops: TextOperations, prompts: pa.Array) -> Conversations:
    """A column in host memory: zero-copy for the host engine, copied once for a device. Texts of `joined` columns are
    copied once more.

    Args:
        prompts: (n,) list<struct>, large or not, sliced or not; or what `joined` makes of several of them.

    Raises:
        TypeError: `prompts` has another type.
    """
    xp, kind = ops.xp, prompts.type
    columns = [prompts.field(i) for i in range(kind.num_fields)] if pa.types.is_struct(kind) else [prompts]
    if not columns or not all(is_messages(each.type) for each in columns):
        raise TypeError(f"expected a column of conversations, list<struct<role, content>>, not {kind}")
    valid = np.logical_and.reduce([_mask(each) for each in columns])
    bounds = [as_numpy(each.offsets).astype(np.int64) for each in columns]
    parts = [
        each.values.slice(int(ends[0]), int(ends[-1] - ends[0])) for each, ends in zip(columns, bounds, strict=True)
    ]
    if len(parts) == 1:
        order, count, first = None, np.diff(bounds[0]), bounds[0][:-1] - bounds[0][0]
    else:
        before = offsets_of(np.array([len(part) for part in parts], np.int64))
        counts = np.stack([np.where(valid, np.diff(ends), 0) for ends in bounds], axis=1)
        starts = np.stack([ends[:-1] - ends[0] + low for ends, low in zip(bounds, before, strict=False)], axis=1)
        order = ranges(starts.ravel(), counts.ravel(), offsets_of(counts.ravel()))
        count, first = counts.sum(axis=1), offsets_of(counts.sum(axis=1))[:-1]
    present = [_mask(part) for part in parts]
    names = [tuple(one.name for one in part.type) for part in parts]
    keys = list(dict.fromkeys(names))
    keyed = np.repeat([keys.index(each) for each in names], [len(part) for part in parts]).astype(np.int64)
    return Conversations(
        ops,
        xp.asarray(valid),
        xp.asarray(first),
        xp.asarray(count),
        xp.asarray(_ordered(present, order)),
        _fields(ops, parts, present, order),
        lambda rows: _taken(prompts, rows),
        keys if len(keys) > 1 else None,
        xp.asarray(_ordered([keyed], order)) if len(keys) > 1 else None,
    )


def _taken(column: pa.Array, rows: Array) -> pa.Array:
    """Some rows of a column of any type. (Arrow's `take` has no kernels for string views.)"""
    try:
        return column.take(as_arrow(rows, pa.int64()))
    except pa.ArrowNotImplementedError:
        return pa.concat_arrays([column.slice(row, 1) for row in rows.tolist()])


MOST_KEYS = 64
"""Rows with a key that is not among the most frequent ones of a column of JSON are rendered by transformers."""


def from_rows(
    ops: TextOperations, rows: Sequence[Any], rejected: Mapping[int, str], plain: bool = True
) -> Conversations:
    """Conversations as Python objects, from JSON: lists of messages, each of which keeps its keys; anything where a row
    is rejected. `plain`: everything in them is plain data."""
    xp = ops.xp
    messages = [message for number, row in enumerate(rows) if number not in rejected for message in row]
    count = np.array([0 if number in rejected else len(row) for number, row in enumerate(rows)], np.int64)
    lists: dict[tuple[str, ...], int] = {}
    keyed = np.array([lists.setdefault(tuple(message), len(lists)) for message in messages], np.int64)
    frequency = Counter(name for names in lists for name in names)
    names = [name for name, _ in frequency.most_common(MOST_KEYS)]
    rare = np.array([not set(some) <= set(names) for some in lists], bool)
    by_reference = {}
    if rare.any():
        at = np.repeat(np.arange(len(rows)), count)[rare[keyed]]
        by_reference = dict.fromkeys(at.tolist(), f"messages have more than {MOST_KEYS} different keys")
    return Conversations(
        ops,
        xp.asarray(np.ones(len(rows), bool)),
        xp.asarray(offsets_of(count)[:-1]),
        xp.asarray(count),
        xp.asarray(np.ones(len(messages), bool)),
        [_field_of_objects(ops, name, [message.get(name) for message in messages]) for name in names],
        lambda some: as_json([rows[row] for row in some.tolist()]),
        list(lists),
        xp.asarray(keyed),
        rejected,
        by_reference,
        rows if plain else None,
    )


def from_texts(ops: TextOperations, texts: TextColumn, valid: Array, fetch: Fetch) -> Conversations:
    """A column of plain strings: each is a conversation of one user message. What is fetched are strings, too."""
    xp, n = ops.xp, len(texts)
    user = TextColumn(xp.asarray(np.frombuffer(b"user", np.uint8)), xp.zeros(n, np.int64), xp.full(n, 4, np.int64))
    kind = xp.full(n, TEXTS, np.int64)
    return Conversations(
        ops,
        valid,
        xp.arange(n, dtype=np.int64),
        xp.where(valid, 1, 0),
        xp.ones(n, bool),
        [Field("role", kind, user), Field("content", kind, texts)],
        lambda rows: messages_of_users(fetch(rows)),
    )


def _fields(
    ops: TextOperations, parts: Sequence[pa.Array], present: Sequence[Array], order: Array | None
) -> list[Field]:
    """The fields of messages that are in several arrays of structs, where they are `present` (k,). The `order` (m,) is
    of the messages of all arrays; None if there is one array, in order."""
    names = [[one.name for one in part.type] for part in parts]
    if any(len(set(some)) < len(some) for some in names):  # as_py of such a row is an error
        return [Field(name, ops.xp.zeros(0, np.int64)) for some in names for name in some]
    made = []
    for name in dict.fromkeys(itertools.chain(*names)):
        found = [
            _field(part.field(name), there) if name in some else (np.zeros(len(part), np.int64), None, "")
            for part, there, some in zip(parts, present, names, strict=True)
        ]
        kinds, texts, words = zip(*found, strict=True)
        column = None
        if any(each is not None for each in texts):
            columns = [each or _no_texts(len(kind)) for each, kind in zip(texts, kinds, strict=True)]
            low = offsets_of(np.array([len(each.data) for each in columns], np.int64))
            column = TextColumn(
                ops.xp.asarray(_ordered([each.data for each in columns], None)),
                ops.xp.asarray(_ordered([each.start + at for each, at in zip(columns, low, strict=False)], order)),
                ops.xp.asarray(_ordered([each.length for each in columns], order)),
            )
        kind = ops.xp.asarray(_ordered(kinds, order))
        made.append(Field(name, kind, column, next(filter(None, words), "")))
    return made


def _field(values: pa.Array, present: Array) -> tuple[Array, TextColumn | None, str]:
    """What a field of k messages holds, its texts if it has any, and its type in words if it is another one."""
    kind, valid = values.type, _mask(values) & present
    if is_text(kind):
        texts = text_column(values.cast(pa.large_string()))
        column = TextColumn(texts.data, texts.start, np.where(valid, texts.length, 0))
        return np.where(valid, TEXTS, NULL), column, ""
    if pa.types.is_null(kind):
        return np.zeros(len(values), np.int64), None, ""
    kinds = np.where(valid, OTHER, NULL)
    if is_list(kind):
        lengths = as_numpy(fill_null(pc.list_value_length(values), -1))
        kinds[valid & (lengths == 0)] = EMPTY
    return kinds, None, type_name(kind)


def _field_of_objects(ops: TextOperations, name: str, values: Sequence[Any]) -> Field:
    """A field of m messages whose values are Python objects; None where a message has no such key."""
    texts = [value if isinstance(value, str) else None for value in values]
    try:
        column = as_arrow(texts, pa.large_string())
    except UnicodeEncodeError:  # a lone surrogate: transformers decides what becomes of it
        texts = [text if text is not None and _is_unicode(text) else None for text in texts]
        column = as_arrow(texts, pa.large_string())
    kinds = np.full(len(values), TEXTS)
    for at in np.flatnonzero(as_numpy(column.is_null())).tolist():
        kinds[at] = NULL if values[at] is None else EMPTY if values[at] == [] else OTHER
    others = np.flatnonzero(kinds == OTHER)
    view = text_column(column)
    on_device = TextColumn(*(ops.xp.asarray(each) for each in (view.data, view.start, view.length)))
    word = _object_name(values[int(others[0])]) if len(others) else ""
    return Field(name, ops.xp.asarray(kinds), on_device if column.null_count < len(column) else None, word)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _object_name(value: Any) -> str:
    """A JSON value in words, as `type_name`."""
    names: dict[type, str] = {list: "a list", dict: "a struct", str: "a text with a lone surrogate"}
    return names.get(type(value)) or type(value).__name__


def _no_texts(count: int) -> TextColumn:
    return TextColumn(np.zeros(0, np.uint8), np.zeros(count, np.int64), np.zeros(count, np.int64))


def _ordered(arrays: Sequence[Array], order: Array | None) -> Array:
    """Arrays one after the other, in some order."""
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return whole if order is None else whole[order]


def text_column(texts: pa.LargeStringArray) -> TextColumn:
    """A view of an Arrow array in host memory, zero-copy. A null has the length that its offsets say, usually 0."""
    _, offsets, data = texts.buffers()
    bounds = np.zeros(1, np.int64)  # an empty array may have no offsets
    if len(texts):
        bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    used = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    return TextColumn(used, bounds[:-1] - bounds[0], np.diff(bounds))


def messages_of_users(texts: pa.LargeStringArray) -> pa.Array:
    """(n,) large_string → list<struct<role, content>>: each text as one user message, zero-copy; null stays null."""
    role = pa.DictionaryArray.from_arrays(as_arrow(np.zeros(len(texts), np.int8)), as_arrow(["user"], pa.string()))
    messages = pa.StructArray.from_arrays([role, texts], names=["role", "content"])
    offsets = as_arrow(np.arange(len(texts) + 1))
    return pa.LargeListArray.from_arrays(offsets, messages, mask=texts.is_null() if texts.null_count else None)


def type_name(kind: pa.DataType) -> str:
    """A type in words, for a message about a field that holds no text."""
    if is_list(kind):
        return "a list"
    return "a struct" if pa.types.is_struct(kind) else str(kind)


def _mask(array: pa.Array) -> Array:
    """(n,) bool: true where a value is not null."""
    if not array.null_count:
        return np.ones(len(array), bool)
    return as_numpy(array.is_valid())
