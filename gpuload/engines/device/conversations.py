"""A column of conversations on a device, and its rows by shape.

The counterpart of `template/messages.py` over `xp` arrays and kernels: the same layout (all messages of all rows
flattened, each field a column over them), the same rules for what is rejected and what takes the reference. A shape is a
hash per row, computed where the row lies; only one example row of each shape comes to the host, and the few rows that
are out of order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.arrays import Array, on_host
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.texts import TextColumn, distinct, not_utf8, texts_at
from gpuload.engines.host.prompts import one_user_message
from gpuload.template.program import EMPTY_LIST, TEXT, Shape

NULL, TEXTS, EMPTY, OTHER = range(4)
"""What one field of one message is, as far as its shape goes."""

_MOST_CODES = 1 << 60


@dataclass(eq=False)
class Field:
    """One field of all messages.

    Attributes:
        name: as in the file.
        kind: (m,) int64, `NULL`, `TEXTS`, `EMPTY` or `OTHER`.
        texts: the m texts, where it is a field of texts.
        word: what it holds, for messages about `OTHER`.
    """

    name: str
    kind: Array
    texts: TextColumn | None = None
    word: str = ""


@dataclass(eq=False)
class Conversations:
    """n conversations of m messages together.

    Attributes:
        kernels: for the device where all of it lies.
        valid: (n,) bool, false for a row that is null.
        first, count: (n,) int64, each row's first message and how many it has.
        there: (m,) bool, false for a message that is null.
        fields: in the order of the struct.
        fetch: gives rows, by their numbers, as an Arrow array on the host: for the reference.
    """

    kernels: Kernels
    valid: Array
    first: Array
    count: Array
    there: Array
    fields: list[Field]
    fetch: Callable[[list[int]], pa.Array]

    def __len__(self) -> int:
        return len(self.first)

    def take(self, rows: Array) -> "Conversations":
        """Some of the rows: the messages stay where they are.

        Args:
            rows: (k,) ascending row numbers, on the host.
        """
        numbers = np.asarray(rows)
        with self.kernels.current():
            at = self.kernels.xp.asarray(numbers)
            return Conversations(
                self.kernels, self.valid[at], self.first[at], self.count[at], self.there, self.fields,
                lambda some: self.fetch(numbers[some].tolist()),
            )  # fmt: skip

    def text_field(self, name: str) -> TextColumn:
        """The texts of one field."""
        return next(one.texts for one in self.fields if one.name == name and one.texts is not None)

    def texts(self, kernels: Kernels, row: int, shape: Shape) -> dict[tuple[int, str], str]:
        """The texts of one row, by message number and field, copied to the host."""
        first = int(self.first[row])
        wanted: dict[str, list[int]] = {}
        for k, message in enumerate(shape):
            for name, value in message:
                if value == TEXT:
                    wanted.setdefault(name, []).append(k)
        return {
            (k, name): text.decode()
            for name, numbers in wanted.items()
            for k, text in zip(
                numbers, texts_at(kernels, self.text_field(name), [first + k for k in numbers]), strict=True
            )
        }


@dataclass(eq=False)
class Sorted:
    """Rows by what is to become of them.

    Attributes:
        groups: (shape, ascending row numbers), the largest group first.
        rejected: row → why no prompt can be made of it.
        other: row → why it fits no shape, and takes the reference.
    """

    groups: list[tuple[Shape, Array]] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    other: dict[int, str] = field(default_factory=dict)


def sort(kernels: Kernels, column: Conversations) -> Sorted:
    """Groups rows by their shape."""
    found = Sorted()
    names = [one.name for one in column.fields]
    if len(set(names)) < len(names):
        found.other = dict.fromkeys(range(len(column)), "messages have two fields of one name")
        return found
    role = next((one for one in column.fields if one.name == "role" and one.texts is not None), None)
    codes, roles = _roles(kernels, column, role, found)
    for one in column.fields:
        if one is role or one.texts is None:
            _note(kernels, column, one.kind == OTHER, found.other, lambda k, number, one=one: _not_text(one))  # type: ignore[misc]
        elif one.texts is not None:
            bad = not_utf8(kernels, one.texts) & (one.kind == TEXTS)
            _note(kernels, column, bad, found.rejected, lambda k, number, one=one: _bad_utf8(kernels, one, k, number))  # type: ignore[misc]
    _reject(kernels, column, found)
    _group(kernels, column, role, codes, roles, found)
    return found


def _not_text(one: Field) -> str:
    return f"message field {one.name!r} is {one.word}, not text"


def _roles(kernels: Kernels, column: Conversations, role: Field | None, found: Sorted) -> tuple[Array, list[str]]:
    """(m,) the number of each message's role from 1, 0 for none; and the roles."""
    xp = kernels.xp
    if role is None or role.texts is None or not len(role.kind):
        return xp.zeros(len(column.there), np.int64), []
    example, group, strays = distinct(kernels, role.texts)
    present = role.kind == TEXTS
    names: list[str] = []
    for number, raw in enumerate(texts_at(kernels, role.texts, on_host(example).tolist())):
        try:
            names.append(raw.decode())
        except UnicodeDecodeError:
            names.append("")
            bad = present & (group == number)
            _note(kernels, column, bad, found.rejected, lambda k, number: _bad_utf8(kernels, role, k, number))
        if names[-1] in (TEXT, EMPTY_LIST):
            _note(
                kernels,
                column,
                present & (group == number),
                found.other,
                lambda k, number: "a role that is a mark of the compiler's own",
            )
    _note(kernels, column, present & strays, found.other, lambda k, number: "a role whose hash another role has")
    return xp.where(present, group + 1, 0), names


