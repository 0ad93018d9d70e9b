"""Files that another process may read: where they are, and local copies of some of their row groups.

    place_files   paths, globs, directories and URLs → files, of which nothing is downloaded
    local_part    the file, or a copy of it that has the footer and the pages of some row groups, and holes elsewhere

Whoever reads some row groups of a parquet file on an object store moves a few ranges of bytes, and then reads a local
file with the code that reads all local files.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from gpuload.core.errors import SourceError
from gpuload.sources.fetch import (
    RemoteFiles,
    SourceFile,
    downloaded,
    local_files,
    names_of,
    remote_files,
    resolve,
)  # fmt: skip
from gpuload.sources.footer import SLACK, chunk_start
from gpuload.sources.urls import is_url, reason_of, without_secrets

_FOOTER = 1 << 16  # bytes from the end that are read first
_BLOCK = 1 << 25
_GAP = 1 << 20  # bytes that are read for nothing rather than with a request more


@dataclass(frozen=True)
class FilePlace:
    """One file, for any process that can read it.

    Attributes:
        location: an absolute path, or a URL.
        name: for messages.
        format: "parquet" or "json".
        timeout: seconds that a web server may be silent.
    """

    location: str
    name: str
    format: str
    timeout: float

    @property
    def in_ranges(self) -> bool:
        """Whether ranges of its bytes are read from a server. Web servers may not support this."""
        return is_url(self.location) and self.format == "parquet" and not self.location.startswith("http")

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        import fsspec

        fs, path = fsspec.core.url_to_fs(self.location)
        return fs, str(path)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Opens a file of which ranges are read.

        Raises:
            OSError: it cannot be opened.
        """
        fs, path = self._opened
        with fs.open(path, "rb", block_size=_BLOCK >> 2, cache_type="readahead") as raw:
            yield raw

    def read_range(self, start: int, end: int) -> bytes:
        """Some of its bytes, read again if that fails.

        Raises:
            SourceError: they cannot be read.
        """
        fs, path = self._opened

        def read(_: int) -> bytes:
            content = bytes(fs.cat_file(path, start=start, end=end))
            if len(content) != end - start:
                raise OSError(f"{len(content)} of {end - start} bytes arrived")
            return content

        return downloaded(self.name, read)

    def size(self) -> int:
        """Its bytes.

        Raises:
            SourceError: it does not exist, or may not be read.
        """
        fs, path = self._opened
        try:
            fs.invalidate_cache()
            return int(fs.info(path)["size"])
        except Exception as error:
            raise SourceError(f"{self.name}: {reason_of(error)}") from None


def place_files(files: Any, timeout: float) -> list[FilePlace]:
    """Finds files, and downloads nothing.

    Args:
        files: as for `resolve`.
        timeout: seconds that a web server may be silent.

    Raises:
        SourceError: as for `resolve`.
    """
    found: list[FilePlace] = []
    for name in names_of(files):
        listed = remote_files(name, timeout) if is_url(name) else local_files(name)
        if isinstance(listed, RemoteFiles):
            urls = zip(listed.names, listed.formats, strict=True)
            found += [FilePlace(url, without_secrets(url), kind, timeout) for url, kind in urls]
        else:
            found += [FilePlace(str(Path(f.path).absolute()), f.name, f.format, timeout) for f in listed]
    return found


def local_part(
    place: FilePlace, groups: range, directory: Path, cache_dir: str | None, only: str | None = None
) -> SourceFile:
    """A local file that has some row groups.

    Args:
        groups: consecutive row groups of a parquet file; empty: its footer is enough.
        directory: where to put a copy with holes.
        cache_dir: where to put a copy of the whole, of files that cannot be read in ranges.
        only: the column that a copy with holes has; None for all.

    Raises:
        SourceError: the file cannot be read, or is no parquet file.
    """
    if not is_url(place.location):
        return SourceFile(place.location, place.name, place.format)
    if not place.in_ranges:
        (whole,) = resolve(place.location, cache_dir, place.timeout)
        return whole
    size = place.size()
    target = directory / f"{groups.start}-{groups.stop}.parquet"
    tail = place.read_range(max(0, size - _FOOTER), size)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if len(tail) < length <= size:
        tail = place.read_range(size - length, size)
    head = b"PAR1" if tail.endswith(b"PAR1") else place.read_range(0, min(4, size))
    try:
        with open(target, "wb") as file:
            file.write(head)
            file.truncate(size)
            file.seek(size - len(tail))
            file.write(tail)
            if groups:
                file.flush()
                for start, end in _ranges_of(target, groups, only, place.name):
                    file.seek(start)
                    for at in range(start, min(end, size), _BLOCK):
                        file.write(place.read_range(at, min(at + _BLOCK, end, size)))
    except SourceError:
        raise
    except OSError as error:
        free = shutil.disk_usage(directory).free
        raise SourceError(
            f"{place.name}: cannot write to the temporary directory {directory} ({free:,} bytes are free): "
            f"{error.strerror or error}"
        ) from error
    return SourceFile(str(target), place.name, place.format)


def _ranges_of(footer: Path, groups: range, only: str | None, name: str) -> list[tuple[int, int]]:
    """The ranges of bytes in which row groups, or a column of them, are. Between two of them is more than `_GAP`."""
    try:
        metadata = pq.read_metadata(footer)
        chunks = [
            metadata.row_group(group).column(number) for group in groups for number in range(metadata.num_columns)
        ]
    except (pa.ArrowException, OSError, IndexError) as error:
        raise SourceError(f"{name}: damaged parquet file ({error}): download it again") from error
    ranges: list[tuple[int, int]] = []
    for start, chunk in sorted((chunk_start(chunk), number) for number, chunk in enumerate(chunks)):
        if only is not None and not (chunks[chunk].path_in_schema + ".").startswith(only + "."):
            continue
        end = start + chunks[chunk].total_compressed_size + SLACK
        if ranges and start - ranges[-1][1] <= _GAP:
            start, end = ranges[-1][0], max(end, ranges[-1][1])
            ranges.pop()
        ranges.append((start, end))
    return ranges
