"""Ragged: rows of different lengths as two flat arrays, on NumPy or CuPy alike.

Row i is `values[offsets[i]:offsets[i + 1]]`: Arrow's list layout. All token ids of a data set are one such pair, so
that lengths, filters and gathers are a few array operations over all rows at once. The array module is taken from the
arrays themselves (`xp`), so the same code runs in host and in device memory.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from gpuload.options import Truncation

Array = Any  # numpy.ndarray or cupy.ndarray: CuPy has no types, and is not there on most machines


def array_module(array: Array) -> ModuleType:
    """NumPy or CuPy, whichever `array` belongs to; CuPy is imported by nobody who has none of its arrays."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy  # type: ignore[no-any-return]


def on_host(array: Array) -> np.ndarray[Any, Any]:
    """The array as NumPy's: itself, or a copy of what lies on a device."""
    return array if isinstance(array, np.ndarray) else array.get()


def offsets_of(lengths: Array) -> Array:
    """(n,) lengths → (n + 1,) int64 offsets, the first one 0."""
    xp = array_module(lengths)
    offsets = xp.zeros(len(lengths) + 1, dtype=np.int64)
    xp.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True)
class Ragged:
    """n rows of different lengths.

    Attributes:
        values: (offsets[-1],) token ids, int32.
        offsets: (n + 1,) int64, ascending, the first one 0.
    """

    values: Array
    offsets: Array

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        """One row, as a view."""
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    @property
    def lengths(self) -> Array:
        """(n,) int64."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.offsets.nbytes)

    def to_host(self) -> "Ragged":
        """The same rows as NumPy arrays: themselves, or a copy of what lies on a device."""
        return Ragged(on_host(self.values), on_host(self.offsets))

    def take(self, rows: Array) -> "Ragged":
        """The given rows in the given order, in one gather.

        Args:
            rows: (m,) integer row numbers.
        """
        xp = array_module(self.values)
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        # Position j of the result lies in row r; it comes from where r starts in `values`, plus j's place in r.
        shift = xp.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return Ragged(self.values[xp.arange(int(offsets[-1]), dtype=np.int64) + shift], offsets)

    def filter(self, keep: Array) -> "Ragged":
        """The rows to be kept, in their order: several times as fast as `take`.

        Args:
            keep: (n,) bool.
        """
        xp = array_module(self.values)
        lengths = self.lengths
        return Ragged(self.values[xp.repeat(keep, lengths)], offsets_of(lengths[keep]))

    def truncate(self, length: int, keep: Truncation) -> "Ragged":
        """Rows of at most `length` ids, cut as verl cuts them.

        Args:
            keep: which part goes: "left" keeps a row's end, "right" its start, "middle" its first length // 2 ids and
                the rest from its end. "error" is the caller's to raise: it knows which file a row is from.
        """
        xp = array_module(self.values)
        lengths = self.lengths
        if not len(lengths) or int(lengths.max()) <= length:
            return self
        head = {"left": 0, "right": length, "middle": length // 2}[keep]
        place = xp.arange(len(self.values), dtype=np.int64) - xp.repeat(self.offsets[:-1], lengths)
        tail = xp.repeat(lengths, lengths) - place  # 1 for a row's last id
        kept = (place < head) | (tail <= length - head)
        return Ragged(self.values[kept], offsets_of(xp.minimum(lengths, length)))

    @staticmethod
    def concatenate(parts: list["Ragged"]) -> "Ragged":
        """The rows of all parts, one after the other.

        Empties the list: each part is freed as soon as it is copied, so that the rows are never in memory twice.
        """
        if not parts:
            return Ragged(np.zeros(0, np.int32), np.zeros(1, np.int64))
        xp = array_module(parts[0].values)
        offsets = offsets_of(xp.concatenate([part.lengths for part in parts]))
        values = xp.empty(int(offsets[-1]), parts[0].values.dtype)
        start = 0
        while parts:
            part = parts.pop(0).values
            values[start : start + len(part)] = part
            start += len(part)
        return Ragged(values, offsets)

    def to_lists(self) -> list[list[int]]:
        """As Python lists of ints."""
        flat, offsets = self.values.tolist(), self.offsets.tolist()
        return [flat[start:end] for start, end in itertools.pairwise(offsets)]

    @staticmethod
    def from_lists(rows: Sequence[Sequence[int]]) -> "Ragged":
        """From Python lists of ids."""
        offsets = offsets_of(np.fromiter((len(row) for row in rows), np.int64, len(rows)))
        values = np.fromiter((token for row in rows for token in row), np.int32, int(offsets[-1]))
        return Ragged(values, offsets)
