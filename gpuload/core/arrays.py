"""`Ragged`: rows of different lengths as two flat arrays, NumPy's or CuPy's.

Row i is `values[offsets[i]:offsets[i + 1]]`, Arrow's list layout. All token ids of a dataset are one such pair, so that
lengths, filters and gathers are a few array operations over all rows at once. The array module (`xp`) is taken from the
arrays themselves, so the same code runs in host and in device memory.
"""

import itertools
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gpuload.core.options import Truncation

Array = Any  # numpy.ndarray or cupy.ndarray: CuPy has no type stubs, and most machines do not have it
RowNumbers = np.ndarray[Any, np.dtype[np.int64]]


def array_module(array: Array) -> ModuleType:
    """NumPy or CuPy, whichever `array` belongs to. CuPy has been imported if there is an array of its own."""
    return np if isinstance(array, np.ndarray) else sys.modules[type(array).__module__]


def on_host(array: Array) -> np.ndarray[Any, Any]:
    """The array itself if it is NumPy's, else a copy of it in host memory."""
    return array if isinstance(array, np.ndarray) else array.get()


def row_number(given: Any, count: int) -> int:
    """The number of one of `count` rows, as a user gives it: counted from the start instead of from the end.

    Raises:
        TypeError: it is no integer.
        IndexError: there is no such row.
    """
    try:
        if isinstance(given, bool) or getattr(given, "ndim", 0) > 0:  # a tensor with one element has an index, too
            raise TypeError
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{given!r:.80} is not the number of a row: pass an integer") from None
    if not -count <= number < count:
        raise IndexError(f"index {number} is out of range for a dataset with {count} rows")
    return number + count if number < 0 else number


def row_numbers(given: Any, count: int) -> RowNumbers:
    """The numbers of some of `count` rows, as a user gives them: (m,) int64, counted from the start.

    They are a sequence, an array or a tensor of integers; or a slice. Negative ones count from the end.

    Raises:
        TypeError: they are something else, such as a mask, or numbers that are not whole.
        IndexError: there is no such row.
    """
    if isinstance(given, slice):
        return np.arange(*given.indices(count))
    numbers = np.atleast_1d(np.asarray(given))
    if numbers.ndim == 1 and not len(numbers):
        return np.zeros(0, np.int64)
    if numbers.ndim > 1 or numbers.dtype.kind not in "iu":
        remedy = ", of a mask np.flatnonzero(mask)" if numbers.dtype.kind == "b" else ""
        raise TypeError(f"{given!r:.80} are not the numbers of rows: pass a sequence of integers{remedy}")
    outside = numbers[(numbers < -count) | (numbers >= count)]
    if len(outside):
        raise IndexError(f"index {outside[0]} is out of range for a dataset with {count} rows")
    numbers = numbers.astype(np.int64, copy=False)
    return np.where(numbers < 0, numbers + count, numbers)


