"""Remote parquet files that are read in place: only the bytes that are needed, and nothing is downloaded to a disk."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from gpuload.core.errors import SourceError
from gpuload.sources.urls import reason_of, without_secrets

_BLOCK = 8 << 20  # bytes of one request
# The keys under which fsspec's file systems report a file's version.
_VERSION_KEYS = (
    *("size", "ETag", "etag", "md5Hash", "Content-MD5", "Digest", "blob_id"),
    *("LastModified", "Last-Modified", "last_modified", "mtime", "modificationTime", "modify", "updated"),
)


def changed(name: str) -> SourceError:
    """The error for a file that did not stay the same."""
    return SourceError(f"{name}: the file was changed while it was loaded: load it again when it is complete")


@dataclass(frozen=True)
class RemoteFile:
    """A remote file in the version in which it was first opened; the counterpart of `local.LocalFile`.

    Attributes:
        fs: fsspec's file system.
        path: in that file system.
        name: for messages, without what may be secret.
        ask: returns what the server says about the file's version.
        version: what it said at first.
    """

    fs: Any
    path: str
    name: str
    ask: Callable[[], list[str]]
    version: tuple[str, ...]

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Opens the file for reading.

        Raises:
            SourceError: it cannot be opened.
            OSError: it cannot be read.
        """
        try:
            raw = self.fs.open(self.path, "rb", block_size=_BLOCK, cache_type="readahead")
        except Exception as error:  # every file system raises errors of its own
            raise self._failed(error) from None
        with raw:
            yield cast(BinaryIO, _Reader(raw, self._failed))

    def check(self) -> None:
        """Checks that the file is still the one that was opened first.

        Raises:
            SourceError: it was replaced, or cannot be reached.
        """
        try:
            version = tuple(self.ask())
        except Exception as error:
            raise self._failed(error) from None
        if version != self.version:
            raise changed(self.name)

    def content(self, *names: str) -> bytes:
        """Identifies the values of some columns, by the file's version."""
        return hashlib.blake2b(repr([self.version, names]).encode(), digest_size=16).digest()

    @property
    def has_version(self) -> bool:
        """Whether the server says more about the version than the size."""
        return any(not part.startswith("size=") for part in self.version[1:])

    def _failed(self, error: BaseException) -> SourceError:
        return SourceError(f"{self.name}: reading failed: {reason_of(error)}: check the connection, and load again")


class _Reader:
    """A file object whose errors say which file it is."""

    def __init__(self, raw: Any, failed: Callable[[BaseException], SourceError]):
        self._raw, self._failed = raw, failed
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self._raw.read(size))
        except Exception as error:
            raise self._failed(error) from None

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._raw.seek(offset, whence))

    def tell(self) -> int:
        return int(self._raw.tell())

    def close(self) -> None:
        self.closed = True

    @staticmethod
    def readable() -> bool:
        return True

    @staticmethod
    def seekable() -> bool:
        return True

    @staticmethod
    def writable() -> bool:
        return False

    def flush(self) -> None:
        pass


def in_place(fs: Any, path: str, name: str) -> RemoteFile | None:
    """A file that can be read where it is; None if it cannot, or if it is not known whether it is."""

    def ask() -> list[str]:
        fs.invalidate_cache()
        return version_of(name, fs.info(path))

    try:
        file = RemoteFile(fs, path, without_secrets(name), ask, tuple(ask()))
    except Exception:  # the download will say what is wrong
        return None
    return file if _can_be_read_in_place(file) else None


def version_of(name: str, info: Mapping[str, Any]) -> list[str]:
    """The name of a file, and what the server says about its version."""
    return [name] + [f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key) is not None]


def _can_be_read_in_place(file: RemoteFile) -> bool:
    """Whether the server sends parts of a file, and this one ends as a parquet file does."""
    try:
        with file.open() as raw:
            raw.seek(-4, 2)
            return raw.read(4) == b"PAR1"
    except Exception:  # the download will say what is wrong
        return False
