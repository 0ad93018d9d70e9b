"""The cache directory is resolved in one place, files are replaced as a whole, and nothing unfinished remains."""

import errno
import os
import pwd
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

import gpuload
from gpuload.core import files
from gpuload.core.files import PartialDirectory, cache_root, partial_bytes, remove_orphans, replacing


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GPULOAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_root() == tmp_path / ".cache" / "gpuload"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "gpuload"
    monkeypatch.setenv("GPULOAD_CACHE", "~/mine")
    assert cache_root() == tmp_path / "mine"
    assert cache_root("~/given") == tmp_path / "given"
    assert cache_root("") == tmp_path / "mine"


def test_the_cache_directory_of_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_entry(number: int) -> Any:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for name in ("GPULOAD_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_root() == Path("/.cache/gpuload")
    assert cache_root("~") == Path("/")
    assert cache_root(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert cache_root("~nobody-of-this-name/x") == tmp_path / "~nobody-of-this-name" / "x"  # as for a shell


def test_a_relative_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert cache_root("here") == tmp_path / "here"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cache_root("here") == Path("here")  # which cannot be written, and a report says so


def test_replacing_a_file(tmp_path: Path) -> None:
    file = tmp_path / "directory" / "file"
    for content in ("first", "second"):
        with replacing(file) as partial:
            partial.write_text(content)
            assert not file.exists() or file.read_text() == "first"
        assert file.read_text() == content
    with pytest.raises(ZeroDivisionError), replacing(file) as partial:
        partial.write_text(f"half of {1 / 0}")
    assert file.read_text() == "second"
    assert list(file.parent.iterdir()) == [file]


# Writes into a directory for unfinished files, until it is killed.
WRITER = """
import sys, time
from pathlib import Path
from gpuload.core.files import PartialDirectory
unfinished = PartialDirectory(Path(sys.argv[1]))
(unfinished.path / "half").write_bytes(bytes(1000))
print(unfinished.path.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that writes into a partial directory, and that directory."""
    env = os.environ | {"PYTHONPATH": str(Path(gpuload.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], env=env, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, tmp_path / process.stdout.readline().strip()
        process.kill()


def test_orphans_are_removed_once_their_process_is_gone(
    tmp_path: Path, writer: tuple[subprocess.Popen[str], Path]
) -> None:
    process, partial = writer
    remove_orphans(tmp_path)
    assert (partial / "half").exists()
    assert partial_bytes(tmp_path) == 1000
    process.kill()
    process.wait(10)
    PartialDirectory(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def test_files_of_other_programs_are_not_orphans(tmp_path: Path) -> None:
    (tmp_path / "film.mp4.partial").touch()
    (tmp_path / "copy.partial").mkdir()
    (tmp_path / f"{'a' * 32}.partial").touch()
    remove_orphans(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "lock", ["none", "a file", "an empty file", "a directory", "a link", "a broken link", "a pipe"]
)
def test_directories_with_such_a_name_of_other_programs(lock: str, tmp_path: Path) -> None:
    """They are neither removed nor changed, and nobody is waited for."""
    parent, outside = tmp_path / "parent", tmp_path / "outside"
    other = PartialDirectory(outside)
    for name in ("a" * 32, "thirty-two characters of a name."):
        theirs = parent / f"{name}.partial"
        theirs.mkdir(parents=True)
        (theirs / "film.mp4").write_text("precious")
        if lock.endswith("file"):
            (theirs / "lock").write_text("" if "empty" in lock else "mine")
        elif lock == "a directory":
            (theirs / "lock").mkdir()
        elif lock.endswith("link"):
            (theirs / "lock").symlink_to(outside / "missing" if "broken" in lock else other.path / "lock")
        elif lock == "a pipe":
            os.mkfifo(theirs / "lock")
    (parent / f"{'b' * 32}.partial").symlink_to(other.path)
    before = sorted(parent.rglob("*"))
    other._lock.close()  # its process was killed
    with replacing(tmp_path / "parent" / "file") as partial:
        partial.write_text("new")
    assert partial_bytes(parent) == 0
    (parent / "file").unlink()
    assert sorted(parent.rglob("*")) == before
    assert all(file.read_text() == "precious" for file in parent.rglob("film.mp4"))
    assert list(outside.iterdir()) == [other.path]


def test_an_orphan_whose_removal_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What says whose it is goes last."""
    orphan = PartialDirectory(tmp_path)
    for name in ("a", "lock.txt", "z"):
        (orphan.path / name).touch()
    orphan._lock.close()
    real = Path.unlink
    for after in range(5):
        calls = iter(range(100))

        def unlink(path: Path, missing_ok: bool = False, calls: Any = calls, after: int = after) -> None:
            if next(calls) == after:
                raise KeyboardInterrupt
            real(path, missing_ok)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", unlink)
            with suppress(KeyboardInterrupt):
                remove_orphans(tmp_path)
        assert not orphan.path.exists() or (orphan.path / "lock").exists()
    remove_orphans(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # bytes of a file, as a full disk has none
    try:
        with pytest.raises(OSError, match="File too large"):
            PartialDirectory(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list((tmp_path / "full").iterdir()) == []


def test_a_directory_that_is_removed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, removed = files._lock, []

    def lock(file: Any, wait: bool) -> None:
        if wait and not removed:  # another process takes it for an orphan
            removed.append(True)
            remove_orphans(tmp_path)
        real(file, wait)

    monkeypatch.setattr(files, "_lock", lock)
    unfinished = PartialDirectory(tmp_path)
    assert removed
    assert list(tmp_path.iterdir()) == [unfinished.path]
    remove_orphans(tmp_path)
    assert unfinished.path.exists()
    unfinished.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("no_locks", ["this file system", "this operating system"])
def test_orphans_without_locks_are_removed_by_age(
    no_locks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLocks:
        LOCK_EX = LOCK_NB = 0

        @staticmethod
        def flock(*arguments: Any) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files, "fcntl", NoLocks if no_locks == "this file system" else None)
    old, young = PartialDirectory(tmp_path).path, PartialDirectory(tmp_path).path
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    remove_orphans(tmp_path)
    assert list(tmp_path.iterdir()) == [young]
