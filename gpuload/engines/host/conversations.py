"""A column of conversations, taken apart: texts per field, rows by shape, and rows that nothing can be made of.

Arrow keeps conversations as list<struct<role, content, ...>>, with the fields in either order, strings large or small,
plain or dictionary-encoded, null at any level, sliced anywhere. Everything behind this module sees one layout: all
messages of all rows flattened, each field a column over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.engines.host.texts import Bools, Buffer, Ints, Strings, strings_of
from gpuload.template.program import EMPTY_LIST, TEXT, Shape

__all__ = ["Group", "Messages"]

# What one field of one message is, as far as its shape goes.
_NULL, _TEXT, _EMPTY, _OTHER = range(4)


@dataclass(eq=False)
class _Field:
    name: str
    kind: npt.NDArray[np.int64]
    strings: Strings | None


@dataclass(frozen=True, eq=False)
class Group:
    """The rows of one shape, ascending."""

    shape: Shape
    rows: Ints


@dataclass(eq=False)
class Messages:
    """Conversations by columns.

    Attributes:
        first, count: the first message of each row, among all messages, and how many it has.
        fields: the columns, in the order of the struct.
        roles: the distinct roles; `role` gives each message's, -1 where it has none.
        rejected: row → why no prompt can be made of it.
        other: row → why it does not fit any shape, and takes the reference.
    """

    first: Ints
    count: Ints
    fields: list[_Field]
    role: Ints
    roles: list[str]
    role_at: int
    rejected: dict[int, str] = field(default_factory=dict)
    other: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, prompts: pa.Array) -> Messages:
        """Take a column apart.

        Args:
            prompts: list<struct>, large or not, sliced or not.

        Raises:
            TypeError: it is a column of something else.
        """
        kind = prompts.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
            raise TypeError(f"a column of conversations is list<struct<role, content>>, not {kind}")
        bounds = prompts.offsets.to_numpy().astype(np.int64)
        structs = prompts.values.slice(int(bounds[0]), int(bounds[-1] - bounds[0]))
        messages = cls(bounds[:-1] - bounds[0], np.diff(bounds), [], np.full(len(structs), -1, np.int64), [], 0)
        row = np.repeat(np.arange(len(prompts)), messages.count)
        there = _mask(structs)
        names = [arrow_field.name for arrow_field in kind.value_type]
        if len(set(names)) < len(names):
            messages.other = dict.fromkeys(range(len(prompts)), "messages have two fields of one name")
            return messages
        for i, arrow_field in enumerate(kind.value_type):
            values = structs.field(i)
            if arrow_field.name == "role" and _is_text(values.type):
                messages.role_at = i
                messages._take_roles(values, there, row)
                messages.fields.append(_Field("role", np.zeros(len(structs), np.int64), None))
            else:
                messages.fields.append(messages._taken(arrow_field.name, values, there, row))
        messages._reject(there, prompts, row)
        return messages

    def _taken(self, name: str, values: pa.Array, there: Bools, row: Ints) -> _Field:
        valid = _mask(values) & there
        if _is_text(values.type):
            strings = strings_of(values.cast(pa.large_string()))
            self._check_utf8(name, strings, valid, row)
            return _Field(name, np.where(valid, _TEXT, _NULL), strings)
        if pa.types.is_null(values.type):
            return _Field(name, np.zeros(len(values), np.int64), None)
        kinds = np.where(valid, _OTHER, _NULL)
        if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            lengths = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
            kinds[valid & (lengths == 0)] = _EMPTY
        for k in np.flatnonzero(kinds == _OTHER):
            self.other.setdefault(int(row[k]), f"message field {name!r} is {_word(values.type)}, not text")
        return _Field(name, kinds, None)

    def _take_roles(self, values: pa.Array, there: Bools, row: Ints) -> None:
        encoded = pc.dictionary_encode(values.cast(pa.large_string()))
        codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        self.role = np.where(there, codes, -1)
        dictionary = strings_of(encoded.dictionary)
        for i in range(len(dictionary)):
            raw = dictionary.bytes(i)
            try:
                self.roles.append(raw.decode())
                if self.roles[-1] in (TEXT, EMPTY_LIST):
                    for k in np.flatnonzero(self.role == i):
                        self.other.setdefault(int(row[k]), "a role that is a mark of the compiler's own")
            except UnicodeDecodeError as error:
                self.roles.append("")
                for k in np.flatnonzero(self.role == i):
                    self._reject_row(
                        int(row[k]), f"role of message {k - self.first[row[k]]} is not valid UTF-8 (byte {error.start})"
                    )

    def _check_utf8(self, name: str, strings: Strings, valid: Bools, row: Ints) -> None:
        if _is_utf8(strings):
            return
        for k in np.flatnonzero(valid):
            try:
                strings.text(int(k))
            except UnicodeDecodeError as error:
                number = k - self.first[row[k]]
                self._reject_row(int(row[k]), f"{name} of message {number} is not valid UTF-8 (byte {error.start})")

    def _reject(self, there: Bools, prompts: pa.Array, row: Ints) -> None:
        for i in np.flatnonzero(self.count == 0):
            self._reject_row(int(i), "prompt is an empty list")
        for k in np.flatnonzero(~there):
            self._reject_row(int(row[k]), f"message {k - self.first[row[k]]} is null")
        by_name = {taken.name: taken for taken in self.fields}
        if "content" in by_name:
            missing = (by_name["content"].kind == _NULL) & there
            if "tool_calls" in by_name:
                missing &= by_name["tool_calls"].kind != _OTHER
            for k in np.flatnonzero(missing):
                self._reject_row(int(row[k]), f"content of message {k - self.first[row[k]]} is null")
        for i in np.flatnonzero(~_mask(prompts)):
            self.rejected[int(i)] = "prompt is null"

    def _reject_row(self, row: int, reason: str) -> None:
        self.rejected.setdefault(row, reason)

    def groups(self) -> Iterator[Group]:
        """All rows that are neither rejected nor `other`, by shape, the largest group first."""
        kept = np.ones(len(self.first), bool)
        kept[list(self.rejected)] = False
        kept[list(self.other)] = False
        rows = np.flatnonzero(kept)
        if not len(rows):
            return
        code, bound = self.role + 1, len(self.roles) + 1
        for taken in self.fields:
            if bound > 1 << 60:  # many fields: number the codes there are anew, before roles are shifted out of 64 bits
                there, code = np.unique(code, return_inverse=True)
                bound = len(there)
            code, bound = code * 4 + taken.kind, bound * 4
        keys = self._hashes(code)[rows]
        _, example, inverse = np.unique(keys, return_index=True, return_inverse=True)
        # Equal hashes are only likely to be equal shapes: compare every message's code with its group's first row.
        starts, counts = self.first[rows], self.count[rows]
        same_length = counts == counts[example][inverse]
        own = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        shift = np.repeat(starts[example][inverse] - starts, counts)
        differs = code[own] != code[np.minimum(own + shift, len(code) - 1)]
        wrong = np.zeros(len(rows), bool)
        if differs.any():
            wrong[np.repeat(np.arange(len(rows)), counts)[differs]] = True
        order = np.argsort(inverse, kind="stable")
        sizes = np.bincount(inverse)
        for group, members in sorted(enumerate(np.split(order, np.cumsum(sizes)[:-1])), key=lambda item: -len(item[1])):
            alike = ~(wrong | ~same_length)[members]
            yield Group(self._shape(int(rows[example[group]])), rows[members[alike]])
            for member in members[~alike]:
                yield Group(self._shape(int(rows[member])), rows[member : member + 1])

    def _hashes(self, code: Ints) -> npt.NDArray[np.uint64]:
        """A number per row: its messages' codes, each times a random number for its place."""
        position = np.arange(len(code)) - np.repeat(self.first, self.count)
        places = np.random.default_rng(0).integers(1, 1 << 63, int(self.count.max(initial=1)), dtype=np.uint64)
        mixed = (code + 1).astype(np.uint64) * places[position]
        sums = np.zeros(len(self.first), np.uint64)
        filled = self.count > 0
        if filled.any():
            sums[filled] = np.add.reduceat(mixed, self.first[filled])
        return sums

    def _shape(self, row: int) -> Shape:
        values = (None, TEXT, EMPTY_LIST)
        shape = []
        for k in range(int(self.first[row]), int(self.first[row] + self.count[row])):
            message: list[tuple[str, str | None]] = []
            for i, taken in enumerate(self.fields):
                if taken.name == "role" and i == self.role_at:
                    message.append(("role", self.roles[self.role[k]] if self.role[k] >= 0 else None))
                else:
                    message.append((taken.name, values[taken.kind[k]]))
            shape.append(tuple(message))
        return tuple(shape)

    def strings(self, name: str) -> Strings:
        """The column of texts of one field."""
        for taken in self.fields:
            if taken.name == name and taken.strings is not None:
                return taken.strings
        return Strings(Buffer(np.empty(0, np.uint8)), np.empty(0, np.int64), np.empty(0, np.int64))

    def texts(self, row: int, shape: Shape) -> dict[tuple[int, str], str]:
        """The texts of one row, by message number and field."""
        first = int(self.first[row])
        return {
            (k, name): self.strings(name).text(first + k)
            for k, message in enumerate(shape)
            for name, value in message
            if value == TEXT
        }


def _mask(array: pa.Array) -> Bools:
    if not array.null_count:
        return np.ones(len(array), bool)
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), bool)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_utf8(strings: Strings) -> bool:
    data = strings.buffer.data
    if not len(data) or data.max() < 0x80:
        return True
    # If all bytes together are valid, and no text begins inside a character, every text is valid.
    starts = strings.start[strings.length > 0]
    if (data[starts] & 0xC0 == 0x80).any():
        return False
    bounds = np.array([0, len(data)], np.int64)
    try:
        pa.LargeStringArray.from_buffers(1, pa.py_buffer(bounds), pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _word(kind: pa.DataType) -> str:
    return (
        "a list"
        if pa.types.is_list(kind) or pa.types.is_large_list(kind)
        else "a struct"
        if pa.types.is_struct(kind)
        else str(kind)
    )
