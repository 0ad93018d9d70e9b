"""A column of conversations, flattened, and its rows grouped by shape; on NumPy or CuPy arrays.

Arrow and cuDF keep conversations as list<struct<role, content, ...>>: fields in any order, strings large or small,
plain or dictionary-encoded, null at any level, sliced anywhere. Everything after this module sees one layout: the
messages of all rows one after the other, and each field a column over them.

A compiled template has one tree per *shape*, a conversation's roles and which fields its messages have. Rows are
grouped by a hash of their shape, and only one example row of each group, and the few invalid rows, are looked at in
Python. The work per text (UTF-8 validation, hashes) is the engine's, see `protocol.TextOperations`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.arrays import Array, on_host
from gpuload.engines.protocol import TextColumn, TextOperations
from gpuload.sources.types import is_list, is_messages, is_text
from gpuload.template.program import EMPTY_LIST, TEXT, Shape

NULL, TEXTS, EMPTY, OTHER = range(4)
"""What one field of one message holds, as far as shapes are concerned: null, a text, an empty list, anything else."""

_KIND_BITS = 2  # one of those four takes two bits of a message's code
_MOST_CODES = 1 << 60  # beyond this, another field could overflow a 64-bit code

Fetch = Callable[[np.ndarray[Any, Any]], pa.Array]
"""(k,) row numbers → those rows as an Arrow array in host memory."""


@dataclass(eq=False)
class Field:
    """One field of all m messages.

    Attributes:
        name: as in the file.
        kind: (m,) int64, `NULL`, `TEXTS`, `EMPTY` or `OTHER`.
        texts: m texts, for a field of strings.
        type_name: for messages about a field that holds something else: "a list", "a struct", "int64" ...
    """

    name: str
    kind: Array
    texts: TextColumn | None = None
    type_name: str = ""


@dataclass(eq=False)
class Conversations:
    """n conversations with m messages in all; `protocol.Prompts` of an engine that renders by column.

    Attributes:
        ops: the engine's operations on texts, for the memory that holds all of this.
        valid: (n,) bool, false where a row is null.
        first: (n,) int64, the number of each row's first message.
        count: (n,) int64, how many messages each row has.
        present: (m,) bool, false where a message is null.
        fields: in the struct's order.
        fetch: row numbers → those rows as an Arrow array in host memory.
    """

    ops: TextOperations
    valid: Array
    first: Array
    count: Array
    present: Array
    fields: list[Field]
    fetch: Fetch

    def __len__(self) -> int:
        return len(self.first)

    def take(self, rows: Array) -> "Conversations":
        """Some of the rows, over the same messages.

        Args:
            rows: (k,) ascending row numbers, in host memory.
        """
        numbers = np.asarray(rows)
        with self.ops.current():
            at = self.ops.xp.asarray(numbers)
            valid, first, count = self.valid[at], self.first[at], self.count[at]
        fetch = self.fetch
        return Conversations(
            self.ops, valid, first, count, self.present, self.fields, lambda some: fetch(numbers[some])
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


# -- rows by shape ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Grouped:
    """The rows of a column, by what is to be done with them.

    Attributes:
        groups: (shape, ascending row numbers), the largest group first.
        rejected: row → why no prompt can be made of it.
        by_reference: row → why it fits no shape and must be rendered by transformers.
    """

    groups: list[tuple[Shape, Array]] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    by_reference: dict[int, str] = field(default_factory=dict)


Reason = Callable[[int, int], str | None]
"""Message number among all messages, and in its row → the reason to record for its row, or None."""


def group(column: Conversations) -> Grouped:
    """Groups the rows of a column by shape."""
    ops, found = column.ops, Grouped()
    names = [one.name for one in column.fields]
    if len(set(names)) < len(names):
        found.by_reference = dict.fromkeys(range(len(column)), "messages have two fields with the same name")
        return found
    role = next((one for one in column.fields if one.name == "role" and one.texts is not None), None)
    codes, roles = _roles(column, role, found)
    for one in column.fields:
        if one is role:
            continue
        if one.texts is None:
            _record(column, one.kind == OTHER, found.by_reference, _not_text(one))
        else:
            _record(column, ops.not_utf8(one.texts) & (one.kind == TEXTS), found.rejected, _not_utf8(column, one))
    _reject_incomplete(column, found)
    _group(column, role, codes, roles, found)
    return found


def _roles(column: Conversations, role: Field | None, found: Grouped) -> tuple[Array, list[str]]:
    """(m,) each message's role as a number from 1, 0 for none; and the distinct roles."""
    ops, xp = column.ops, column.ops.xp
    if role is None or role.texts is None or not len(role.kind):
        return xp.zeros(len(column.present), np.int64), []
    example, number, stray = ops.distinct(role.texts)
    present = role.kind == TEXTS
    names: list[str] = []
    for i, raw in enumerate(ops.bytes_at(role.texts, on_host(example).tolist())):
        here = present & (number == i)
        try:
            names.append(raw.decode())
        except UnicodeDecodeError:
            names.append("")
            _record(column, here, found.rejected, _not_utf8(column, role))
        if names[-1] in (TEXT, EMPTY_LIST):
            _record(column, here, found.by_reference, lambda *_: "a role equals one of the compiler's internal markers")
    _record(column, present & stray, found.by_reference, lambda *_: "the hashes of two roles collide")
    return xp.where(present, number + 1, 0), names


