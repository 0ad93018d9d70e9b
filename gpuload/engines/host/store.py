"""Ids of a load in host memory, in the arrays that encoders have made."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpuload.core.arrays import Ragged, RowNumbers, RowsInParts, offsets_of, ranges
from gpuload.core.arrow import spanning

_RUN = 64  # rows that follow each other in memory: to read fewer as a view takes longer than to gather them


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
        buffers = [pa.py_buffer(array) for array in arrays if array.size]  # others may be at any address
        # An index into this array is an address in units of an id, counted from the first one.
        values = np.frombuffer(spanning(buffers), np.int32) if buffers else np.zeros(0, np.int32)
        begins = [(array.ctypes.data - values.ctypes.data) // values.itemsize if array.size else 0 for array in arrays]
        places = zip(begins, parts, strict=True)
        first = np.concatenate([np.zeros(0, np.int64), *(begin + part.offsets[:-1] for begin, part in places)])
        lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
        self._lengths = lengths if order is None else lengths[order]
        self._places = values, first if order is None else first[order]
        self._joined = Ragged(arrays[0], offsets_of(lengths)) if len(parts) == 1 and order is None else None

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

    def chunks(self) -> Iterator[npt.NDArray[np.int32]]:
        """The ids of all rows in order, in arrays: where rows follow each other in memory, these are views."""
        values, first = self._places
        end = first + self._lengths
        begins = np.flatnonzero(np.append(True, first[1:] != end[:-1])[: len(first)])
        if _RUN * len(begins) > len(first):
            yield from super().chunks()
            return
        for row, last in itertools.pairwise([*begins.tolist(), len(first)]):
            yield values[first[row] : end[last - 1]]

    def to_host(self) -> Ragged:
        """All rows, one after the other: joined once, if they are in several arrays, and from then on kept so."""
        if self._joined is None:
            self._joined = super().to_host()
            self._places = self._joined.values, self._joined.offsets[:-1]
        return self._joined

    def __reduce__(self) -> tuple[Any, ...]:
        return HostTokens, ([self.to_host()],)
