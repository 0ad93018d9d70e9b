"""The rows of a column of conversations, grouped by shape.

A compiled template has one tree per *shape*, a conversation's roles and which fields its messages have. Rows are
grouped by a hash of their shape, and only one example row of each group, and the few invalid rows, are looked at in
Python. The work per text (UTF-8 validation, hashes) is the engine's, see `protocol.TextOperations`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from gpuload.core.arrays import Array, on_host
from gpuload.engines.conversations import NULL, OTHER, TEXTS, Conversations, Field
from gpuload.template.program import EMPTY_LIST, TEXT, Shape

_KIND_BITS = 2  # what a field holds takes two bits of a message's code
_MOST_CODES = 1 << 60  # beyond this, another field could overflow a 64-bit code


@dataclass(eq=False)
class Grouped:
    """The rows of a column, by what is to be done with them."""

    # What returns the shape, and ascending row numbers; the largest group first
    groups: list[tuple[Callable[[], Shape], Array]] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)  # row → why no prompt can be made of it
    # Row → why it fits no shape and must be rendered by transformers
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
        if one.texts is None or one.type_name:
            _record(column, one.kind == OTHER, found.by_reference, _not_text(one))
        if one.texts is not None and one is not role:
            _record(column, ops.not_utf8(one.texts) & (one.kind == TEXTS), found.rejected, _not_utf8(column, one))
    _reject_incomplete(column, found)
    found.rejected.update(column.rejected)
    found.by_reference.update(column.by_reference)
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
        if (calls := by_name.get("tool_calls")) is not None:  # an assistant's message may hold calls and no content
            missing &= calls.kind != OTHER
            if calls.texts is not None:
                missing &= calls.texts.length == 0
        _record(column, missing, found.rejected, lambda message, number: f"content of message {number} is null")
    for row in on_host(xp.flatnonzero(~column.valid)).tolist():
        found.rejected[row] = "prompt is null"


def _record(column: Conversations, messages: Array, into: dict[int, str], reason: Reason) -> None:
    """Records a reason for every row with one of the given messages (m,), of which the first one gives the reason,
    unless it has one already."""
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
    # A message's code is its role's number, followed by the number of its keys and two bits for the kind of each other
    # field.
    code, bound = codes, len(roles) + 1
    if column.keys is not None:
        code, bound = code * len(column.keys) + column.keyed, bound * len(column.keys)
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
            found.groups.append((partial(_shape, column, role, codes, roles, int(examples[i])), members))


def _shape(column: Conversations, role: Field | None, codes: Array, roles: list[str], row: int) -> Shape:
    low = int(column.first[row])
    high = low + int(column.count[row])
    values = (None, TEXT, EMPTY_LIST)
    by_field: dict[str, list[str | None]] = {}
    for one in column.fields:
        if one is role:
            numbers = on_host(codes[low:high]).tolist()
            by_field["role"] = [roles[number - 1] if number else None for number in numbers]
        else:
            by_field[one.name] = [values[kind] for kind in on_host(one.kind[low:high]).tolist()]
    if column.keys is None or column.keyed is None:
        keys = [tuple(by_field)] * (high - low)
    else:
        keys = [column.keys[number] for number in on_host(column.keyed[low:high]).tolist()]
    return tuple(tuple((name, by_field[name][at]) for name in names) for at, names in enumerate(keys))
