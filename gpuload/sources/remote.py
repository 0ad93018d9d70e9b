"""Remote parquet files that are read in place: only the bytes that are needed, and nothing is downloaded to a disk."""

import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from gpuload.core.errors import SourceError
from gpuload.sources.places import FilePlace, tried
from gpuload.sources.urls import changed, reason_of

_BLOCK = 8 << 20  # bytes of one request at least
_BLOCKS = 8  # of one open file: columns that are read in turns


@dataclass(frozen=True)
class RemoteFile:
    """A remote file in the version in which it was first opened; the counterpart of `local.LocalFile`."""

    place: FilePlace
    version: tuple[str, ...]  # what the server said at first

    @property
    def name(self) -> str:
        return self.place.name

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Opens the file for reading; a `SourceError` if it cannot be opened, an `OSError` if it cannot be read."""
        with tried(lambda _: self._raw(), self._failed) as raw:
            yield cast(BinaryIO, _Reader(raw, self._failed))

    def check(self) -> None:
        """Checks that the file is still the one that was opened first; a `SourceError` if it was replaced, or cannot be
        reached."""
        if tried(lambda _: self.place.version_now(), self._failed) != self.version:
            raise changed(self.name)

    def content(self, *names: str) -> bytes:
        """Identifies the values of some columns, by the file's version."""
        return hashlib.blake2b(repr([self.version, names]).encode(), digest_size=16).digest()

    @property
    def has_version(self) -> bool:
        """Whether the server says more about the version than the size."""
        return any(not part.startswith("size=") for part in self.version[1:])

    def can_be_read(self) -> bool:
        """Whether the server sends parts of the file, and it ends as a parquet file does."""
        try:
            with self._raw() as raw:
                raw.seek(-4, 2)
                return bool(raw.read(4) == b"PAR1")
        except Exception:  # the download will say what is wrong
            return False

    def _raw(self) -> Any:
        return self.place.fs.open(self.place.path, "rb", cache_type="none")

    def _failed(self, error: Exception, attempts: int = 1) -> SourceError:
        return SourceError(f"{self.name}: reading failed: {reason_of(error)}: check the connection, and load again")


class _Reader(io.RawIOBase):
    """A file object that reads blocks ahead, several at a time, because columns of a row group are read in turns: the
    number of requests is bounded by the bytes that are read, and by the number of places at which reading begins.
    `failed` makes errors that say which file it is."""

    def __init__(self, raw: Any, failed: Callable[[Exception, int], SourceError]):
        self._raw, self._failed = raw, failed
        self._size, self._at = int(raw.seek(0, 2)), 0
        self._blocks: list[tuple[int, bytes]] = []  # where they begin, and their bytes; the last used one last

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        parts = []
        while self._at < end:
            start, content = self._block(end)
            parts.append(content[self._at - start : end - start])
            self._at += len(parts[-1])
        return b"".join(parts)

    def _block(self, end: int) -> tuple[int, bytes]:
        """The block that has the next byte. One that is not there is fetched: as far as is to be read, or further, but
        not what another block has."""
        for number, (start, content) in enumerate(self._blocks):
            if start <= self._at < start + len(content):
                self._blocks.append(self._blocks.pop(number))
                return self._blocks[-1]
        until = [start for start, _ in self._blocks if start > self._at]
        length = min([max(end, self._at + _BLOCK), self._size, *until]) - self._at
        content = tried(lambda _: self._fetched(length), self._failed)
        if len(self._blocks) == _BLOCKS:  # the block before has been read to its end; else the one not used for longest
            ends = [start + len(content) for start, content in self._blocks]
            del self._blocks[ends.index(self._at) if self._at in ends else 0]
        self._blocks.append((self._at, content))
        return self._blocks[-1]

    def _fetched(self, length: int) -> bytes:
        self._raw.seek(self._at)
        content = bytes(self._raw.read(length))
        if len(content) != length:
            raise OSError(f"{len(content)} of {length} bytes arrived")
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def in_place(place: FilePlace) -> RemoteFile | None:
    """A file that can be read where it is; None if it cannot, or if it is not known whether it is."""
    try:
        file = RemoteFile(place, place.version_now())
    except Exception:  # the download will say what is wrong
        return None
    return file if file.can_be_read() else None
