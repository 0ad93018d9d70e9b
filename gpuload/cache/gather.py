"""Rows of Arrow columns in mapped files, gathered from their buffers.

`pyarrow.Table.take` is a call for each table, and a store of 20 million rows has hundreds of them: rows in random order
are in as many tables as there are rows in a batch. Here the buffers of all tables are places in one address space, so
that a column takes the same few array operations however many tables it has.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import RowNumbers, offsets_of, ranges
from gpuload.core.arrow import bitmap, spanning

_FEW = 12  # tables
_MOST = (1 << 31) - 1  # of what 32-bit offsets can count


class MappedTables:
    """Tables in mapped files, and where the buffers of those are that have been used.

    Args:
        memory: of the files.
        tables: the tables, which are opened when they are first used.
        schemas: of each table.
        starts: (tables + 1,) the number of its first row.
    """

    def __init__(
        self, memory: Sequence[pa.Buffer], tables: Sequence[pa.Table], schemas: Sequence[pa.Schema], starts: RowNumbers
    ):
        self._space, self._tables, self._starts = AddressSpace(memory), tables, starts
        self._opened = np.zeros(len(tables), np.bool_)
        # Columns that all tables have with one type, and for each of their buffers, in Arrow's order, its address in
        # each table: (buffers, tables).
        self._kinds = {
            field.name: field.type
            for field in schemas[0]
            if _can_gather(field.type) and all(_has(schema, field) for schema in schemas)
        }
        self._addresses: dict[str, np.ndarray[Any, Any]] = {}

    def take(self, rows: RowNumbers, names: Sequence[str]) -> pa.Table | None:
        """Some rows (m,) of some columns, given by their numbers; None if they are in so few tables that a call for
        each of them takes less time, or it is not possible."""
        part = np.searchsorted(self._starts, rows, side="right") - 1
        if np.count_nonzero(np.bincount(part)) <= _FEW:
            return None
        for number in np.unique(part[~self._opened[part]]).tolist():
            self._open(number)
        if not all(name in self._kinds for name in names):
            return None
        places = rows - self._starts[part]
        columns = [
            _gathered(self._kinds[name], self._space, iter(self._addresses[name]), part, places) for name in names
        ]
        return pa.table(columns, names=list(names))

    def _open(self, number: int) -> None:
        """Notes the addresses of a table; a `StoreError` if it has been damaged."""
        table = self._tables[number]
        for name in list(self._kinds):
            chunks = table.column(name).chunks
            buffers = [buffer for chunk in chunks for buffer in chunk.buffers()]
            if len(chunks) != 1 or chunks[0].offset or not all(map(self._space.has, buffers)):
                del self._kinds[name]  # nothing that is written today
                continue
            at = self._addresses.setdefault(name, np.zeros((len(buffers), len(self._opened)), np.int64))
            at[:, number] = [0 if buffer is None else buffer.address for buffer in buffers]
        self._opened[number] = True


class AddressSpace:
    """The memory from the first to the last byte of some buffers. What is between them is never read."""

    def __init__(self, buffers: Sequence[pa.Buffer]):
        memory = spanning(buffers)
        self.base, self.end = memory.address, (memory.address + memory.size) // 8 * 8
        memory = memory.slice(0, self.end - self.base)
        self._bytes = memoryview(memory)
        self._items = {width: np.frombuffer(memory, f"i{width}") for width in (1, 2, 4, 8)}

    def has(self, buffer: pa.Buffer | None) -> bool:
        """Whether the values of a buffer, if there are any, are among those of this memory."""
        if buffer is None or not buffer.size:
            return True
        inside = self.base <= buffer.address and buffer.address + buffer.size <= self.end
        return bool(inside and buffer.address % 8 == 0)

    def values(self, width: int, begin: RowNumbers, numbers: RowNumbers) -> np.ndarray[Any, Any]:
        """Of arrays that begin at some addresses (m,), the values of `width` bytes with these numbers (m,)."""
        found: np.ndarray[Any, Any] = self._items[width][(begin - self.base) // width + numbers]
        return found

    def bits(self, begin: RowNumbers, numbers: RowNumbers) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The same for bitmaps."""
        found: np.ndarray[Any, Any] = self.values(1, begin, numbers // 8) >> numbers % 8 & 1
        return found.astype(np.bool_)

    def joined(self, first: RowNumbers, nbytes: RowNumbers) -> pa.Buffer:
        """The bytes of some ranges (m,), one after the other."""
        some = np.flatnonzero(nbytes)
        low, high = first[some] - self.base, (first + nbytes)[some] - self.base
        apart = low[1:] != high[:-1]  # rows in order are read as one range
        low, high = low[np.append(True, apart)[: len(low)]], high[np.append(apart, True)[: len(high)]]
        found = self._bytes
        return pa.py_buffer(
            b"".join([found[begin:end] for begin, end in zip(low.tolist(), high.tolist(), strict=True)])
        )


def _can_gather(kind: pa.DataType) -> bool:
    """Whether `_gathered` knows a type."""
    if isinstance(kind, pa.BaseExtensionType):
        return _can_gather(kind.storage_type)
    if pa.types.is_struct(kind):
        return all(_can_gather(field.type) for field in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _can_gather(kind.value_type)
    return _is_text(kind) or _is_numbers(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)


def _gathered(
    kind: pa.DataType, space: AddressSpace, buffers: Iterator[RowNumbers], part: RowNumbers, rows: RowNumbers
) -> pa.Array:
    """Some values (m,) of arrays of one type.

    Args:
        kind: the type.
        space: has all buffers.
        buffers: of each buffer of such an array, in Arrow's order, its address in each of them; 0 for none.
        part: (m,) the number of each value's array.
        rows: (m,) the number of the value in its array.
    """
    if isinstance(kind, pa.BaseExtensionType):
        storage = _gathered(kind.storage_type, space, buffers, part, rows)
        return pa.ExtensionArray.from_storage(kind, storage)
    count, valid = len(rows), next(buffers)[part]
    if pa.types.is_null(kind):
        return pa.nulls(count)
    there, mask = np.flatnonzero(valid), None  # without a bitmap, no value of an array is null
    if len(there):
        bits = np.ones(count, np.bool_)
        bits[there] = space.bits(valid[there], rows[there])
        mask = None if bits.all() else bitmap(bits)
    if pa.types.is_struct(kind):
        children = [_gathered(field.type, space, buffers, part, rows) for field in kind]
        return pa.Array.from_buffers(kind, count, [mask], children=children)
    if pa.types.is_boolean(kind):
        return pa.Array.from_buffers(kind, count, [mask, bitmap(space.bits(next(buffers)[part], rows))])
    if _is_numbers(kind):
        values = space.values(kind.bit_width // 8, next(buffers)[part], rows)
        return pa.Array.from_buffers(kind, count, [mask, pa.py_buffer(values)])
    width = 8 if kind in (pa.large_string(), pa.large_binary()) or pa.types.is_large_list(kind) else 4
    bounds = next(buffers)[part]
    first = space.values(width, bounds, rows).astype(np.int64)
    lengths = space.values(width, bounds, rows + 1) - first
    offsets = offsets_of(lengths)
    if width == 4 and offsets[-1] > _MOST:
        raise OverflowError("too much for one array")
    made = [mask, pa.py_buffer(offsets.astype(f"i{width}"))]
    if _is_text(kind):
        return pa.Array.from_buffers(kind, count, [*made, space.joined(next(buffers)[part] + first, lengths)])
    items = _gathered(kind.value_type, space, buffers, np.repeat(part, lengths), ranges(first, lengths, offsets))
    return pa.Array.from_buffers(kind, count, made, children=[items])


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _is_numbers(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _has(schema: pa.Schema, field: pa.Field) -> bool:
    return bool(schema.names.count(field.name) == 1 and schema.field(field.name).type.equals(field.type))
