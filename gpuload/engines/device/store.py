"""The store of token ids: rows in device memory, given by their addresses.

Joining the parts of a load in one array would need the memory of all ids twice, and a third time to bring them into
another order. So ids stay where they were written first:

    1. `Segments.add` copies rows to the end of the last segment, and the rows that do not fit into a new one
    2. `in_order` concatenates and permutes addresses and lengths, in host memory
    3. kernels read row i at address[i]

A segment is an allocation of whole `_SEGMENT`s, large enough for the rows at hand and for a sixteenth of the ids so
far: few allocations, and little unused memory.
"""

import mmap
import os
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gpuload.core.arrays import Array, Ragged, RowNumbers, RowsInParts, offsets_of, on_host
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.texts import copy_slices
from gpuload.engines.failures import explaining

_SEGMENT = 1 << 19  # ids; 2 MiB, the granularity of CUDA's allocations
_SHARE = 16


@dataclass(frozen=True, eq=False)
class Index:
    """Where kernels find n rows of int32 ids."""

    address: Array  # (n,) int64, in device memory
    length: Array  # (n,) int64, number of ids; in device memory


@dataclass(frozen=True, eq=False)
class DeviceStore(RowsInParts):
    """n rows of ids in device memory; a `protocol.TokenStore`."""

    kernels: Kernels  # for that device
    address: Array  # (n,) int64 in host memory, where each row begins
    lengths: Array  # (n,) int64 in host memory
    segments: list[Array] = field(repr=False)  # the memory that the addresses point into
    most_values = 1 << 24

    def __reduce__(self) -> tuple[Any, ...]:  # another process cannot use this one's device
        rows = self.to_host()
        return Ragged, (rows.values, rows.offsets)

    @cached_property
    def index(self) -> Index:
        """What kernels read; copied to the device with the first batch."""
        return index_of(self.kernels, self.address, self.lengths)

    def take(self, rows: Array) -> Ragged:
        """Some rows (m,), copied to the host in one transfer."""
        if "_host" in self.__dict__:
            return self._host.take(rows)
        offsets = offsets_of(self.lengths[rows])
        with explaining(self.kernels, "reading token ids"), self.kernels.current():
            return Ragged(on_host(self._gathered(rows, offsets)), offsets)

    def joined(self) -> Ragged:
        """All rows in new arrays in device memory, for work on any stream, whose end nobody waits for."""
        offsets = offsets_of(self.lengths)
        with self.kernels.current(), self.kernels.lasting():
            rows = Ragged(self._gathered(np.arange(len(self)), offsets), self.kernels.xp.asarray(offsets))
            self.kernels.synchronize()
        return rows

    def to_host(self) -> Ragged:
        """All rows in host memory; copied once, when first asked for."""
        return self._host

    @cached_property
    def _host(self) -> Ragged:
        return super().to_host()

    def _gathered(self, rows: Array, offsets: Array) -> Array:
        """The ids of some rows, one row after the other, in device memory."""
        xp = self.kernels.xp
        ids = xp.empty(int(offsets[-1]), np.int32)
        copy_slices(self.kernels, xp.asarray(self.address[rows]), xp.asarray(4 * offsets), ids)
        return ids


_STORES: weakref.WeakSet[DeviceStore] = weakref.WeakSet()  # those of datasets


def _copy_to_host() -> None:
    """A forked process cannot use the device. It inherits the copies in host memory."""
    failed: Exception | None = None
    for store in list(_STORES):
        try:
            store.to_host()
        except Exception as error:  # of one device. Other stores may be on another
            failed = error
    if failed is not None:
        raise failed  # Python prints it, and forks all the same


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_copy_to_host)


