"""Ids on disk: entries of the token cache, mapped into memory and used in place.

A row is found by its number in the file alone, so that nothing has to be in memory for each row except for its length
and its number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gpuload.cache.entry import Entry
from gpuload.core.arrays import Ragged, RowNumbers, RowsInParts, offsets_of, ranges


@dataclass(frozen=True, eq=False)
class DiskTokens(RowsInParts):
    """n rows of ids in mapped files; a `protocol.TokenStore`."""

    files: Sequence[Entry]  # the mapped files
    stored: RowNumbers  # (n,) int64, the number of each row, counted over the rows of all files
    lengths: RowNumbers  # (n,) int64
    owner: Any = None  # of files that are not in the cache

    @cached_property
    def _first(self) -> RowNumbers:
        """(files + 1,) the number of the first row of each file."""
        first: RowNumbers = offsets_of(np.array([file.num_rows for file in self.files], np.int64))
        return first

    def take(self, rows: RowNumbers) -> Ragged:
        """Some rows (m,), copied; a `StoreError` if the ids have been damaged."""
        stored, lengths = self.stored[rows], self.lengths[rows]
        offsets = offsets_of(lengths)
        file_of = np.searchsorted(self._first, stored, side="right") - 1
        values = np.empty(int(offsets[-1]), np.int32)
        for number in np.unique(file_of).tolist():
            file, slots = self.files[number], np.flatnonzero(file_of == number)
            counts = lengths[slots]
            within = offsets_of(counts)
            source = ranges(file.places(stored[slots] - self._first[number], counts), counts, within)
            if len(slots) == len(rows):
                np.take(file.values, source, out=values)
            else:
                values[ranges(offsets[slots], counts, within)] = file.values[source]
        return Ragged(values, offsets)
