"""The bytes of images that are in the data itself, in one file on disk: row groups cannot be read at random."""

import os
import threading
from pathlib import Path
from typing import Any

from gpuload.core.errors import StoreError
from gpuload.core.files import Unfinished


class Spool:
    """A file of images, which is removed with this object. It can be pickled for other processes, which only read.

    Args:
        directory: for the file.

    Raises:
        StoreError: it cannot be written.
    """

    def __init__(self, directory: Path):
        try:
            self._owner: Unfinished | None = Unfinished(directory)
            self._path = self._owner.path / "images"
            self._file = open(self._path, "wb")  # noqa: SIM115
        except OSError as error:
            raise StoreError(f"images cannot be stored in {directory}: {error}") from error
        self._lock = threading.Lock()
        self._size = 0

    def add(self, data: Any) -> int:
        """Writes the bytes of an image, and returns where they begin.

        Raises:
            StoreError: there is no space left.
        """
        with self._lock:
            at = self._size
            try:
                self._file.write(data)
            except OSError as error:
                raise StoreError(f"images cannot be stored in {self._path.parent}: {error}") from error
            self._size += len(data)
        return at

    def finish(self) -> None:
        """Makes what was written readable.

        Raises:
            StoreError: there is no space left.
        """
        try:
            self._file.flush()
        except OSError as error:
            raise StoreError(f"images cannot be stored in {self._path.parent}: {error}") from error

    def read(self, at: int, size: int) -> bytes:
        """Some bytes.

        Raises:
            OSError: the file cannot be read.
        """
        with open(self._path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, at)

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_size": self._size, "_owner": None}