def _bad_utf8(kernels: Kernels, one: Field, message: int, number: int) -> str | None:
    assert one.texts is not None
    try:
        texts_at(kernels, one.texts, [message])[0].decode()
    except UnicodeDecodeError as error:
        return f"{one.name} of message {number} is not valid UTF-8 (byte {error.start})"
    return None


def _reject(kernels: Kernels, column: Conversations, found: Sorted) -> None:
    xp = kernels.xp
    for row in on_host(xp.flatnonzero(column.count == 0)).tolist():
        found.rejected.setdefault(row, "prompt is an empty list")
    _note(kernels, column, ~column.there, found.rejected, lambda k, number: f"message {number} is null")
    by_name = {one.name: one for one in column.fields}
    if "content" in by_name:
        missing = (by_name["content"].kind == NULL) & column.there
        if "tool_calls" in by_name:
            missing &= by_name["tool_calls"].kind != OTHER
        _note(kernels, column, missing, found.rejected, lambda k, number: f"content of message {number} is null")
    for row in on_host(xp.flatnonzero(~column.valid)).tolist():
        found.rejected[row] = "prompt is null"


def _note(
    kernels: Kernels,
    column: Conversations,
    messages: Array,
    into: dict[int, str],
    reason: Callable[[int, int], str | None],
) -> None:
    """Notes the rows of the given messages (a mask), each with the reason that its first one gives.

    Args:
        reason: from the message's number among all, and in its row.
    """
    xp = kernels.xp
    found = xp.flatnonzero(messages)
    if not len(found):
        return
    rows = xp.searchsorted(column.first, found, side="right") - 1  # the last row that begins at or before a message
    numbers = found - column.first[rows]
    inside = (rows >= 0) & (numbers < column.count[rows])  # after `take`, not every message is in a row
    for k, row, number in zip(*(on_host(array[inside]).tolist() for array in (found, rows, numbers)), strict=True):
        if row not in into and (why := reason(k, number)) is not None:
            into[row] = why


def _group(
    kernels: Kernels, column: Conversations, role: Field | None, codes: Array, roles: list[str], found: Sorted
) -> None:
    xp = kernels.xp
    kept = xp.ones(len(column), bool)
    out = sorted({*found.rejected, *found.other})
    if out:
        kept[xp.asarray(np.array(out, np.int64))] = False
    rows = xp.flatnonzero(kept)
    if not len(rows):
        return
    code, bound = codes, len(roles) + 1
    for one in column.fields:
        if one is not role:
            if bound > _MOST_CODES:  # many fields: the numbers must not grow out of 64 bits
                values, code = xp.unique(code, return_inverse=True)
                bound = len(values)
            code, bound = code * 4 + one.kind, bound * 4
    code = code.astype(np.int64, copy=False)
    first, count = column.first[rows], column.count[rows]
    hash_, same = xp.empty(len(rows), np.int64), xp.empty(len(rows), bool)
    kernels.run("hash_shapes", kernels.threads(len(rows)), len(rows), first, count, code, hash_)
    _, example, group = xp.unique(hash_, return_index=True, return_inverse=True)
    example, group = example.astype(np.int64, copy=False), group.astype(np.int64, copy=False)
    kernels.run("same_shapes", kernels.threads(len(rows)), len(rows), first, count, code, example[group], same)
    for row in on_host(rows[~same]).tolist():
        found.other[row] = "a shape whose hash another shape has"
    order = xp.argsort(group, kind="stable")
    order = order[same[order]]
    sizes = on_host(xp.bincount(group[same], minlength=len(example)))
    examples, bounds = on_host(rows[example]), np.concatenate([[0], np.cumsum(sizes)])
    for number in np.argsort(-sizes, kind="stable").tolist():
        if sizes[number]:
            members = rows[order[bounds[number] : bounds[number + 1]]]
            found.groups.append((_shape(column, role, codes, roles, int(examples[number])), members))


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