def mask_of(rows: Iterable[int], count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """(count,) bool: which of so many rows are these."""
    mask = np.zeros(count, np.bool_)
    mask[rows if isinstance(rows, np.ndarray) else list(rows)] = True
    return mask


def offsets_of(lengths: Array) -> Array:
    """(n,) lengths → (n + 1,) int64 offsets, beginning with 0."""
    xp = array_module(lengths)
    offsets = xp.zeros(len(lengths) + 1, dtype=np.int64)
    xp.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges(first: Array, lengths: Array, offsets: Array) -> Array:
    """The numbers of n ranges, one range after the other: (offsets[-1],) int64.

    They begin with `first` and have `lengths`, (n,) int64 each; `offsets` is `offsets_of(lengths)`, which most callers
    need themselves.
    """
    xp = array_module(lengths)
    # Number j of the result is in its range i at j - offsets[i]: it is j plus a shift that is the same for the range.
    return xp.arange(int(offsets[-1]), dtype=np.int64) + xp.repeat(first - offsets[:-1], lengths)


def count_in_rows(mask: Array, offsets: Array) -> Array:
    """(n,) int64: how many values of each row a mask marks; the rows begin at `offsets`, (n + 1,)."""
    (before,) = marked_before(mask, offsets)
    return before[1:] - before[:-1]


def marked_before(mask: Array, *places: Array) -> list[Array]:
    """How many values a mask marks before some places, 0 to its length: int64 arrays like those of the places."""
    if not isinstance(mask, np.ndarray):
        counted = offsets_of(mask)
        return [counted[each] for each in places]
    # The masks of rows are runs of many equal values. Only where they begin and end is added up, because an array of
    # sums over all values takes several times as long: most of it to get the memory.
    starts = np.append(0, np.flatnonzero(mask[1:] != mask[:-1]) + 1)
    marked = (np.arange(len(starts)) % 2 == 0) == bool(mask[:1].any())  # runs are marked in turn
    before = offsets_of(np.diff(starts, append=len(mask)) * marked)
    runs = [np.searchsorted(starts, each, side="right") - 1 for each in places]
    return [before[run] + marked[run] * (each - starts[run]) for each, run in zip(places, runs, strict=True)]


def stretches(*lengths: Array) -> Array:
    """A mask (sum of all lengths,) bool of n rows, each of which consists of k stretches: every second one is marked.

    The lengths are k arrays (n,) int64: of the first stretches, of the second ones, and so on.

    Examples:
        >>> stretches(np.array([1, 0]), np.array([2, 1])).tolist()
        [False, True, True, True]
    """
    xp = array_module(lengths[0])
    number = xp.arange(len(lengths) * len(lengths[0]))
    return xp.repeat(number % len(lengths) % 2 == 1, xp.stack(lengths, axis=1).ravel())


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences begin with in common."""
    differing = (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


@dataclass(frozen=True)
class Ragged:
    """n rows of different lengths.

    Attributes:
        values: (offsets[-1],) token ids, int32.
        offsets: (n + 1,) int64, ascending, beginning with 0.

    Examples:
        >>> rows = Ragged.from_lists([[1, 2, 3], [], [4]])
        >>> rows.lengths.tolist(), rows.take([2, 0]).to_lists()
        ([3, 0, 1], [[4], [1, 2, 3]])
    """

    values: Array
    offsets: Array

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        """One row, as a view; a negative number counts from the end."""
        row = row_number(row, len(self))
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    @property
    def lengths(self) -> Array:
        """(n,) int64."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def positions(self) -> Array:
        """(offsets[-1],) int64: the place of each id in its row."""
        xp = array_module(self.values)
        return xp.arange(len(self.values), dtype=np.int64) - xp.repeat(self.offsets[:-1], self.lengths)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.offsets.nbytes)

    def to_host(self) -> "Ragged":
        """The same rows in host memory; a copy only if they are on a device."""
        return Ragged(on_host(self.values), on_host(self.offsets))

    def chunks(self) -> Iterator[Array]:
        """The ids of all rows in order: one array."""
        yield self.values

    def take(self, rows: Array) -> "Ragged":
        """The rows with the given numbers (m,), in the given order: one gather."""
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        return Ragged(self.values[ranges(self.offsets[rows], lengths, offsets)], offsets)

    def filter(self, keep: Array) -> "Ragged":
        """Some of the rows in their order, those of a mask (n,); several times as fast as `take`."""
        xp = array_module(self.values)
        lengths = self.lengths
        return Ragged(self.values[xp.repeat(keep, lengths)], offsets_of(lengths[keep]))

    def truncate(self, length: int, side: Truncation) -> "Ragged":
        """Truncates rows to at most `length` ids, as verl does.

        "left" keeps the end of a row, "right" its start, "middle" its first length // 2 ids and the rest from its end.
        "error" is for the caller to raise, who knows the row's file.
        """
        xp = array_module(self.values)
        lengths = self.lengths
        if not len(lengths) or int(lengths.max()) <= length:
            return self
        kept = xp.minimum(lengths, length)
        head = xp.minimum(kept, {"left": 0, "right": length, "middle": length // 2}[side])
        dropped = stretches(head, lengths - kept, kept - head)
        return Ragged(self.values[~dropped], offsets_of(kept))

    @staticmethod
    def concatenate(parts: list["Ragged"]) -> "Ragged":
        """The rows of all parts, in order. Empties the list: each part is freed as soon as it is copied."""
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
        """Converts the rows to Python lists of ints."""
        flat, offsets = _shared_integers(self.values).tolist(), self.offsets.tolist()
        return [flat[start:end] for start, end in itertools.pairwise(offsets)]

    @staticmethod
    def from_lists(rows: Sequence[Sequence[int]]) -> "Ragged":
        """Makes rows from Python lists of ids."""
        offsets = offsets_of(np.fromiter(map(len, rows), np.int64, len(rows)))
        values = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(offsets[-1]))
        return Ragged(values, offsets)


def _shared_integers(ids: Array) -> Array:
    """Many ids as Python integers, of which there is one for each id, not one for each token: lists of them take half
    the time, and a quarter of the memory. Few ids, or values that are none, as they are."""
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or len(ids) < _MANY:
        return ids
    if int(ids.min()) < 0 or (most := int(ids.max())) >= _MOST_IDS:
        return ids
    known = _integers[0]
    if most >= len(known):  # another thread may put another one there at any time
        known = _integers[0] = np.arange(most + 1).astype(object)
    return known[ids]


_MANY, _MOST_IDS = 10_000, 1 << 21
_integers = [np.zeros(0, object)]  # the integers from 0 on


class RowsInParts:
    """n rows of ids that are not in host memory, or not one after the other: they are copied there part by part."""

    most_values: ClassVar[int] = 1 << 22  # of a part; a row that has more is on its own
    if TYPE_CHECKING:

        @property
        def lengths(self) -> RowNumbers: ...

        def take(self, rows: RowNumbers) -> Ragged: ...

    def __len__(self) -> int:
        return len(self.lengths)

    def chunks(self) -> Iterator[Array]:
        """The ids of all rows in order, in arrays of bounded size in host memory."""
        offsets, low = offsets_of(self.lengths), 0
        while low < len(self):
            high = max(low + 1, int(np.searchsorted(offsets, offsets[low] + self.most_values, side="right")) - 1)
            yield self.take(np.arange(low, high)).values
            low = high

    def to_host(self) -> Ragged:
        """All rows in host memory: a copy, made each time."""
        offsets = offsets_of(self.lengths)
        values, at = np.empty(int(offsets[-1]), np.int32), 0
        for chunk in self.chunks():
            values[at : at + len(chunk)] = chunk
            at += len(chunk)
        return Ragged(values, offsets)


def selected(rows: Ragged, mask: Array) -> Ragged:
    """Some values of each row: those of a mask, which has one bool per value."""
    return Ragged(rows.values[mask], offsets_of(count_in_rows(mask, rows.offsets)))


def appended(rows: Ragged, more: Ragged) -> Ragged:
    """(n,) rows in host memory, each followed by the row of the same number of others."""
    offsets = offsets_of(rows.lengths + more.lengths)
    values = np.empty(int(offsets[-1]), np.int32)
    others = stretches(rows.lengths, more.lengths)
    values[~others], values[others] = rows.values, more.values
    return Ragged(values, offsets)


def common_prefixes(ids: Ragged, others: Ragged) -> np.ndarray[Any, np.dtype[np.int64]]:
    """(n,) int64: how many leading values the rows of two columns have in common; in host memory."""
    shorter = np.minimum(ids.lengths, others.lengths)
    bounds = offsets_of(shorter)
    one, other = (each.values[ranges(each.offsets[:-1], shorter, bounds)] for each in (ids, others))
    return equal_beginnings(one, other, bounds)


def equal_beginnings(one: Array, other: Array, bounds: Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """(n,) int64: `common_prefixes` of rows that have the same lengths, and so the same offsets, (n + 1,) `bounds`."""
    # The first difference at or after each row's beginning; the row's length if it is not in the row.
    differing = np.append(np.flatnonzero(one != other), bounds[-1])
    first = differing[np.searchsorted(differing, bounds[:-1])]
    prefixes: np.ndarray[Any, np.dtype[np.int64]] = np.minimum(first - bounds[:-1], np.diff(bounds))
    return prefixes
