"""The cache directory, how files are written into it, and how those of users are opened."""

import ctypes
import errno
import os
import re
import shutil
import stat
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PARTIAL, _LOCK = ".partial", "lock"
_NAME = re.compile(rf"[0-9a-f]{{32}}\{_PARTIAL}")
_MARK = b"gpuload: unfinished files\n"  # what `lock` has: other programs may use such names, too
_ABANDONED = 24 * 3600  # seconds after which unfinished files that cannot be locked are those of a killed process


def cache_root(given: str | os.PathLike[str] | None = None) -> Path:
    """The directory for everything gpuload caches: remote files, token ids, tokenizer tables, the demo's tokenizer.

    Args:
        given: the `cache_dir` option. None, or the URL of a shared store (`cache/shared_store.py`): `$GPULOAD_CACHE`,
            else `$XDG_CACHE_HOME/gpuload`, else `~/.cache/gpuload`.

    Returns:
        An absolute path: what is stored there is found after the process went to another directory.
    """
    if not given or "://" in str(given):
        given = os.environ.get("GPULOAD_CACHE")
    if not given:
        given = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "gpuload"
    path = os.path.expanduser(given)
    if path.partition("/")[0] == "~":  # neither $HOME nor an entry for the user: the home is /, as in containers
        path = path[1:] or "/"
    with suppress(FileNotFoundError):  # the current directory was removed
        return Path(path).absolute()
    return Path(path)


def files_in(directory: Path, end: str) -> list[Path]:
    """What a directory has whose names end with `end`; nothing if it is missing, or closed to this user."""
    with suppress(OSError):
        return [directory / name for name in os.listdir(directory) if name.endswith(end)]
    return []


def open_regular(path: str) -> BinaryIO:
    """Opens a file for reading; an `OSError` if it cannot be opened, or is something else: nobody is waited for who
    writes to a named pipe."""
    raw = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        raw.close()
        raise OSError(errno.EINVAL, "not a regular file", path)
    return raw


class PartialDirectory:
    """A directory for unfinished files, each of which is renamed to its place once it is complete.

    Its name ends with `.partial`, and a file in it says whose it is and is locked until `remove`. If the process is
    killed, the lock is released, and `remove_orphans` removes the directory. Its parent, on the file system of the
    files' places, is made if it is missing.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, parent: Path):
        parent.mkdir(parents=True, exist_ok=True)
        remove_orphans(parent)
        while True:
            self.path = parent / f"{uuid.uuid4().hex}{_PARTIAL}"
            self.path.mkdir()
            try:
                self._lock = open(self.path / _LOCK, "xb", buffering=0)  # noqa: SIM115
                self._lock.write(_MARK)
                with suppress(OSError):  # a file system without locks
                    _lock(self._lock, wait=True)
                if (self.path / _LOCK).exists():
                    return
                self._lock.close()
            except FileNotFoundError:
                pass
            except OSError:
                shutil.rmtree(self.path, ignore_errors=True)
                raise
            # Another process took it for an orphan before it was locked.

    def remove(self) -> None:
        """Removes the directory with all files that were not renamed."""
        _remove(self.path)
        self._lock.close()


class Unfinished(PartialDirectory):
    """A directory for files that are removed with this object, unless they were renamed to their places."""

    def __init__(self, parent: Path):
        super().__init__(parent)
        self._finalizer = weakref.finalize(self, _remove_own, self.path, self._lock, os.getpid())

    def remove(self) -> None:
        self._finalizer()

    def __reduce__(self) -> tuple[Any, ...]:  # another process does not own it
        return type(None), ()


def _remove_own(path: Path, lock: Any, process: int) -> None:
    if os.getpid() == process:  # not in a forked one
        _remove(path)
        lock.close()


def _remove(path: Path) -> None:
    """Removes a directory for unfinished files as far as possible, and last the file that says what it is."""
    with suppress(OSError):
        for child in path.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child, ignore_errors=True)
            elif child.name != _LOCK:
                child.unlink(missing_ok=True)
        if all(child.name == _LOCK for child in path.iterdir()):
            shutil.rmtree(path)


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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which is made if it is missing. Waits for other processes that hold it.

    Raises:
        OSError: the file cannot be written, or there are no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        _lock(file, wait=True)
        yield


def exchanged(one: Path, other: Path) -> bool:
    """Exchanges two directories in one step. False if the system or the file system has no such step.

    Raises:
        OSError: they cannot be renamed.
    """
    paths, here, swap = (os.fsencode(one), os.fsencode(other)), -100, 2  # AT_FDCWD, and the flag of both systems
    try:
        system = ctypes.CDLL(None, use_errno=True)
        if hasattr(system, "renameat2"):
            failed = system.renameat2(here, paths[0], here, paths[1], swap)
        else:  # macOS
            failed = system.renamex_np(*paths, swap)
    except (AttributeError, OSError, TypeError):  # the last: Windows has no library without a name
        return False
    if failed and ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))
    return not failed


def remove_orphans(directory: Path) -> None:
    """Removes what killed processes left unfinished in a directory."""
    for partial in _partial_directories(directory):
        with suppress(OSError), _own_lock(partial, os.O_RDWR) as file:
            try:
                _lock(file, wait=False)
            except BlockingIOError:
                continue  # in use
            except OSError:  # no locks here: a guess
                if time.time() - partial.stat().st_mtime < _ABANDONED:
                    continue
            _remove(partial)


def partial_bytes(directory: Path) -> int:
    """Bytes of all unfinished files in a directory, except for those that are also elsewhere."""
    held = 0
    for partial in _partial_directories(directory):
        for file in partial.glob("*"):
            with suppress(OSError):  # another process may have removed it
                state = file.stat()
                held += state.st_size if file.name != _LOCK and state.st_nlink == 1 else 0
    return held


def _partial_directories(directory: Path) -> Iterator[Path]:
    """Those that a `PartialDirectory` has made. The user may have chosen a directory in which other programs have files
    with such names."""
    for path in files_in(directory, _PARTIAL):
        if _NAME.fullmatch(path.name) and os.path.isdir(path) and not os.path.islink(path):
            with suppress(OSError), _own_lock(path, os.O_RDONLY):
                yield path


@contextmanager
def _own_lock(partial: Path, mode: int) -> Iterator[int]:
    """Opens, with a mode of `os.open`, the file that says that a directory is for unfinished files.

    Raises:
        OSError: it is something else. A link is not followed, and nobody is waited for who writes to a named pipe.
    """
    number = os.open(partial / _LOCK, mode | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode) or os.read(number, len(_MARK)) != _MARK:
            raise OSError(errno.EINVAL, "not a directory of gpuload", str(partial))
        yield number
    finally:
        os.close(number)


def _lock(file: BinaryIO | int, wait: bool) -> None:
    """Locks a file until it is closed, or its process ends.

    Raises:
        BlockingIOError: without `wait`, another process has locked it.
        OSError: the file system, or the operating system, has no such locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
