"""Rows that begin with the same text: this is encoded once.

A row has some bytes in common with the row before it, up to a special token in front of which texts may be cut
(`kinds/prefixes.py`). What is behind them is cut once more where the next row leaves it:

    row 0   [A         ][B    ]          A, B, C, D and E are encoded, and row 2 is A C E
    row 1    A          [C  ][D    ]
    row 2    A           C   [E      ]
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, RowNumbers, offsets_of, ranges
from gpuload.engines.host.spans import TokenSpans
from gpuload.engines.host.texts import gather


@dataclass(frozen=True, eq=False)
class RowPieces:
    """r texts in pieces: piece 2k is what text k and the next one begin with, without what both have of earlier ones,
    and piece 2k + 1 is the rest of text k."""

    text: pa.LargeStringArray  # (p,) large_string, the pieces that are not empty
    number: RowNumbers  # (p,) which pieces they are
    shared: RowNumbers  # (r,) bytes of earlier pieces
    rest: RowNumbers  # (r,) where the rest begins, in bytes of the text
    first: RowNumbers  # (r,) the text whose piece each text begins with

    @classmethod
    def of(cls, text: pa.LargeStringArray, shared: RowNumbers) -> "RowPieces":
        """Those of some texts (r,), without nulls, each of which has `shared` (r,) bytes in common with the one before,
        and where both may be cut."""
        count = len(text)
        bounds = np.frombuffer(text.buffers()[1], np.int64)[text.offset :][: count + 1]
        shared = np.where(np.append(0, shared[1:]) < np.append(0, shared[:-1]), 0, shared)  # less than that one itself
        rest = np.maximum(shared, np.append(shared[1:], 0)[:count])
        first = np.maximum.accumulate(np.where(shared == 0, np.arange(count), 0))
        begin = np.stack([shared, rest], axis=1).ravel() + np.repeat(bounds[:-1], 2)
        end = np.stack([bounds[:-1] + rest, bounds[1:]], axis=1).ravel()
        number = np.flatnonzero(begin < end)
        if shared.any():
            data = np.frombuffer(text.buffers()[2] or b"", np.uint8)
            offsets, made = gather(data, begin[number], end[number], np.arange(len(number)))
            text = pa.LargeStringArray.from_buffers(len(number), pa.py_buffer(offsets), pa.py_buffer(made))
        else:  # no text is empty
            number = 2 * np.arange(count) + 1
        return cls(text, number, shared, rest, first)

    def _lengths(self, ids: Ragged) -> RowNumbers:
        """(2r,) tokens of all pieces, also of those that are empty."""
        lengths = np.zeros(2 * len(self.shared), np.int64)
        lengths[self.number] = ids.lengths
        return lengths

    def joined(self, ids: Ragged) -> Ragged:
        """(r,) the ids of the texts, from those of the (p,) pieces."""
        if not self.shared.any():
            return ids
        count = np.arange(len(self.shared)) - self.first + 2
        offsets = offsets_of(count)
        used = 2 * ranges(self.first, count, offsets)
        used[offsets[1:] - 1] -= 1  # the rest of the text itself
        lengths = self._lengths(ids)
        ends = ids.values.itemsize * offsets_of(lengths)
        _, values = gather(ids.values.view(np.uint8), ends[:-1], ends[1:], used)
        return Ragged(values.view(ids.values.dtype), offsets_of(lengths[used])[offsets])

    def beginning(self, spans: TokenSpans, ids: Ragged, rows: RowNumbers, at: RowNumbers) -> RowNumbers:
        """As `TokenSpans.beginning`, for (k,) texts and bytes in them; `ids` are those of the pieces."""
        of = rows
        while (earlier := at < self.shared[of]).any():
            of = of - earlier
        lengths = self._lengths(ids)
        behind = at >= self.rest[of]
        before = offsets_of(lengths[::2])
        number = before[of] - before[self.first[of]] + np.where(behind, lengths[2 * of], 0)
        at = at - np.where(behind, self.rest[of], self.shared[of])
        found = spans.beginning(self.text, ids, np.searchsorted(self.number, 2 * of + behind), at)
        return np.where(found < 0, -1, found + number)
