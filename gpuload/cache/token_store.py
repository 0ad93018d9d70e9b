"""Ids on disk: entries of the token cache, mapped into memory and used in place.

A row is found by its number in the file alone, so that nothing has to be in memory for each row except for its length
and its number.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gpuload.cache.entry import Entry
from gpuload.core.arrays import Ragged, RowNumbers, RowsInParts, offsets_of


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
        file_of = np.searchsorted(self._first, stored, side="right") - 1
        by_file = np.argsort(file_of, kind="stable")
        bounds = np.searchsorted(file_of[by_file], np.arange(len(self.files) + 1)).tolist()
        first = np.empty(len(rows), np.int64)
        for number, (low, high) in enumerate(itertools.pairwise(bounds)):
            if low < high:
                slots = by_file[low:high]
                first[slots] = self.files[number].places(stored[slots] - self._first[number], lengths[slots])
        # Rows that are one after the other in a file are read as one range, and each range is one copy.
        last = first + lengths
        begins = np.append(True, (first[1:] != last[:-1]) | (file_of[1:] != file_of[:-1]))[: len(rows)]
        ends = np.append(begins[1:], True)[: len(rows)]
        found = zip(file_of[begins].tolist(), first[begins].tolist(), last[ends].tolist(), strict=True)
        values = [self.files[number].values[begin:end] for number, begin, end in found]
        return Ragged(np.concatenate([np.zeros(0, np.int32), *values]), offsets_of(lengths))
