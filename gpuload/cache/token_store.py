"""Ids on disk: entries of the token cache, mapped into memory and used in place.

A file of ids is two arrays over the same bytes: as int64 it has the offsets of every part, as int32 the ids. A row is
found by its number in the file alone, so that nothing has to be in memory for each row except for its length and its
number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gpuload.cache.entry import Entry, read_entry
from gpuload.cache.faults import damaged, missing
from gpuload.core.arrays import Ragged, RowNumbers, chunks_of, from_chunks, offsets_of, ranges

_CHUNK = 1 << 22  # ids that are copied at a time


class TokenFile:
    """The ids of one file, in place.

    Args:
        entry: where they are.

    Attributes:
        values: the whole file as int32.

    Raises:
        ValueError: the file has another layout than Arrow's.
    """

    def __init__(self, entry: Entry):
        self._entry = entry
        memory, whole = entry.memory, entry.memory.size
        self.values = np.frombuffer(memory, np.int32, whole // 4)
        self._offsets = np.frombuffer(memory, np.int64, whole // 8)
        self._first = offsets_of(np.array([len(part) for part in entry.parts], np.int64))
        # Where the ids and the offsets of each part begin in these arrays.
        self._ids_at = self._places([part.ids.values for part in entry.parts])
        self._offsets_at = self._places([part.ids.offsets for part in entry.parts])
        self._intact = np.zeros(len(entry.parts), bool)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __reduce__(self) -> tuple[Any, ...]:  # another process maps the file itself
        return _mapped_again, (self._entry.path, self._entry.key, len(self))

    def _places(self, arrays: Sequence[np.ndarray[Any, Any]]) -> RowNumbers:
        starts = [array.ctypes.data - self._entry.memory.address if array.size else 0 for array in arrays]
        width = arrays[0].itemsize if arrays else 1
        if any(start % width for start in starts):
            raise ValueError("the arrays of the file are not aligned")
        return np.array(starts, np.int64) // width

    def places(self, rows: RowNumbers, lengths: RowNumbers) -> RowNumbers:
        """Where the ids of some rows begin, in `values`. A part is compared with its checksum when first used.

        Args:
            rows: (m,) row numbers.
            lengths: (m,) how many ids they have, as far as the caller knows.

        Raises:
            StoreError: the ids have been damaged, or this is not the file that the caller knows.
        """
        part = np.searchsorted(self._first, rows, side="right") - 1
        for number in np.unique(part[~self._intact[part]]).tolist():
            if not self._entry.is_intact(number):
                raise damaged(self._entry.path)
            self._intact[number] = True
        offsets_at = self._offsets_at[part] + rows - self._first[part]
        starts = self._offsets[offsets_at]
        if not np.array_equal(self._offsets[offsets_at + 1] - starts, lengths):
            raise missing(self._entry.path)
        places: RowNumbers = self._ids_at[part] + starts
        return places


@dataclass(frozen=True, eq=False)
class DiskTokens:
    """n rows of ids in mapped files; a `protocol.TokenStore`.

    Attributes:
        files: the mapped files.
        stored: (n,) int64, the number of each row, counted over the rows of all files.
        lengths: (n,) int64.
        owner: of files that are not in the cache.
    """

    files: Sequence[TokenFile]
    stored: RowNumbers
    lengths: RowNumbers
    owner: Any = None

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def _first(self) -> RowNumbers:
        """(files + 1,) the number of the first row of each file."""
        first: RowNumbers = offsets_of(np.array([len(file) for file in self.files], np.int64))
        return first

    def take(self, rows: RowNumbers) -> Ragged:
        """Some rows, copied.

        Args:
            rows: (m,) row numbers.

        Raises:
            StoreError: the ids have been damaged.
        """
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

    def chunks(self) -> Iterator[np.ndarray[Any, Any]]:
        """The ids of all rows in order, in arrays of bounded size."""
        return chunks_of(self.take, self.lengths, _CHUNK)

    def to_host(self) -> Ragged:
        """All rows in memory: a copy, made each time."""
        return from_chunks(self.chunks(), self.lengths)


def _mapped_again(path: Path, key: str, rows: int) -> TokenFile:
    entry = read_entry(path, key, rows, check_ids=False)
    if entry is None:
        raise missing(path)
    return TokenFile(entry)
