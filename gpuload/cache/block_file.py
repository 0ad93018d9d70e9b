"""Files of the cache and of stores: blocks of bytes, and an index that says where they are.

    block 0, block 1, ...   each at a multiple of 64 bytes, so that arrays can be used in place
    index                   JSON: the key, the rows, where each block is and its checksum, and what else is known
    8 bytes, 8 bytes        length and checksum of the index

Files are written in a temporary directory and renamed once a load has been verified, so that no process sees half of
one. They are mapped into memory: only what is used is ever read.

A disk may lose what it reported as written. So the index is compared with its checksum when a file is opened, and each
block by those who use it. A file with a damaged index is as good as none.
"""

import json
import os
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from gpuload.cache.faults import damaged, missing
from gpuload.core.errors import StoreError

_ALIGNMENT = 64
_END = struct.Struct("<qq")


class BlockFile:
    """A file, mapped into memory as a whole; `facts` are its index."""

    def __init__(self, path: Path, memory: pa.Buffer, facts: Mapping[str, Any]):
        self.path, self.memory, self.facts = path, memory, facts
        self.key: str = facts["key"]  # identifies what the file has
        self.num_rows: int = facts["rows"]
        self.starts, self._sizes, self._checksums = np.array(facts["blocks"], np.int64).reshape(-1, 3).T
        self._intact = np.zeros(len(self.starts), bool)

    @classmethod
    def open(cls, path: Path, key: str, rows: int | None = None) -> Self | None:
        """Opens a file; None if there is none, or a damaged one, or one with another key, or other than these rows."""
        try:
            with pa.memory_map(os.fsencode(path)) as mapped:
                memory = mapped.read_buffer()
            size, checksum = _END.unpack(memory.slice(memory.size - _END.size))
            index = memory.slice(memory.size - _END.size - size, size)
            if zlib.crc32(index) != checksum:
                return None
            found = cls(path, memory, json.loads(index.to_pybytes()))
            return found if found.key == key and rows in (None, found.num_rows) else None
        except Exception:  # whatever the damage, the file is made again
            return None

    @classmethod
    def again(cls, path: Path, key: str, rows: int | None = None) -> Self:
        """Opens a file that was there; a `StoreError` if it is not there any more."""
        found = cls.open(path, key, rows)
        if found is None:
            raise missing(path)
        return found

    def __reduce__(self) -> tuple[Any, ...]:  # another process maps the file itself
        return _in_another_process, (type(self), self.path, self.key, self.num_rows)

    def block(self, number: int) -> pa.Buffer:
        """A block. Its checksum is compared the first time.

        Raises:
            StoreError: it has been damaged.
        """
        block = self.unchecked(number)
        if not self._intact[number] and zlib.crc32(block) != self._checksums[number]:
            raise damaged(self.path)
        self._intact[number] = True
        return block

    def unchecked(self, number: int) -> pa.Buffer:
        """A block, whatever is there now."""
        return self.memory.slice(int(self.starts[number]), int(self._sizes[number]))


class Gone:
    """A file that another process did not find. What is asked of it is a `StoreError`: an error of unpickling would
    end a worker of torch's loaders, and nobody would be told why."""

    def __init__(self, path: Path):
        self.path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise missing(self.path)


def _in_another_process(kind: type[BlockFile], path: Path, key: str, rows: int) -> BlockFile | Gone:
    try:
        return kind.again(path, key, rows)
    except StoreError:
        return Gone(path)


def about(path: Path) -> tuple[str, int] | None:
    """The name of the file of which one was made, and its rows; None if it is damaged."""
    try:
        with open(path, "rb") as file:
            file.seek(-_END.size, 2)
            size, _ = _END.unpack(file.read())
            file.seek(-_END.size - size, 2)
            facts = json.loads(file.read(size))
        return str(facts["source"]), int(facts["rows"])
    except Exception:  # whatever the damage: `open` ignores such a file, too
        return None


class BlockWriter:
    """Writes such a file.

    Args:
        path: where to write it.
        key: identifies what it has.
        source: the name of the file whose rows it gets, for lists of what is cached.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, key: str, source: str):
        self.path, self.key, self._source = path, key, source
        self.rows, self.closed = 0, False  # how many were written so far, and whether the file is complete
        self._blocks: list[list[int]] = []
        self._written = 0
        self._file = open(path, "wb")  # noqa: SIM115

    def discard(self) -> None:
        with suppress(OSError):  # what waits to be written may not fit
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _begin(self) -> None:
        gap = -self._written % _ALIGNMENT
        self._file.write(bytes(gap))
        self._written += gap
        self._blocks.append([self._written, 0, 0])

    def _write(self, data: Any) -> None:
        """Appends to the last block what has the buffer protocol and is contiguous."""
        self._file.write(data)
        start, size, checksum = self._blocks[-1]
        size += memoryview(data).nbytes
        self._blocks[-1], self._written = [start, size, zlib.crc32(data, checksum)], start + size

    def _finish(self, **facts: Any) -> None:
        """Writes the index, with these facts, and closes the file."""
        known = {"key": self.key, "source": self._source, "rows": self.rows, "blocks": self._blocks}
        index = json.dumps(known | facts).encode()
        self._file.write(index + _END.pack(len(index), zlib.crc32(index)))
        self._file.close()
        self.closed = True
