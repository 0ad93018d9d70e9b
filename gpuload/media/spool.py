"""The bytes of images that are in the data itself, in files on disk: row groups cannot be read at random.

There is one file for each source, in a directory that is removed with the dataset. If the ids of a source are cached,
its file has a second name, by which later loads find it; they link it into their own directory, so that removing it
there does not take it from them. On a disk that cannot be written, they use it where it is.
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
from gpuload.media import IMAGES
from gpuload.media.headers import ImageError


class Spool:
    """The files of a load. It can be pickled for other processes, which only read.

    Args:
        directory: for the files. It is made when there is something to write.

    Attributes:
        unkept: whether the file system has no links, so that later loads do not find what was written.
    """

    unkept = False

    def __init__(self, directory: Path):
        self._owner: Unfinished | None = None
        self._directory = directory
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._paths: dict[str, Path] = {}  # source → file
        self._found: dict[str, int] = {}  # name of a file of an earlier load → its bytes

    def add(self, source: str, data: Any) -> tuple[int, int]:
        """Writes the bytes of an image of a source.

        Returns:
            Where they begin in its file, and their checksum.

        Raises:
            StoreError: the directory cannot be written.
        """
        with self._lock:
            if source not in self._sizes:  # never into the file of an earlier load
                self._paths[source], self._sizes[source] = self._folder() / uuid.uuid4().hex, 0
            at = self._sizes[source]
            try:
                with open(self._paths[source], "ab") as file:
                    file.write(data)
            except OSError as error:
                raise _not_stored(self._directory, error) from error
            self._sizes[source] += len(data)
        return at, zlib.crc32(data)

    def read(self, source: str, at: int, size: int, checksum: int) -> bytes:
        """The bytes of an image of a source. If they are damaged, later loads do not find its file.

        Raises:
            OSError: the file cannot be read.
            ImageError: the bytes are others than were written, or the file is gone.
        """
        try:
            with open(self._paths[source], "rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, at)
        except FileNotFoundError:
            raise ImageError(
                f"its copy in {self._directory} is gone, because the process that made this dataset has ended or no "
                "longer has it. Keep the dataset there, or load again"
            ) from None
        if zlib.crc32(data) != checksum:
            with suppress(OSError):
                self._kept(self._paths[source].stem).unlink()
            raise ImageError(f"its copy in {self._directory} has been damaged. Load again")
        return data

    def written(self, source: str) -> tuple[str, int] | None:
        """The name of the file that was written of a source, and its bytes so far; None if there is none."""
        return (self._paths[source].name, self._sizes[source]) if source in self._sizes else None

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
        sizes = {}
        for source in self._sizes.keys() & set(sources):
            path = self._paths[source]
            sizes[path.name] = self._sizes[source]
            self.unkept |= not _link(path, self._kept(path.name))
        together = accumulate((sizes | self._found).values())
        return {self._kept(name) for name, held in zip(sizes | self._found, together, strict=True) if held <= bound}

    def find(self, source: str, name: str, size: int) -> bool:
        """Whether there is the file that an earlier load has made of a source, and it can be used."""
        kept = path = self._kept(name)
        with suppress(OSError):
            os.utime(kept)  # the time of the last use
        with self._lock:
            if source in self._sizes:  # a file that was given twice, of which this load has made one
                return False
            try:
                if os.access(self._directory, os.W_OK):  # else nobody removes it
                    path = self._folder() / name
                    if not _link(kept, path):
                        return False
                if path.stat().st_size < size:  # it has more of a file that was given twice
                    return False
            except OSError:
                return False
            self._paths[source], self._found[name] = path, size
        return True

    def _folder(self) -> Path:
        """The directory of this load."""
        if self._owner is None:
            try:
                self._owner = Unfinished(self._directory)
            except OSError as error:
                raise _not_stored(self._directory, error) from error
        return self._owner.path

    def _kept(self, name: str) -> Path:
        return self._directory / f"{name}{IMAGES}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Spool":
        return self  # a copy in this process has the same files, for as long as one of them is there

    def __getstate__(self) -> dict[str, Any]:
        return {"_directory": self._directory, "_paths": self._paths, "_owner": None}


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
