"""Digests of columns: equal for equal values, in whatever parts and Arrow encodings they were read.

Arrow's buffers cannot be hashed as they are. Slices have offsets, a null may have any bytes, text may be encoded in a
dictionary, and the edges of the tables depend on the machine and on the cache. So each column becomes flat streams of
bytes (what is valid, lengths, values), one digest each.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrow import as_numpy, fill_null
from gpuload.sources.types import is_text


def column_digests(parts: Iterable[tuple[int, pa.Table]]) -> dict[str, bytes]:
    """Column name → digest of its values; at the speed of SHA-256, about a gigabyte per second. `parts` are all rows,
    in order: the number of the first one, and a table, of any schema."""
    columns: dict[str, ColumnDigest] = {}
    for start, part in parts:
        for name, column in zip(part.schema.names, part.columns, strict=True):
            digest, row = columns.setdefault(name, ColumnDigest()), start
            for chunk in column.chunks:
                digest.add(chunk, row)
                row += len(chunk)
    return {name: digest.digest() for name, digest in columns.items()}


class ColumnDigest:
    """Digest of one column's values."""

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}
        self._next: dict[str, int] = {}  # stream → the row after those that it has

    def digest(self) -> bytes:
        streams = sorted(f"{stream} {digest.hexdigest()}" for stream, digest in self._streams.items())
        return hashlib.sha256("\n".join(streams).encode(errors="surrogatepass")).digest()

    def add(self, values: pa.Array, start: int) -> None:
        """Appends values, the first of which is in row `start`: rows in between have no such column, or values of
        another type."""
        if len(values):  # whether there are tables without rows depends on how the rows were stored
            self._add("", values, start, start + len(values))

    def _add(self, path: str, values: pa.Array, start: int, end: int) -> None:
        if isinstance(values, pa.ExtensionArray):
            path, values = f"{path} {values.type}", values.storage
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if pa.types.is_string_view(values.type):
            values = values.cast(pa.large_string())
        kind = values.type
        valid = as_numpy(values.is_valid())
        if pa.types.is_struct(kind):
            self._feed(f"{path} struct", valid, start, end)
            for field, child in zip(kind, values.flatten(), strict=True):
                self._add(f"{path}.{field.name!r}", child, start, end)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            lengths = fill_null(pc.list_value_length(values), -1).cast(pa.int64())
            self._feed(f"{path} list", as_numpy(lengths), start, end)
            self._add(f"{path}[]", values.flatten(), start, end)
        elif is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            name = f"{path} {'text' if is_text(kind) else 'binary'}"
            lengths = fill_null(pc.binary_length(values), -1).cast(pa.int64())
            self._feed(name, as_numpy(lengths), start, end)
            self._feed(f"{name} bytes", _characters(values.drop_null()), start, end)
        elif pa.types.is_boolean(kind):
            self._feed(f"{path} bool", as_numpy(fill_null(values.cast(pa.int8()), -1)), start, end)
        elif pa.types.is_primitive(kind) or pa.types.is_decimal(kind):
            self._feed(f"{path} valid", valid, start, end)
            self._feed(f"{path} {kind}", _fixed_width(values.drop_null()), start, end)
        else:
            text = "".join(f"{value!r}\n" for value in values.to_pylist())
            self._feed(f"{path} {kind}", text.encode(errors="surrogatepass"), start, end)

    def _feed(self, stream: str, data: Any, start: int, end: int) -> None:
        if stream not in self._streams:
            self._streams[stream] = hashlib.sha256()
        if self._next.get(stream, 0) != start:
            self._streams[stream].update(f"row {start}".encode())
        self._next[stream] = end
        self._streams[stream].update(np.ascontiguousarray(data).data if isinstance(data, np.ndarray) else data)


def _characters(texts: pa.Array) -> Any:
    """The characters of all texts, none of them null."""
    _, offsets, data = texts.buffers()
    if data is None or not len(texts):
        return b""
    wide = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    places = np.frombuffer(offsets, np.int64 if wide else np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return memoryview(data)[places[0] : places[-1]]


def _fixed_width(values: pa.Array) -> Any:
    """The bytes of all values, none of them null."""
    width = values.type.bit_width // 8
    data = values.buffers()[1]
    return memoryview(data)[values.offset * width : (values.offset + len(values)) * width] if len(values) else b""