class Segments:
    """Device memory for ids, which grows during a load, to `limit` bytes at most; None for no limit."""

    def __init__(self, kernels: Kernels, limit: int | None = None) -> None:
        self._kernels, self._limit = kernels, limit
        self._segments: list[Array] = []
        self._size = 0  # ids in all segments, used or not
        self._used = 0  # ids in the last segment

    def add(self, ids: Ragged, rows: RowNumbers | None = None) -> DeviceStore | None:
        """Copy rows, or all, of ids in device or host memory into the segments; None if they would exceed the limit.

        Raises:
            DeviceError: there is not enough memory.
        """
        there = to_device(self._kernels, ids)
        address, length = self._kernels.address(there.values) + 4 * there.offsets[:-1], there.lengths
        if rows is not None:
            at = self._kernels.xp.asarray(rows)
            address, length = address[at], length[at]
        lengths = on_host(length)
        offsets = offsets_of(lengths)
        room = len(self._segments[-1]) - self._used if self._segments else 0
        fit = int(np.searchsorted(offsets, room, side="right")) - 1  # so many rows go into the last segment
        rest = int(offsets[-1] - offsets[fit])
        new = None
        if rest:
            size = -(-max(rest, self._size // _SHARE) // _SEGMENT) * _SEGMENT
            if self._limit is not None and 4 * (self._size + size) > self._limit:
                return None
            with self._kernels.lasting():
                new = self._kernels.xp.empty(size, np.int32)
        written = [self._write(address[:fit], offsets[: fit + 1])]
        if new is not None:
            self._segments.append(new)
            self._size, self._used = self._size + len(new), 0
            written.append(self._write(address[fit:], offsets[fit:] - offsets[fit]))
        return DeviceStore(self._kernels, np.concatenate(written), lengths, self._segments)

    def _write(self, address: Array, offsets: RowNumbers) -> RowNumbers:
        """Copies rows to the end of the last segment. Returns where each is."""
        size = int(offsets[-1])
        if not size:  # there may be no segment yet
            return np.zeros(len(offsets) - 1, np.int64)
        out = self._segments[-1][self._used : self._used + size]
        self._used += size
        copy_slices(self._kernels, address, self._kernels.xp.asarray(4 * offsets), out)
        starts: RowNumbers = self._kernels.address(out) + 4 * offsets[:-1]
        return starts


def in_order(parts: list[DeviceStore], order: RowNumbers | None) -> DeviceStore:
    """The rows of parts that were added to the same segments, in the given order; nothing is copied."""
    address, lengths = (np.concatenate([getattr(part, name) for part in parts]) for name in ("address", "lengths"))
    if order is not None:
        address, lengths = address[order], lengths[order]
    made = DeviceStore(parts[0].kernels, address, lengths, parts[0].segments)
    _STORES.add(made)
    return made


def host_store(parts: list[Ragged], order: RowNumbers | None) -> Ragged:
    """Joins rows, in some order, in host memory that can be pinned in place: pages of its own, which forked processes
    share. Empties the list: each part is freed as soon as it is copied."""
    lengths = np.concatenate([part.lengths for part in parts])
    offsets = offsets_of(lengths if order is None else lengths[order])
    starts = np.empty(len(lengths), np.int64)  # where each row goes
    starts[slice(None) if order is None else order] = offsets[:-1]
    values = np.frombuffer(mmap.mmap(-1, max(1, 4 * int(offsets[-1]))), np.int32, int(offsets[-1]))
    rows = ids = 0
    while parts:
        part = parts.pop(0)
        if order is None:
            values[ids : ids + len(part.values)] = part.values
        else:
            shift = np.repeat(starts[rows : rows + len(part)] - part.offsets[:-1], part.lengths)
            values[np.arange(len(shift)) + shift] = part.values
        rows, ids = rows + len(part), ids + len(part.values)
    return Ragged(values, offsets)


def index_of(kernels: Kernels, address: RowNumbers, lengths: RowNumbers) -> Index:
    """Rows given in host memory, for kernels on any stream."""
    with kernels.current(), kernels.lasting():
        index = Index(kernels.xp.asarray(address), kernels.xp.asarray(lengths))
        kernels.synchronize()  # batches may be made on another stream
    return index


def to_device(kernels: Kernels, rows: Ragged) -> Ragged:
    """Rows in device memory: copied there, or the same ones if they are there already."""
    return Ragged(kernels.xp.asarray(rows.values), kernels.xp.asarray(rows.offsets))
