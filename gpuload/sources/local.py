"""Local files that must stay the same while they are loaded.

A load reads a file several times: its schema, the digest of its prompts, its rows. If the file were replaced or written
to in between, ids of the old rows would be joined with columns of the new ones.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, cast

import pyarrow as pa

from gpuload.core.files import open_regular
from gpuload.sources.fetch import SourceFile
from gpuload.sources.urls import changed

if TYPE_CHECKING:
    from gpuload.sources.remote import RemoteFile


@dataclass(frozen=True)
class LocalFile:
    """A file in the state in which it was first opened."""

    path: str
    name: str  # as the user named it, for messages
    state: tuple[int, ...]  # device, inode, bytes, and time of the last change in ns

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Opens the file again; a `SourceError` if it is not in the same state, an `OSError` if it cannot be opened."""
        self._compare(os.stat(self.path))  # Arrow would wait for somebody who writes to a named pipe
        with _arrow_file(self.path) as raw:
            self._compare(os.fstat(raw.fileno()))
            yield raw

    def check(self) -> None:
        """Checks that nothing has changed since it was first opened; a `SourceError` if it was written to, replaced or
        removed."""
        try:
            about = os.stat(self.path)
        except OSError as error:
            raise changed(self.name) from error
        self._compare(about)

    def _compare(self, about: os.stat_result) -> None:
        if _state(about) != self.state:
            raise changed(self.name)


def _arrow_file(path: str) -> BinaryIO:
    """Opens a file for Arrow, which reads one of Python's in a new part of the process's memory for each page."""
    raw = pa.OSFile(os.fsencode(path))
    try:
        raw.fileno()
    except AttributeError:  # that of older versions of pyarrow fails, such as 21
        raw.close()
        return open_regular(path)
    return cast(BinaryIO, raw)


@contextmanager
def opened(file: SourceFile) -> Iterator["tuple[LocalFile | RemoteFile, BinaryIO]"]:
    """Opens a file for the first time; a `SourceError` if it was changed before the end of the block, an `OSError` if
    it cannot be opened."""
    if file.remote is not None:
        with file.remote.open() as raw:
            yield file.remote, raw
        return
    with open_regular(file.path) as raw:
        local = LocalFile(file.path, file.name, _state(os.fstat(raw.fileno())))
        try:
            yield local, raw
        finally:
            local.check()  # whatever else is wrong, this is why


def _state(about: os.stat_result) -> tuple[int, ...]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
