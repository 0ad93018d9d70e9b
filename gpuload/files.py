"""The cache directory, and how files are written into it."""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PARTIAL, _LOCK = ".partial", "lock"
_NAME_LENGTH = len(uuid.UUID(int=0).hex + _PARTIAL)
_ABANDONED = 24 * 3600  # seconds after which unfinished files that cannot be locked are those of a killed process


def cache_root(given: str | os.PathLike[str] | None = None) -> Path:
    """The directory for everything gpuload caches: remote files, token ids, tokenizer tables, the demo's tokenizer.

    Args:
        given: the `cache_dir` option. None, or the URL of a shared store (`cache/shared.py`): `$GPULOAD_CACHE`, else
            `$XDG_CACHE_HOME/gpuload`, else `~/.cache/gpuload`.
    """
    if not given or "://" in str(given):
        given = os.environ.get("GPULOAD_CACHE")
    if not given:
        given = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "gpuload"
    return Path(given).expanduser()


class PartialDirectory:
    """A directory for unfinished files, each of which is renamed to its place once it is complete.

    Its name ends with `.partial`, and a file in it is locked until `remove`. If the process is killed, the lock is
    released, and `remove_orphans` removes the directory.

    Args:
        parent: where to make it, on the file system of the files' places; made if missing.

    Attributes:
        path: of the directory.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, parent: Path):
        parent.mkdir(parents=True, exist_ok=True)
        remove_orphans(parent)
        while True:
            self.path = parent / f"{uuid.uuid4().hex}{_PARTIAL}"
            self.path.mkdir()
            with suppress(FileNotFoundError):
                self._lock = open(self.path / _LOCK, "ab")  # noqa: SIM115
                with suppress(OSError):  # a file system without locks
                    _lock(self._lock, wait=True)
                if (self.path / _LOCK).exists():
                    return
                self._lock.close()
            # Another process took it for an orphan before it was locked.

    def remove(self) -> None:
        """Removes the directory with all files that were not renamed."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path, which is renamed to `path` if the block succeeds.

    Other processes see the old file or the new one, never half of one. If the block raises, nothing is left behind.

    Raises:
        OSError: the directory or the file cannot be written.
    """
    directory = PartialDirectory(path.parent)
    try:
        yield directory.path / path.name
        os.replace(directory.path / path.name, path)
    finally:
        directory.remove()


def remove_orphans(directory: Path) -> None:
    """Removes what killed processes left unfinished in a directory."""
    for partial in _partial_directories(directory):
        with suppress(OSError), ExitStack() as stack:
            try:
                _lock(stack.enter_context(open(partial / _LOCK, "ab")), wait=False)
            except BlockingIOError:
                continue  # in use
            except OSError:  # no locks here: a guess
                if time.time() - partial.stat().st_mtime < _ABANDONED:
                    continue
            shutil.rmtree(partial)


def partial_bytes(directory: Path) -> int:
    """Bytes of all unfinished files in a directory."""
    held = 0
    for partial in _partial_directories(directory):
        for file in partial.glob("*"):
            with suppress(OSError):  # another process may have removed it
                held += file.stat().st_size
    return held


def _partial_directories(directory: Path) -> list[Path]:
    # The user may have chosen a directory in which other programs have files ending with .partial.
    return [path for path in directory.glob(f"*{_PARTIAL}") if len(path.name) == _NAME_LENGTH and path.is_dir()]


def _lock(file: BinaryIO, wait: bool) -> None:
    """Locks a file until it is closed, or its process ends.

    Raises:
        BlockingIOError: without `wait`, another process has locked it.
        OSError: the file system, or the operating system, has no such locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
