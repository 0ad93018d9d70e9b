"""The bytes of images that are in the data itself, in files on disk: row groups cannot be read at random.

There is one file for each source, in a directory that is removed with the dataset. If the ids of a source are cached,
its file has a second name, by which later loads find it; they link it into their own directory, so that removing it
there does not take it from them.
"""

import os
import threading
import uuid
import zlib
from collections.abc import Collection
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from gpuload.core.errors import StoreError
from gpuload.core.files import Unfinished
from gpuload.media.headers import ImageError

IMAGES = ".images"
"""How the names of files end that later loads may find."""


class Spool:
    """The files of a load. It can be pickled for other processes, which only read.

    Args:
        directory: for the files.

    Raises:
        StoreError: it cannot be written.
    """

    def __init__(self, directory: Path):
        try:
            self._owner: Unfinished | None = Unfinished(directory)
        except OSError as error:
            raise _not_stored(directory, error) from error
        self._directory, self._path = directory, self._owner.path
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._names: dict[str, str] = {}  # source → file
        self._found: dict[str, int] = {}  # file of an earlier load → its bytes

    def add(self, source: str, data: Any) -> tuple[int, int]:
        """Writes the bytes of an image of a source.

        Returns:
            Where they begin in its file, and their checksum.

        Raises:
            StoreError: there is no space left.
        """
        with self._lock:
            if source not in self._sizes:  # never into the file of an earlier load
                self._names[source], self._sizes[source] = uuid.uuid4().hex, 0
            at = self._sizes[source]
            try:
                with open(self._path / self._names[source], "ab") as file:
                    file.write(data)
            except OSError as error:
                raise _not_stored(self._directory, error) from error
            self._sizes[source] += len(data)
        return at, zlib.crc32(data)

    def read(self, source: str, at: int, size: int, checksum: int) -> bytes:
        """The bytes of an image of a source. If they are damaged, later loads do not find its file.

        Raises:
            OSError: the file cannot be read.
            ImageError: the bytes are others than were written.
        """
        with open(self._path / self._names[source], "rb", buffering=0) as file:
            data = os.pread(file.fileno(), size, at)
        if zlib.crc32(data) != checksum:
            with suppress(OSError):
                self._kept(self._names[source]).unlink()
            raise ImageError(f"its copy in {self._directory} has been damaged. Load again")
        return data

    def written(self, source: str) -> tuple[str, int] | None:
        """The name of the file that was written of a source, and its bytes so far; None if there is none."""
        return (self._names[source], self._sizes[source]) if source in self._sizes else None

    @property
    def nbytes(self) -> int:
        """Bytes that were written, or found."""
        return sum(self._sizes.values()) + sum(self._found.values())

    def keep(self, sources: Collection[str], bound: int) -> set[Path]:
        """Lets later loads find the files of some sources, if the file system has links.

        Args:
            sources: that were written.
            bound: bytes.

        Returns:
            Those of this load that may stay: what was written, and of what was found as much as fits into the bound.
        """
        sizes = {self._names[source]: size for source, size in self._sizes.items() if source in sources}
        for name in sizes:
            _link(self._path / name, self._kept(name))
        together = accumulate((sizes | self._found).values())
        return {self._kept(name) for name, held in zip(sizes | self._found, together, strict=True) if held <= bound}

    def find(self, source: str, name: str, size: int) -> bool:
        """Whether there is the file that an earlier load has made of a source."""
        kept = self._kept(name)
        try:
            os.utime(kept)  # the time of the last use
            found = _link(kept, self._path / name) and (self._path / name).stat().st_size == size
        except OSError:
            return False
        with self._lock:
            if source in self._sizes:  # a file that was given twice, of which this load has made one
                return False
            self._names[source] = name
            if found:
                self._found[name] = size
        return found

    def _kept(self, name: str) -> Path:
        return self._directory / f"{name}{IMAGES}"

    def __getstate__(self) -> dict[str, Any]:
        return {"_directory": self._directory, "_path": self._path, "_names": self._names, "_owner": None}


def _link(old: Path, new: Path) -> bool:
    try:
        os.link(old, new)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


def _not_stored(directory: Path, error: OSError) -> StoreError:
    return StoreError(f"images cannot be stored in {directory}: {error}")
