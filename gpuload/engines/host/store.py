"""Ids of a load in host memory, in the arrays that encoders have made."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpuload.core.arrays import Ragged, RowNumbers, RowsInParts, offsets_of, ranges


class HostTokens(RowsInParts):
    """n rows of ids in some arrays of host memory; a `protocol.TokenStore`.

    To join the arrays would take a copy of all ids, and as much new memory again: on a virtual machine, up to two
    seconds per gigabyte. So they are places in one array, which goes from the first to the last byte of all of them.
    What is between them is never read.

    Args:
        parts: the rows.
        order: (n,) their numbers, in the order of the store; None for all in their order.
    """

    def __init__(self, parts: list[Ragged], order: RowNumbers | None = None):
        arrays = [np.require(part.values, np.int32, ["C", "ALIGNED"]) for part in parts]
        begins = np.array([array.ctypes.data for array in arrays], np.int64)
        ends = begins + [array.nbytes for array in arrays]
        base, size = (int(begins.min()), int(ends.max() - begins.min())) if arrays else (0, 0)
        # An index into this array is an address in units of an id, counted from the first one.
        values = np.frombuffer(pa.foreign_buffer(base, size, arrays), np.int32) if size else np.zeros(0, np.int32)
        places = zip((begins - base) // values.itemsize, parts, strict=True)
        first = np.concatenate([np.zeros(0, np.int64), *(begin + part.offsets[:-1] for begin, part in places)])
        lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
        self._lengths = lengths if order is None else lengths[order]
        self._places = values, first if order is None else first[order]

    @property
    def lengths(self) -> RowNumbers:
        return self._lengths

    @property
    def places(self) -> tuple[npt.NDArray[np.int32], RowNumbers]:
        """An array of which row i is the `lengths[i]` ids from the place `first[i]` on, and `first`, (n,)."""
        return self._places

    def take(self, rows: RowNumbers) -> Ragged:
        values, first = self._places
        offsets = offsets_of(self._lengths[rows])
        return Ragged(values[ranges(first[rows], self._lengths[rows], offsets)], offsets)

    def to_host(self) -> Ragged:
        """All rows, one after the other: joined once, and from then on kept so."""
        values, first = self._places
        bounds = offsets_of(self._lengths)
        if not len(first) or not np.array_equal(first - first[0], bounds[:-1]):
            whole = super().to_host()
            self._places = values, first = whole.values, whole.offsets[:-1]
        begin = int(first[0]) if len(first) else 0
        return Ragged(values[begin : begin + int(bounds[-1])], bounds)

    def __reduce__(self) -> tuple[Any, ...]:
        return HostTokens, ([self.to_host()],)
