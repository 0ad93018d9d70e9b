"""The turns of conversations, each of which a trainer renders as a conversation of its own."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import offsets_of, ranges

Flags = np.ndarray[Any, np.dtype[np.bool_]]


class MessageTurns:
    """The t turns of n conversations, lists of struct<role, ...>: their messages, unless those of a role are joined."""

    def __init__(self, column: pa.Array, joined: str | None = None):
        self.messages = column.flatten()  # (m,) structs, of all conversations
        # (n,) number of messages of each row; 0 for a null.
        self.counts = np.asarray(pc.fill_null(pc.list_value_length(column), 0), np.int64)
        row = np.repeat(np.arange(len(self.counts)), self.counts)
        self._role = self.messages.field("role").cast(pa.large_string())
        first, starts = np.diff(row, prepend=-1) > 0, np.ones(len(row), bool)
        if joined is not None:
            same = _is_equal(self._role, joined)
            starts[1:] = first[1:] | ~(same[1:] & same[:-1])
        self.start = np.flatnonzero(starts)  # (t,) number of the first message
        self.size = np.diff(np.append(self.start, len(row)))  # (t,) number of messages
        self.row, self.opening = row[self.start], first[self.start]  # (t,) row, and whether it is the row's first turn
        self._role = self._role.take(pa.array(self.start))

    def is_role(self, name: str) -> Flags:
        """(t,) whether the first message has a role."""
        return _is_equal(self._role, name)

    def alone(self) -> pa.LargeListArray:
        """(t,) conversations of one turn."""
        offsets = np.append(self.start, len(self.messages))
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), self.messages)

    def with_message(self, message: dict[str, Any], after: Flags) -> pa.LargeListArray:
        """(t,) conversations of one turn and a further message, which comes `after` (t,) the turn or before it."""
        lengths = self.size + 1
        offsets = offsets_of(lengths)
        # The numbers of the turn's messages and of one more, which is then replaced by that of the further message.
        numbers = ranges(self.start - ~after, lengths, offsets)
        numbers[np.where(after, offsets[1:] - 1, offsets[:-1])] = len(self.messages)
        values = pa.concat_arrays([self.messages, pa.array([message], self.messages.type)]).take(pa.array(numbers))
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)


def _is_equal(role: pa.Array, name: str) -> Flags:
    return np.asarray(pc.fill_null(pc.equal(role, name), False), bool)
