"""Paths, globs, directories and URLs → local files; remote ones are downloaded once.

A remote file is copied into the cache directory. The name of the copy is a digest of the URL and of what the server
says about the file's version (size, etag, time), so a changed file is downloaded again and an unchanged one is not. The
copy is written in a temporary directory and renamed once its size and its end are right, so that no process ever
sees half a file. A lock lets one of several processes download while the others wait for its copy.
"""

import codecs
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from gpuload.core.errors import SourceError
from gpuload.core.files import cache_root, replacing
from gpuload.core.options import Options
from gpuload.sources.arrow_files import saved_files
from gpuload.sources.remote import RemoteFile, in_place, version_of
from gpuload.sources.urls import is_url, reason_of, without_secrets

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}
_IN_FOLDERS = (".parquet", ".json", ".jsonl")  # other folders than those of `save_to_disk` have results of `map`, too
ATTEMPTS = 3
_Result = TypeVar("_Result")
_WITH_PACKAGES = ("http", "s3", "gs:", "gcs:")  # protocols whose packages the extra `remote` installs
_TAIL = 1 << 20  # bytes at the end of a copy that are examined
_NAME_LENGTH = 48  # characters of a remote file's name in its copy's name: file systems allow 255 bytes


@dataclass(frozen=True)
class SourceFile:
    """One local file.

    Attributes:
        path: of the file, or of the copy of a remote one.
        name: as the user gave it, for messages; of a URL without what may be secret.
        format: "parquet", "json" or "arrow".
        remote: the file itself, if it is read where it is; then there is no copy.
    """

    path: str
    name: str
    format: str
    remote: RemoteFile | None = None


def resolve(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    cache_dir: str | None = None,
    timeout: float = Options.remote_timeout,
    read_in_place: bool = False,
) -> list[SourceFile]:
    """Finds files, and downloads remote ones.

    Args:
        files: a path, glob, directory or URL, or several of them.
        cache_dir: where remote files are copied to; None for the default, see `files.cache_root`.
        timeout: seconds that a web server may be silent.
        read_in_place: do not download remote parquet files that can be read where they are.

    Returns:
        Local files in the order given; those of one glob or directory are sorted by name.

    Raises:
        SourceError: nothing matches, the extension is unknown, or a remote file cannot be downloaded.
    """
    found: list[SourceFile] = []
    for name in names_of(files):
        found += _remote(name, cache_dir, timeout, read_in_place) if is_url(name) else local_files(name)
    return found


def names_of(files: Any) -> list[str]:
    """The paths and URLs that a user gives.

    Raises:
        SourceError: something else is given, or nothing.
    """
    if isinstance(files, Mapping | set | frozenset):
        raise SourceError(
            f"files is a {type(files).__name__}: pass a path, a URL or a list of them, such as the files of one split"
        )
    given: list[Any]
    given = [files] if isinstance(files, str | bytes | os.PathLike) or not isinstance(files, Iterable) else list(files)
    if not given:
        raise SourceError("no files given: pass a path, a glob, a directory, a URL, or a list of them")
    for item in given:
        if not isinstance(item, str | os.PathLike):
            raise SourceError(
                f"expected a path or URL as a string or PathLike, not {type(item).__name__}: {item!r:.80}"
            )
        if not os.fspath(item):
            raise SourceError("one of the given paths is an empty string")
    return [os.fspath(item) for item in given]


# -- local files -----------------------------------------------------------------------------------------------------


def local_files(name: str) -> list[SourceFile]:
    """The files that a path, glob or directory stands for."""
    try:
        return _find(name)
    except SourceError:
        raise
    except (OSError, ValueError) as error:  # a name that is too long or has a null byte, a folder without permissions
        raise SourceError(f"{_printable(name)}: {getattr(error, 'strerror', None) or error}") from error


def _find(name: str) -> list[SourceFile]:
    path = Path(name).expanduser()
    if path.is_file() or path.is_symlink():
        return [_file(path, name)] if not path.is_dir() else _folder(path, name)
    if path.is_dir():
        return _folder(path, name)
    matches = sorted(Path(p) for p in _glob(str(path)))
    if not matches:
        raise SourceError(f"{_printable(name)}: no file matches{_hint(path)}")
    return [_file(p, str(p)) for p in matches]