def _not_text(one: Field) -> Reason:
    return lambda message, number: f"message field {one.name!r} is {one.type_name}, not text"


def _not_utf8(column: Conversations, one: Field) -> Reason:
    def reason(message: int, number: int) -> str | None:
        assert one.texts is not None
        try:
            column.ops.bytes_at(one.texts, [message])[0].decode()
        except UnicodeDecodeError as error:
            return f"{one.name} of message {number} is not valid UTF-8 (byte {error.start})"
        return None

    return reason


def _reject_incomplete(column: Conversations, found: Grouped) -> None:
    """Rejects rows that are null or empty, and rows with a message that is null or has no content."""
    xp = column.ops.xp
    for row in on_host(xp.flatnonzero(column.count == 0)).tolist():
        found.rejected.setdefault(row, "prompt is an empty list")
    _record(column, ~column.present, found.rejected, lambda message, number: f"message {number} is null")
    by_name = {one.name: one for one in column.fields}
    if "content" in by_name:
        missing = (by_name["content"].kind == NULL) & column.present
        if "tool_calls" in by_name:  # an assistant's message may hold calls and no content
            missing &= by_name["tool_calls"].kind != OTHER
        _record(column, missing, found.rejected, lambda message, number: f"content of message {number} is null")
    for row in on_host(xp.flatnonzero(~column.valid)).tolist():
        found.rejected[row] = "prompt is null"


def _record(column: Conversations, messages: Array, into: dict[int, str], reason: Reason) -> None:
    """Records a reason for every row with one of the given messages, unless it has one already.

    Args:
        messages: (m,) bool; the first such message of a row gives the reason.
    """
    xp = column.ops.xp
    found = xp.flatnonzero(messages)
    if not len(found):
        return
    # The row of a message is the last one that begins at or before it. After `take`, not every message is in a row.
    rows = xp.searchsorted(column.first, found, side="right") - 1
    numbers = found - column.first[rows]
    inside = (rows >= 0) & (numbers < column.count[rows])
    for message, row, number in zip(*(on_host(a[inside]).tolist() for a in (found, rows, numbers)), strict=True):
        if row not in into and (why := reason(message, number)) is not None:
            into[row] = why


