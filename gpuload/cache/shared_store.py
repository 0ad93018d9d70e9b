"""A store of token ids that many machines share: a directory that all of them mount, or a URL.

    tokens/KEY.arrow              one entry per file, as in every token cache: a load finds it
    pieces/KEY/FIRST-END.arrow    the ids of some rows of a file that is not complete
    store.json                    names the store: a directory without it is not the one that was mounted

A file appears under its name as a whole or not at all: in a directory it is renamed, and object stores only have whole
objects. Loads only read from a URL: they copy the entries that they need into their own cache.
"""

import errno
import json
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from gpuload.core.errors import StoreError
from gpuload.core.files import replacing
from gpuload.sources.places import NO_SPACE, tried
from gpuload.sources.urls import is_url, reason_of, without_secrets

_ABOUT = "store.json"

_Result = TypeVar("_Result")


class SharedStore:
    """A directory that all machines can use, or the URL of any file system of fsspec, with files under names such as
    `tokens/KEY.arrow`. `shown` is its location for messages, without what may be secret."""

    def __init__(self, location: str):
        self.location = location if is_url(location) else str(Path(location).expanduser().absolute())
        self.shown = without_secrets(self.location)

    @cached_property
    def _root(self) -> tuple[Any, str]:
        """The file system and the path in it."""
        import fsspec

        if not is_url(self.location):
            return fsspec.filesystem("file"), self.location
        try:
            fs, path = fsspec.core.url_to_fs(self.location, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StoreError(f"{self.shown}: {error}: pip install 'gpuload[remote]'") from None
        return fs, str(path).rstrip("/")

    @property
    def _directory(self) -> Path | None:
        """The store on a mounted file system, where files are written under other names and renamed; None where there
        are only whole files."""
        from fsspec.implementations.local import LocalFileSystem

        fs, root = self._root
        return Path(root) if isinstance(fs, LocalFileSystem) else None

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "shown": self.shown}

    # -- the store itself ----------------------------------------------------------------------------------------------

    def create(self) -> str:
        """Makes the store if there is none, and returns its name; a `StoreError` if it cannot be written."""
        if (about := self.read(_ABOUT)) is None:
            if (directory := self._directory) is not None:
                self._tried("write", lambda *_: directory.mkdir(parents=True, exist_ok=True))
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

    # -- files ---------------------------------------------------------------------------------------------------------

    def names(self, folder: str) -> set[str]:
        """The names of the files in a folder; none if there is no such folder."""

        def find(fs: Any, path: str) -> set[str]:
            with suppress(FileNotFoundError):
                return {PurePosixPath(each["name"]).name for each in fs.ls(path, detail=True) if each["type"] == "file"}
            return set()

        return self._tried("read", find, folder)

    def exists(self, name: str) -> bool:
        """Whether there is a file."""
        return bool(self._tried("read", lambda fs, path: fs.exists(path), name))

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if there is none."""

        def content(fs: Any, path: str) -> bytes | None:
            with suppress(FileNotFoundError):
                return bytes(fs.cat_file(path))
            return None

        return self._tried("read", content, name)

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file, or replaces it."""
        self._write(name, lambda fs, path: fs.pipe_file(path, content))

    def put(self, local: Path, name: str) -> None:
        """Copies a local file into the store."""
        self._write(name, lambda fs, path: fs.put_file(str(local), path))

    def get(self, name: str, local: Path) -> bool:
        """Copies a file of the store to a local path, at which it appears as a whole; False if there is none."""

        def copy(fs: Any, path: str) -> bool:
            try:
                with replacing(local) as partial:
                    fs.get_file(path, str(partial))
                return True
            except FileNotFoundError:
                return False
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                raise StoreError(
                    f"cannot copy {name} of the store {self.shown} to {local.parent}: {error.strerror}: free space "
                    "there"
                ) from None

        return self._tried("read", copy, name)

    def remove(self, name: str) -> None:
        """Removes a file or a folder, if it is there."""

        def remove(fs: Any, path: str) -> None:
            with suppress(FileNotFoundError):
                fs.rm(path, recursive=True)

        self._tried("write", remove, name)

    def _write(self, name: str, fill: Callable[[Any, str], Any]) -> None:
        """Writes a file by a function of the file system and a path. In a directory, its folder is made, if the store
        itself is there."""

        def write(fs: Any, path: str) -> None:
            directory = self._directory
            if directory is None:
                fill(fs, path)
                return
            if not directory.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "the store is not there", self.location)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with replacing(Path(path)) as partial:
                fill(fs, str(partial))

        self._tried("write", write, name)

    def _tried(self, what: str, work: Callable[[Any, str], _Result], name: str = "") -> _Result:
        """The result of some work with the file system and the path of a file, tried again if the storage fails; a
        `StoreError` if it cannot be done."""
        fs, root = self._root
        return tried(lambda _: work(fs, f"{root}/{name}"), partial(self._error, what))

    def _error(self, what: str, error: Exception, _: int) -> StoreError:
        reason = getattr(error, "strerror", None) or reason_of(error)
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            remedy = "free space there, and run the command again: what is complete remains"
        elif isinstance(error, PermissionError):
            remedy = f"give this user, on every node, the permission to {what} there"
        else:
            remedy = "check that the storage is there on all nodes, and run the command again: what is complete remains"
        return StoreError(f"cannot {what} the store {self.shown}: {reason}: {remedy}")
