"""The turns of conversations as text, between the stages of the engine for rows as served."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged
from gpuload.engines.host.render import HostText
from gpuload.kinds.served.column_rows import ColumnTurns
from gpuload.kinds.served.sampled import GivenAnswer
from gpuload.kinds.served.turns import Turn
from gpuload.reference.template_call import TemplateCall


@dataclass(eq=False)
class TextTurns:
    """The turns of a conversation as text."""

    turns: dict[int, Turn | int]  # number of a message → its turn, or why it is not learned
    wanted: dict[int, float]  # as for `ServedReference.rows_of_turns`
    messages: Sequence[Any]  # likewise
    call: TemplateCall  # likewise
    # The texts of its rows, and the message with which each ends
    rows: list[tuple[str, int]] = field(default_factory=list)
    # Of each learned turn, its row and what has loss in it, in characters of the answer
    answers: list[tuple[Turn, int, list[tuple[int, int]]]] = field(default_factory=list)
    sampled: Any = None  # the row, if it has ids of its own (`sampled.py`); then there are no rows and answers here
    given: list[GivenAnswer] | None = None  # its answers then, if they can be made many at once


@dataclass(kw_only=True, eq=False)
class ServedText(HostText):
    """n conversations; a `protocol.RenderedText`."""

    # Row → its turns; rejected rows have none, nor those in `columns`
    conversations: dict[int, TextTurns] = field(default_factory=dict)
    columns: ColumnTurns | None = None  # conversations that were made by columns
    given: pa.Array | None = None  # (n,) the conversations

    @property
    def sampled_sizes(self) -> np.ndarray[Any, Any]:
        """Of each conversation the tokenizer makes one answer, which is in one of its rows (`stored.holds`)."""
        rows = np.ones(len(self), np.int64)
        if self.columns is not None:
            rows[self.columns.numbers] = np.diff(self.columns.row_offsets)
        for number, turns in self.conversations.items():
            rows[number] = len(turns.rows)
        return np.where(self.sizes < 0, -1, self.sizes // np.maximum(rows, 1))


def joined_rows(rows: Sequence[np.ndarray[Any, Any]]) -> Ragged:
    """Arrays of ids as rows."""
    values = np.concatenate([np.zeros(0, np.int32), *rows])
    return Ragged(values, np.cumsum([0, *map(len, rows)], dtype=np.int64))


def byte_count(text: str) -> int:
    """The bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def maximal(texts: Sequence[str]) -> list[int]:
    """The texts that no other one begins with, of equal ones the first: their numbers, ascending."""
    order = sorted(range(len(texts)), key=lambda k: (texts[k], -k))
    # Among texts in order, those that begin with one follow it directly.
    found = [k for k, after in itertools.pairwise(order) if not texts[after].startswith(texts[k])]
    return sorted(found + order[-1:])