def _file(path: Path, name: str) -> SourceFile:
    if not path.exists():
        raise SourceError(
            f"{_printable(name)}: a symlink to {os.readlink(path)}, which does not exist: restore the file"
        )
    if _printable(name) != name:
        raise SourceError(f"{_printable(name)}: the name is not valid UTF-8: rename the file")
    return SourceFile(str(path), name, _format(name))


def _folder(folder: Path, name: str) -> list[SourceFile]:
    """The files in a folder and in those below it, sorted; those of a saved dataset in its order."""
    if (saved := saved_files(folder, name)) is not None:
        return [_file(path, str(path)) for path in saved]
    found: list[Path] = []
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        # A link may lead to a folder above it, or to one that is read anyway.
        real = os.path.realpath(parent)
        folders[:] = [] if real in seen else sorted(filter(_is_data, folders))
        if real not in seen:
            found += [Path(parent, file) for file in names if _is_data(file) and _ending(file) in _IN_FOLDERS]
        seen.add(real)
    if not found:
        raise SourceError(f"{_printable(name)}: no {', '.join(_IN_FOLDERS)} file in this directory or below it")
    return [_file(path, str(path)) for path in sorted(found)]


def _raise(error: OSError) -> None:
    raise error


def _is_data(name: str) -> bool:
    """Whether a file or folder inside a folder is read. As in Spark and `datasets`, hidden ones are not."""
    return not name.startswith((".", "_"))


def _printable(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


def _glob(pattern: str) -> list[str]:
    import glob

    return [p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p) or not os.path.exists(p)]


def _hint(path: Path) -> str:
    """Why nothing matched: the directory does not exist, or what it has instead."""
    parent = path.parent
    if any(mark in str(parent) for mark in "*?["):
        return ""
    if not parent.is_dir():
        return f": no such directory: {parent}"
    others = sorted(p.name for p in parent.iterdir() if p.suffix in FORMATS and p.exists())[:5]
    return _printable(f" in {parent.resolve()}" + (f", which has {', '.join(others)}" if others else ""))


def _ending(name: str) -> str:
    return os.path.splitext(name.partition("?")[0])[1].lower()


def _format(name: str) -> str:
    ending = _ending(name)
    if ending not in FORMATS:
        raise SourceError(
            f"{without_secrets(name)}: unknown file extension {ending!r}: gpuload reads {', '.join(FORMATS)}"
        )
    return FORMATS[ending]


# -- remote files ----------------------------------------------------------------------------------------------------


def _remote(url: str, cache_dir: str | None, timeout: float, read_in_place: bool) -> list[SourceFile]:
    listed = remote_files(url, timeout)
    if not isinstance(listed, RemoteFiles):
        return listed
    found = []
    for path, name, kind in zip(listed.paths, listed.names, listed.formats, strict=True):
        remote = in_place(listed.fs, path, name) if read_in_place and kind == "parquet" else None
        local = path if remote is not None else _fetch(listed.fs, path, name, kind, cache_dir)
        found.append(SourceFile(local, without_secrets(name), kind, remote))
    return found


@dataclass(frozen=True)
class RemoteFiles:
    """The files that a URL stands for.

    Attributes:
        fs: their fsspec file system.
        paths: of the files in it, in order.
        names: their URLs.
        formats: of each: "parquet" or "json".
    """

    fs: Any
    paths: list[str]
    names: list[str]
    formats: list[str]