def of_arrow(kernels: Kernels, prompts: pa.Array) -> Conversations:
    """A column in host memory, copied to the device once (not at all where that is the host).

    Args:
        prompts: list<struct>, large or not, sliced or not.

    Raises:
        TypeError: `prompts` is a column of something else.
    """
    xp, kind = kernels.xp, prompts.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        raise TypeError(f"a column of conversations is list<struct<role, content>>, not {kind}")
    bounds = prompts.offsets.to_numpy().astype(np.int64)
    structs = prompts.values.slice(int(bounds[0]), int(bounds[-1] - bounds[0]))
    there = _mask(structs)
    names = [one.name for one in kind.value_type]
    fields = [_field(kernels, name, structs.field(i), there) for i, name in enumerate(names)]
    return Conversations(
        kernels,
        xp.asarray(_mask(prompts)),
        xp.asarray(bounds[:-1] - bounds[0]),
        xp.asarray(np.diff(bounds)),
        xp.asarray(there),
        fields,
        lambda rows: prompts.take(pa.array(rows, pa.int64())),
    )


def of_texts(
    kernels: Kernels, texts: TextColumn, valid: Array, fetch: Callable[[list[int]], pa.Array]
) -> Conversations:
    """A column of plain strings: each is what one user says.

    Args:
        texts: n of them.
        valid: (n,) bool, false for a row that is null.
        fetch: gives rows as texts.
    """
    xp, n = kernels.xp, len(texts)
    user = TextColumn(xp.asarray(np.frombuffer(b"user", np.uint8)), xp.zeros(n, np.int64), xp.full(n, 4, np.int64))
    kind = xp.full(n, TEXTS, np.int64)
    return Conversations(
        kernels,
        valid,
        xp.arange(n, dtype=np.int64),
        xp.where(valid, 1, 0),
        xp.ones(n, bool),
        [Field("role", kind, user), Field("content", kind, texts)],
        lambda rows: one_user_message(fetch(rows)),
    )


def _field(kernels: Kernels, name: str, values: pa.Array, there: Array) -> Field:
    xp, kind = kernels.xp, values.type
    valid = _mask(values) & there
    if is_text(kind):
        texts = values.cast(pa.large_string())
        _, offsets, data = texts.buffers()
        bounds = np.zeros(1, np.int64)  # an empty array may have no offsets
        if len(texts):
            bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        used = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
        length = np.where(valid, np.diff(bounds), 0)
        column = TextColumn(xp.asarray(used), xp.asarray(bounds[:-1] - bounds[0]), xp.asarray(length))
        return Field(name, xp.asarray(np.where(valid, TEXTS, NULL)), column)
    if pa.types.is_null(kind):
        return Field(name, xp.zeros(len(values), np.int64))
    kinds = np.where(valid, OTHER, NULL)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
        kinds[valid & (lengths == 0)] = EMPTY
    return Field(name, xp.asarray(kinds), None, word_for(kind))


def word_for(kind: pa.DataType) -> str:
    """A type in words, for a field that holds no texts."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return "a list"
    return "a struct" if pa.types.is_struct(kind) else str(kind)


def _mask(array: pa.Array) -> Array:
    if not array.null_count:
        return np.ones(len(array), bool)
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), bool)


def is_text(kind: pa.DataType) -> bool:
    """Whether this is a type of texts, dictionary-encoded or not."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