def _group(column: Conversations, role: Field | None, codes: Array, roles: list[str], found: Grouped) -> None:
    ops, xp = column.ops, column.ops.xp
    kept = xp.ones(len(column), bool)
    if out := sorted({*found.rejected, *found.by_reference}):
        kept[xp.asarray(np.array(out, np.int64))] = False
    rows = xp.flatnonzero(kept)
    if not len(rows):
        return
    # A message's code is its role's number, followed by two bits for the kind of each other field.
    code, bound = codes, len(roles) + 1
    for one in column.fields:
        if one is not role:
            if bound > _MOST_CODES:  # many fields: renumber the codes that occur, to stay within 64 bits
                values, code = xp.unique(code, return_inverse=True)
                bound = len(values)
            code, bound = (code << _KIND_BITS) + one.kind, bound << _KIND_BITS
    code = code.astype(np.int64, copy=False)
    first, count = column.first[rows], column.count[rows]
    hashes = ops.shape_hashes(first, count, code)
    _, example, number = xp.unique(hashes, return_index=True, return_inverse=True)
    example, number = example.astype(np.int64, copy=False), number.astype(np.int64, copy=False)
    # Equal hashes are only likely to be equal shapes: every row is compared with its group's example.
    same = ops.same_shapes(first, count, code, example[number])
    for row in on_host(rows[~same]).tolist():
        found.by_reference[row] = "the hashes of two conversation shapes collide"
    order = xp.argsort(number, kind="stable")  # stable: the rows of a group stay in ascending order
    order = order[same[order]]
    sizes = on_host(xp.bincount(number[same], minlength=len(example)))
    examples, bounds = on_host(rows[example]), np.concatenate([[0], np.cumsum(sizes)])
    for i in np.argsort(-sizes, kind="stable").tolist():
        if sizes[i]:
            members = rows[order[bounds[i] : bounds[i + 1]]]
            found.groups.append((_shape(column, role, codes, roles, int(examples[i])), members))


def _shape(column: Conversations, role: Field | None, codes: Array, roles: list[str], row: int) -> Shape:
    low = int(column.first[row])
    high = low + int(column.count[row])
    values = (None, TEXT, EMPTY_LIST)
    by_field: list[list[tuple[str, str | None]]] = []
    for one in column.fields:
        if one is role:
            numbers = on_host(codes[low:high]).tolist()
            by_field.append([("role", roles[number - 1] if number else None) for number in numbers])
        else:
            by_field.append([(one.name, values[kind]) for kind in on_host(one.kind[low:high]).tolist()])
    return tuple(zip(*by_field, strict=True))


# -- from Arrow ------------------------------------------------------------------------------------------------------


def from_arrow(ops: TextOperations, prompts: pa.Array) -> Conversations:
    """A column in host memory: zero-copy for the host engine, copied once for a device.

    Args:
        prompts: (n,) list<struct>, large or not, sliced or not.

    Raises:
        TypeError: `prompts` has another type.
    """
    xp, kind = ops.xp, prompts.type
    if not is_messages(kind):
        raise TypeError(f"expected a column of conversations, list<struct<role, content>>, not {kind}")
    bounds = prompts.offsets.to_numpy().astype(np.int64)
    structs = prompts.values.slice(int(bounds[0]), int(bounds[-1] - bounds[0]))
    present = _mask(structs)
    fields = [_field(ops, one.name, structs.field(i), present) for i, one in enumerate(kind.value_type)]
    return Conversations(
        ops,
        xp.asarray(_mask(prompts)),
        xp.asarray(bounds[:-1] - bounds[0]),
        xp.asarray(np.diff(bounds)),
        xp.asarray(present),
        fields,
        lambda rows: prompts.take(pa.array(rows, pa.int64())),
    )


def from_texts(ops: TextOperations, texts: TextColumn, valid: Array, fetch: Fetch) -> Conversations:
    """A column of plain strings: each is a conversation of one user message.

    Args:
        texts: n texts.
        valid: (n,) bool, false where a row is null.
        fetch: row numbers → those rows as an Arrow array of strings in host memory.
    """
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


def _field(ops: TextOperations, name: str, values: pa.Array, present: Array) -> Field:
    xp, kind = ops.xp, values.type
    valid = _mask(values) & present
    if is_text(kind):
        texts = text_column(values.cast(pa.large_string()))
        length = xp.asarray(np.where(valid, texts.length, 0))
        column = TextColumn(xp.asarray(texts.data), xp.asarray(texts.start), length)
        return Field(name, xp.asarray(np.where(valid, TEXTS, NULL)), column)
    if pa.types.is_null(kind):
        return Field(name, xp.zeros(len(values), np.int64))
    kinds = np.where(valid, OTHER, NULL)
    if is_list(kind):
        lengths = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
        kinds[valid & (lengths == 0)] = EMPTY
    return Field(name, xp.asarray(kinds), None, type_name(kind))


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
    role = pa.DictionaryArray.from_arrays(np.zeros(len(texts), np.int8), ["user"])
    messages = pa.StructArray.from_arrays([role, texts], names=["role", "content"])
    offsets = pa.array(np.arange(len(texts) + 1), pa.int64())
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
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), bool)
