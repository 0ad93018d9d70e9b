"""A store of token ids that many machines share: a directory that all of them mount, or a URL.

    tokens/KEY.arrow              one entry per file, as in every token cache: a load finds it
    pieces/KEY/FIRST-END.arrow    the ids of some rows of a file that is not complete
    store.json                    names the store: a directory without it is not the one that was mounted

A file appears under its name as a whole or not at all: in a directory it is renamed, and object stores only have whole
objects. Loads only read from a URL: they copy the entries that they need into their own cache.
"""

import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from gpuload.core.errors import GpuloadError, StoreError
from gpuload.core.files import replacing
from gpuload.sources.fetch import ATTEMPTS
from gpuload.sources.urls import is_url, reason_of, without_secrets

_ABOUT = "store.json"
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_Result = TypeVar("_Result")


class SharedStore:
    """A directory or a URL with files under names such as `tokens/KEY.arrow`.

    Args:
        location: a path that all machines can use, or a URL of any file system of fsspec.

    Attributes:
        location: the same; a path is absolute.
        shown: for messages, without what may be secret.
    """

    def __init__(self, location: str):
        self.location = location if is_url(location) else str(Path(location).expanduser().absolute())
        self.shown = without_secrets(self.location)

    @cached_property
    def _remote(self) -> tuple[Any, str] | None:
        """The file system and the path in it, of a URL."""
        if not is_url(self.location):
            return None
        import fsspec

        try:
            fs, path = fsspec.core.url_to_fs(self.location, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StoreError(f"{self.shown}: {error}: pip install 'gpuload[remote]'") from None
        return fs, str(path).rstrip("/")

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "shown": self.shown}

    # -- the store itself ----------------------------------------------------------------------------------------------

    def create(self) -> str:
        """Makes the store if there is none, and returns its name.

        Raises:
            StoreError: it cannot be written.
        """
        if (about := self.read(_ABOUT)) is None:
            self._make_root()
            self.write(_ABOUT, json.dumps({"name": uuid.uuid4().hex}).encode())
            about = self.read(_ABOUT) or b"{}"
        try:
            return str(json.loads(about)["name"])
        except (ValueError, KeyError, TypeError):
            raise StoreError(f"{self.shown}: {_ABOUT} is damaged: remove this file") from None

    def check(self, name: str) -> None:
        """Checks that this is the store that `create` has made, and not an empty directory in its place.

        Raises:
            StoreError: it is not.
        """
        found = self.read(_ABOUT)
        if found is None or name.encode() not in found:
            raise StoreError(
                f"{self.shown}: the store is not there on this node: mount the same storage at this path on all "
                "nodes, or use a URL"
            )

    def _make_root(self) -> None:
        if self._remote is None:
            self._tried("write", lambda: Path(self.location).mkdir(parents=True, exist_ok=True))

    # -- files ---------------------------------------------------------------------------------------------------------

    def names(self, folder: str) -> set[str]:
        """The names of the files in a folder; none if there is no such folder."""

        def find() -> set[str]:
            try:
                if self._remote is None:
                    return {entry.name for entry in os.scandir(Path(self.location, folder)) if entry.is_file()}
                fs, root = self._remote
                return {PurePosixPath(path).name for path in fs.ls(f"{root}/{folder}", detail=False)}
            except FileNotFoundError:
                return set()

        return self._tried("read", find)

    def exists(self, name: str) -> bool:
        """Whether there is a file."""
        if self._remote is None:
            return Path(self.location, name).is_file()
        fs, root = self._remote
        return bool(self._tried("read", lambda: fs.exists(f"{root}/{name}")))

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if there is none."""

        def content() -> bytes | None:
            try:
                if self._remote is None:
                    return Path(self.location, name).read_bytes()
                fs, root = self._remote
                return bytes(fs.cat_file(f"{root}/{name}"))
            except FileNotFoundError:
                return None

        return self._tried("read", content)

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file, or replaces it."""
        if self._remote is None:
            self._tried("write", lambda: self._replace(name, lambda path: path.write_bytes(content)))
            return
        fs, root = self._remote
        self._tried("write", lambda: fs.pipe_file(f"{root}/{name}", content))

    def put(self, local: Path, name: str) -> None:
        """Copies a local file into the store."""
        if self._remote is None:
            self._tried("write", lambda: self._replace(name, lambda path: shutil.copyfile(local, path)))
            return
        fs, root = self._remote
        self._tried("write", lambda: fs.put_file(str(local), f"{root}/{name}"))

    def get(self, name: str, local: Path) -> bool:
        """Copies a file of the store to a local path, at which it appears as a whole; False if there is none."""

        def copy() -> bool:
            try:
                with replacing(local) as partial:
                    if self._remote is None:
                        shutil.copyfile(Path(self.location, name), partial)
                    else:
                        fs, root = self._remote
                        fs.get_file(f"{root}/{name}", str(partial))
                return True
            except FileNotFoundError:
                return False
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
                raise StoreError(
                    f"cannot copy {name} of the store {self.shown} to {local.parent}: {error.strerror}: free space "
                    "there"
                ) from None

        return self._tried("read", copy)

    def remove(self, name: str) -> None:
        """Removes a file or a folder, if it is there."""

        def remove() -> None:
            with suppress(FileNotFoundError):
                if self._remote is None:
                    path = Path(self.location, name)
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                else:
                    fs, root = self._remote
                    fs.rm(f"{root}/{name}", recursive=True)

        self._tried("write", remove)

    def _place(self, name: str) -> Path:
        """The path of a file in a directory, whose folder is made if the store itself is there."""
        path = Path(self.location, name)
        if not Path(self.location).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "the store is not there", self.location)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _replace(self, name: str, write: Callable[[Path], Any]) -> None:
        with replacing(self._place(name)) as partial:
            write(partial)

    def _tried(self, what: str, work: Callable[[], _Result]) -> _Result:
        """The result of some work, tried again if the storage fails.

        Raises:
            StoreError: it cannot be done.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return work()
            except GpuloadError:
                raise
            except Exception as error:  # every file system raises errors of its own
                full = isinstance(error, OSError) and error.errno in _NO_SPACE
                if attempt == ATTEMPTS or full or isinstance(error, _FINAL):
                    raise self._error(what, error, full) from None
                time.sleep(0.2 * attempt)
        raise AssertionError

    def _error(self, what: str, error: Exception, full: bool) -> StoreError:
        reason = getattr(error, "strerror", None) or reason_of(error)
        if full:
            remedy = "free space there, and run the command again: what is complete remains"
        elif isinstance(error, PermissionError):
            remedy = f"give this user, on every node, the permission to {what} there"
        else:
            remedy = "check that the storage is there on all nodes, and run the command again: what is complete remains"
        return StoreError(f"cannot {what} the store {self.shown}: {reason}: {remedy}")


def fetched(cache_dir: str | None, key: str, path: Path) -> bool:
    """Copies an entry from a store into the local token cache.

    Args:
        cache_dir: the option; nothing is done unless it is a URL.
        key: of the entry.
        path: where the local token cache has it.

    Returns:
        Whether there was such an entry.

    Raises:
        StoreError: the store cannot be read.
    """
    return bool(cache_dir) and is_url(str(cache_dir)) and SharedStore(str(cache_dir)).get(f"tokens/{key}.arrow", path)
