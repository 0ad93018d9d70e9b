"""The directories of the cache: what is in them, and what is removed."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpuload.cache.block_file import about
from gpuload.cache.faults import too_little_space
from gpuload.core.files import cache_root, files_in, partial_bytes, remove_orphans
from gpuload.media import IMAGES

IDS, COLUMNS = ".arrow", ".columns"  # how the names of entries, and of files of columns, end
_WHAT = {IDS: "ids", COLUMNS: "columns", IMAGES: "images"}
_MOST_BYTES = 20 * 10**9


def _directory(name: str, cache_dir: str | None = None) -> Path:
    """A directory of the cache; for the option see `files.cache_root`."""
    return cache_root(cache_dir) / name


tokens_directory = partial(_directory, "tokens")  # of entries
store_directory = partial(_directory, "store")  # of the files of stores on disk: entries, and columns
media_directory = partial(_directory, "media")  # of copies of images that are in the data itself
digests_directory = partial(_directory, "digests")  # of digests of files, and facts of tokenizers


def default_bound(directory: Path) -> int:
    """A tenth of the disk space that would be free without the cache, and at most `_MOST_BYTES`."""
    held = sum(size for _, size, _ in _entries(directory)) + partial_bytes(directory)
    return min(_MOST_BYTES, (_free(directory) + held) // 10)


def evict(directory: Path, bound: int, in_use: set[Path]) -> None:
    """Removes the least recently used entries that are not in use, until the rest, with what other processes are
    writing, has at most `bound` bytes."""
    entries = _entries(directory)
    held = sum(size for _, size, _ in entries) + partial_bytes(directory)
    for _, size, path in entries:
        if held > bound and path not in in_use:
            with suppress(OSError):
                path.unlink()
                held -= size


def has_room(directory: Path, needed: int) -> bool:
    """Whether there are so many bytes for a store, if all other files of stores are removed."""
    return _free(directory) + sum(size for _, size, _ in _entries(directory)) >= needed


def _free(directory: Path) -> int:
    # `Path.exists` raises an error where a directory is closed to this user.
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    return shutil.disk_usage(there).free


def make_room(directory: Path, needed: int, in_use: set[Path]) -> None:
    """Removes the least recently used files of stores that are not in use, if the disk has too little space for the
    bytes that are to be written; a `StoreError` if there is too little space all the same."""
    free = _free(directory)
    for _, size, path in _entries(directory):
        if free < needed and path not in in_use:
            with suppress(OSError):
                path.unlink()
                free += size
    if free < needed:
        raise too_little_space(directory, needed, free)


def clear(directory: Path) -> tuple[int, int]:
    """Removes all entries, and what killed processes left unfinished.

    Returns:
        The number of entries, and their bytes.
    """
    entries = _entries(directory)
    for _, _, path in entries:
        path.unlink(missing_ok=True)
    remove_orphans(directory)
    return len(entries), sum(size for _, size, _ in entries)


@dataclass(frozen=True)
class CachedFile:
    """An entry, for a list of them."""

    last_use: float  # seconds since 1970
    nbytes: int  # size of the entry
    what: str  # "ids", "columns", or "images"
    source: str | None  # the name of the file of which it was made; None if the entry is damaged
    rows: int  # number of its rows


def cached_files(directory: Path) -> list[CachedFile]:
    """All entries, most recently used first."""
    found = []
    for used, size, path in reversed(_entries(directory)):
        known = ("(copied from data)", 0) if path.suffix == IMAGES else about(path) or (None, 0)
        found.append(CachedFile(used, size, _WHAT[path.suffix], *known))
    return found


def _entries(directory: Path) -> list[tuple[float, int, Path]]:
    """Last use, bytes and path of every entry, least recently used first."""
    found = []
    for path in [path for suffix in _WHAT for path in files_in(directory, suffix)]:
        with suppress(OSError):  # another process may have removed it
            state = path.stat()
            found.append((state.st_mtime, state.st_size, path))
    return sorted(found)