def remote_files(url: str, timeout: float) -> RemoteFiles | list[SourceFile]:
    """Lists the files that a URL stands for, without downloading them; local files, if it is a URL of such.

    Args:
        url: of a file or a directory, or a glob.
        timeout: seconds that a web server may be silent.

    Raises:
        SourceError: as for `resolve`.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    web = url.startswith("http")
    shown = without_secrets(url)
    # None of these errors is chained: what fsspec raises names the whole URL.
    try:
        fs, path = fsspec.core.url_to_fs(url, **(_patience(timeout) if web else {}))
        if isinstance(fs, LocalFileSystem):
            return local_files(path)
        fs.invalidate_cache()  # a listing cached by an earlier load may be out of date
        if web:
            paths = [path]
        elif any(mark in path for mark in "*?["):
            paths = _files(fs.glob(path, detail=True).values())
        elif fs.isdir(path):
            paths = [p for p in _files(fs.find(path, detail=True).values()) if _is_read(p, path)]
        else:
            paths = [path]
    except SourceError:
        raise
    except ImportError as error:
        install = ": pip install 'gpuload[remote]'" if url.startswith(_WITH_PACKAGES) else ""
        raise SourceError(f"{shown}: {error}{install}") from None
    except Exception as error:  # every file system raises errors of its own
        raise SourceError(f"{shown}: {reason_of(error)}") from None
    if not paths:
        raise SourceError(f"{shown}: no file matches")
    names = [url if p == path else fs.unstrip_protocol(p) for p in paths]
    return RemoteFiles(fs, paths, names, [_format(name) for name in names])  # of all files, before the first download


def _is_read(path: str, folder: str) -> bool:
    below = path.removeprefix(folder.rstrip("/") + "/")
    return all(map(_is_data, below.split("/"))) and _ending(path) in _IN_FOLDERS


def _patience(timeout: float) -> dict[str, Any]:
    """Options for web servers: no limit on the whole download (aiohttp's is five minutes), only on silence."""
    import fsspec

    fsspec.get_filesystem_class("http")  # raises with what to install where aiohttp is missing
    import aiohttp

    patience = aiohttp.ClientTimeout(total=None, sock_connect=min(timeout, 30), sock_read=timeout)
    return {"client_kwargs": {"timeout": patience}}


def _files(found: Iterable[dict[str, Any]]) -> list[str]:
    return sorted(info["name"] for info in found if info["type"] == "file")


def _fetch(fs: Any, path: str, name: str, kind: str, cache_dir: str | None) -> str:
    """The local copy of a remote file, downloaded if there is none."""
    from filelock import FileLock

    try:
        info = fs.info(path)
    except Exception as error:
        raise SourceError(f"{without_secrets(name)}: {reason_of(error)}") from None
    digest = hashlib.sha256("\n".join(version_of(name, info)).encode()).hexdigest()[:24]
    directory = cache_root(cache_dir)
    target = directory / f"{digest}-{os.path.basename(path.partition('?')[0])[-_NAME_LENGTH:]}"
    if _is_whole(target, kind):
        return str(target)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not _is_whole(target, kind):
                _copy(fs, path, name, kind, target, info.get("size"))
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(
            f"{without_secrets(name)}: cannot write to the cache directory {directory}: {error.strerror or error}"
        ) from error
    return str(target)


def _copy(fs: Any, path: str, name: str, kind: str, target: Path, size: int | None) -> None:
    """Downloads a file, up to three times. A copy whose end is missing is made twice: the file itself may be damaged,
    which is reported when it is opened."""

    def copy(attempt: int) -> None:
        with replacing(target) as partial:
            fs.get_file(path, str(partial))
            arrived = partial.stat().st_size
            if size is not None and arrived != size:
                raise OSError(f"{arrived} of {size} bytes arrived")
            if attempt == 1 and not _is_whole(partial, kind):
                raise OSError("the end of the file is missing")

    downloaded(without_secrets(name), copy)


def downloaded(name: str, download: Callable[[int], _Result]) -> _Result:
    """The result of a download, which is tried up to three times.

    Args:
        name: of the file, for the message.
        download: number of the attempt → the result.

    Raises:
        SourceError: it failed each time, or there is no such file.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return download(attempt)
        except Exception as error:  # every file system raises errors of its own
            if attempt == ATTEMPTS or isinstance(error, FileNotFoundError | PermissionError):
                attempts = f"{attempt} attempt{'s' * (attempt > 1)}"
                raise SourceError(f"{name}: download failed after {attempts}: {reason_of(error)}") from None
            time.sleep(0.2 * attempt)
    raise AssertionError


def _is_whole(copy: Path, kind: str) -> bool:
    """Whether a copy exists and has its end. Servers do not always say how long a file is."""
    if not copy.exists():
        return False
    with open(copy, "rb") as file:
        head = file.read(16)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        tail = file.read().rstrip()
    if kind == "parquet":
        if head[:4] != b"PAR1":  # something else, which is reported when it is opened
            return True
        try:
            pq.read_metadata(copy)
        except (pa.ArrowException, OSError):
            return False
        return True
    if head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
        return tail.endswith(b"]")
    _, newline, last = tail.rpartition(b"\n")
    if not newline and size > _TAIL:  # a line of more than a megabyte
        return True
    try:
        json.loads(last or "null")
    except (ValueError, RecursionError):
        return False
    return True
