"""The cache directory is resolved in one place, files are replaced as a whole, and nothing unfinished remains."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

import gpuload
from gpuload import files
from gpuload.files import PartialDirectory, cache_root, partial_bytes, remove_orphans, replacing


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
from gpuload.files import PartialDirectory
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
