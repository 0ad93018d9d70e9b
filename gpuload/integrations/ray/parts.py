"""What a task of a cluster reads: some consecutive row groups of one file, found by reading footers only."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gpuload.core.errors import DataError, OptionError, SourceError
from gpuload.core.options import Options
from gpuload.sources.fetch import SourceFile, find, here
from gpuload.sources.footer import digests_of_parts
from gpuload.sources.frames import is_frame
from gpuload.sources.parallel import row_group_parts
from gpuload.sources.read import Source, open_file
from gpuload.sources.urls import changed

_THREADS = 16  # for footers, which are mostly waited for


@dataclass(frozen=True)
class FilePart:
    """Some rows of one file."""

    place: SourceFile  # the file, which may have no copy on this machine
    file: int  # its number
    groups: range | None  # its row groups that are read; None for all rows of a JSON file
    rows: range  # their rows
    take: int  # how many of these are wanted, the first ones
    state: bytes  # digest of the file's footer and size, or of a JSON file's content
    before: int = 0  # how many rows all files before this one have

    @property
    def key(self) -> tuple[int, int]:
        """The number of the file, and that of the part's first row in it: the order of parts."""
        return self.file, self.rows.start


@dataclass(frozen=True)
class OpenedFile:
    """A file of which the footer was read."""

    place: SourceFile  # the file
    source: Source  # its columns and its number of rows
    groups: tuple[int, ...] | None  # number of rows of each row group; None for JSON

    def parts(self, least: int) -> list[tuple[range | None, range]]:
        """Row groups and rows of its parts, which have at least so many rows, except for the last one."""
        if self.groups is None:
            return [(None, range(self.source.num_rows))]
        starts = list(accumulate(self.groups, initial=0))
        return [(g, range(starts[g.start], starts[g.stop])) for g in row_group_parts(self.groups, least)]


def open_files(files: Any, options: Options) -> list[OpenedFile]:
    """Opens files by their footers. JSON files are read as a whole: they do not say what columns they have. An
    `OptionError` if a frame is given, a `SourceError` if a file cannot be found or read, a `DataError` if there are no
    rows."""
    if is_frame(files):
        raise OptionError(
            f"files is a {type(files).__name__} in memory: workers read files. Write it to a parquet file on storage "
            "that all nodes share, or use load"
        )
    places = find(files, options.remote_timeout)
    with ThreadPoolExecutor(_THREADS) as pool:
        opened = list(pool.map(lambda place: _open_footer(place, options.cache_dir), places))
    if not any(file.source.num_rows for file in opened):
        raise DataError(f"{', '.join(place.name for place in places):.500}: no rows")
    return opened


def _open_footer(place: SourceFile, cache_dir: str | None) -> OpenedFile:
    place = here(place, cache_dir, read_in_place=True)
    if place.place is None:  # workers have other working directories
        place = replace(place, path=os.path.abspath(place.path))
    source = open_file(place)
    if place.format != "parquet":
        return OpenedFile(place, source, None)
    assert source.file is not None
    with source.file.open() as raw:
        metadata = pq.read_metadata(raw)
    counts = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    return OpenedFile(place, source, counts)


def state_of(source: Source) -> bytes:
    """Digest of what identifies the content of a source."""
    return hashlib.blake2b(source.identity, digest_size=16).digest()


def open_part(part: FilePart, cache_dir: str | None, only: str | None = None) -> Source:
    """Opens a part of a file for reading, wherever the file is, or `only` one column of it, if it is a parquet file; a
    `SourceError` if the file cannot be read, or is not the one that was found."""
    file, whole = _opened_again(part, cache_dir)
    return whole if part.groups is None else open_file(file, groups=part.groups, only=only)


def _opened_again(part: FilePart, cache_dir: str | None) -> tuple[SourceFile, Source]:
    """The whole file of a part; a `SourceError` if it is not the one that was found."""
    file = here(part.place, cache_dir, read_in_place=True)
    source = open_file(file)
    if state_of(source) != part.state:
        raise changed(file.name)
    return file, source


def all_parts(opened: Sequence[OpenedFile], least: int, max_rows: int = -1) -> list[FilePart]:
    """The parts of all files, in order, of at least so many rows, except for the last one of a file; of the first
    `max_rows` rows only, or with -1, of all."""
    parts: list[FilePart] = []
    left = max_rows if max_rows > 0 else sum(file.source.num_rows for file in opened)
    before = 0
    for number, file in enumerate(opened):
        state = state_of(file.source)
        for groups, rows in file.parts(least):
            if take := min(left, len(rows)):
                parts.append(FilePart(file.place, number, groups, rows, take, state, before))
                left -= take
        before += file.source.num_rows
    return parts


def part_digests(parts: Sequence[FilePart], column: str, cache_dir: str | None) -> tuple[bytes, list[bytes]]:
    """The digest of a column of a file, as `Source.content` returns it, and those of all its parts; a `SourceError` if
    the file cannot be read, or is not the one that was found."""
    file, source = _opened_again(parts[0], cache_dir)
    if parts[0].groups is None:
        assert source.content is not None
        digest = source.content(column)
        return digest, [digest]
    assert source.file is not None
    groups = [part.groups for part in parts if part.groups is not None]
    try:
        digests = digests_of_parts(source.file, [column], groups)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{file.name}: damaged parquet file ({error}): download it again") from error
    source.file.check()
    return digests
