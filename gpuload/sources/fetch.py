"""Paths, globs, directories and URLs → local files; remote ones are downloaded once.

A remote file is copied into the cache directory. The name of the copy is a digest of the URL and of what the server
says about the file's version (size, etag, time), so a changed file is downloaded again and an unchanged one is not. The
copy is written in a temporary directory and renamed once its size and its end are right, so that no process ever
sees half a file. A lock lets one of several processes download while the others wait for its copy.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from gpuload.core.errors import SourceError
from gpuload.core.files import cache_root, replacing
from gpuload.core.options import Options
from gpuload.core.words import counted
from gpuload.sources.arrow_files import saved_files
from gpuload.sources.urls import is_url, reason_of, without_secrets

if TYPE_CHECKING:
    from gpuload.sources.places import FilePlace
    from gpuload.sources.remote import RemoteFile

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}
_IN_FOLDERS = (".parquet", ".json", ".jsonl")  # other folders than those of `save_to_disk` have results of `map`, too
_PACKED = re.compile(r"\.(ndjson|(jsonl?|parquet)\.(gz|bz2|xz|zstd?|lz4|br))$", re.IGNORECASE)  # other names of data
_WITH_PACKAGES = ("http", "s3", "gs:", "gcs:")  # protocols whose packages the extra `remote` installs
_TAIL = 1 << 20  # bytes at the end of a copy that are examined
_NAME_LENGTH = 48  # characters of a remote file's name in its copy's name: file systems allow 255 bytes


@dataclass(frozen=True)
class SourceFile:
    """One file."""

    path: str  # of the file, or of the copy of a remote one; of the remote one itself, if there is no copy
    name: str  # as the user gave it, for messages; of a URL without what may be secret
    format: str  # "parquet", "json" or "arrow"
    place: FilePlace | None = None  # where it is, if it is remote
    remote: RemoteFile | None = None  # the file itself, if it is read where it is; then there is no copy


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
    return [here(file, cache_dir, read_in_place) for file in find(files, timeout)]


def find(files: Any, timeout: float) -> list[SourceFile]:
    """As `resolve`, but downloads nothing. What is found can be sent to other processes, which call `here`."""
    return [
        file for name in names_of(files) for file in (_remote(name, timeout) if is_url(name) else local_files(name))
    ]


def here(file: SourceFile, cache_dir: str | None, read_in_place: bool) -> SourceFile:
    """A file that this process can read: a remote one in place, or the copy of it that this machine has; a
    `SourceError` if it cannot be downloaded. For the arguments see `resolve`."""
    if file.place is None or file.remote is not None:
        return file
    from gpuload.sources.remote import in_place

    remote = in_place(file.place) if read_in_place and file.format == "parquet" else None
    path = file.place.path if remote is not None else _fetch(file.place, file.format, cache_dir)
    return replace(file, path=path, remote=remote)


def names_of(files: Any) -> list[str]:
    """The paths and URLs that a user gives; a `SourceError` if something else is given, or nothing."""
    if isinstance(files, Mapping | set | frozenset):
        raise SourceError(
            f"files is of type {type(files).__name__}: pass a path, a URL or a list of them, such as the files of one "
            "split"
        )
    alone = isinstance(files, str | bytes | os.PathLike) or not isinstance(files, Iterable)
    given: list[str] = []
    for item in [files] if alone else files:  # a generator of something else may have no end
        if isinstance(item, Mapping) and not alone:
            raise SourceError("files has rows: pass pyarrow.Table.from_pylist(rows), or the path of a file with them")
        if not isinstance(item, str | os.PathLike):
            raise SourceError(
                f"expected a path or URL as a string or PathLike, not {type(item).__name__}: {item!r:.80}"
            )
        if not os.fspath(item):
            raise SourceError("one of the given paths is an empty string")
        given.append(os.fspath(item))
    if not given:
        raise SourceError("no files given: pass a path, a glob, a directory, a URL, or a list of them")
    return given


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
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return _folder(path, name)
    if path.exists() or path.is_symlink():
        return [_file(path, name)]
    import glob

    found = glob.glob(str(path), recursive=True)
    matches = sorted(Path(p) for p in found if os.path.isfile(p) or not os.path.exists(p))
    if not matches:
        raise SourceError(f"{_printable(name)}: no file matches{_hint(path)}")
    return [_file(p, str(p)) for p in matches]


def _file(path: Path, name: str) -> SourceFile:
    if not path.exists():
        raise SourceError(
            f"{_printable(name)}: a symlink to {os.readlink(path)}, which does not exist: restore the file"
        )
    if not path.is_file():  # a pipe would be waited for
        raise SourceError(f"{_printable(name)}: not a regular file: write its rows to one, which is read several times")
    if _printable(name) != name:
        if sys.getfilesystemencoding() != "utf-8":
            raise SourceError(
                f"{_printable(name)}: the locale has no UTF-8, so this name cannot be read: set PYTHONUTF8=1"
            )
        raise SourceError(f"{_printable(name)}: the name is not valid UTF-8: rename the file")
    return SourceFile(str(path), name, _format(name))


def _folder(folder: Path, name: str) -> list[SourceFile]:
    """The files in a folder and in those below it, sorted; those of a saved dataset in its order."""
    if (saved := saved_files(folder, name)) is not None:
        return [_file(path, str(path)) for path in saved]
    found: list[Path] = []
    packed: list[str] = []
    seen: set[str] = set()

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        # A link may lead to a folder above it, or to one that is read anyway.
        real = os.path.realpath(parent)
        folders[:] = [] if real in seen else sorted(filter(_is_data, folders))
        if real not in seen:
            packed += [str(Path(parent, file)) for file in names if _is_data(file) and _PACKED.search(file)]
            found += [Path(parent, file) for file in names if _is_data(file) and _ending(file) in _IN_FOLDERS]
        seen.add(real)
    if not found:
        raise SourceError(f"{_printable(name)}: no {', '.join(_IN_FOLDERS)} file in this directory or below it")
    if packed:
        warnings.warn(
            f"gpuload: not read: {counted(len(packed), 'files')}, such as {_printable(min(packed))}: unpack or rename "
            f"what is data: gpuload reads {', '.join(FORMATS)}",
            stacklevel=2,
        )
    return [_file(path, str(path)) for path in sorted(found)]


def _is_data(name: str) -> bool:
    """Whether a file or folder inside a folder is read. As in Spark, hidden ones are not."""
    return not name.startswith((".", "_"))


def _printable(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


def _hint(path: Path) -> str:
    """Why nothing matched: the directory does not exist, or what it has instead."""
    parent = path.parent
    if any(mark in str(parent) for mark in "*?["):
        return ""
    if not parent.is_dir():
        return f": no such directory: {parent}"
    others = sorted(p.name for p in parent.iterdir() if p.suffix in FORMATS and (p.is_file() or p.is_dir()))[:5]
    return _printable(f" in {parent.resolve()}" + (f", which has {', '.join(others)}" if others else ""))


def _ending(name: str) -> str:
    if not is_url(name):
        return os.path.splitext(name)[1].lower()
    # Of URLs in a chain, such as zip://a.jsonl::s3://bucket/b.zip, the first one that has a path names the file.
    path = next((part for part in name.split("::") if "://" in part), name)
    return os.path.splitext(path.partition("?")[0])[1].lower()


def _format(name: str) -> str:
    ending = _ending(name)
    if ending not in FORMATS:
        raise SourceError(
            f"{without_secrets(name)}: unknown file extension {ending!r}: gpuload reads {', '.join(FORMATS)}"
        )
    return FORMATS[ending]


# -- remote files ----------------------------------------------------------------------------------------------------


def _remote(url: str, timeout: float) -> list[SourceFile]:
    """The files that a URL stands for: a file or a directory, or a glob."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    from gpuload.sources.places import FilePlace

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
    places = [FilePlace(fs, p, url if p == path else fs.unstrip_protocol(p)) for p in paths]
    return [SourceFile(place.path, place.name, _format(place.url), place) for place in places]


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


def _fetch(place: FilePlace, kind: str, cache_dir: str | None) -> str:
    """The local copy of a remote file, downloaded if there is none."""
    from filelock import FileLock

    try:
        info = place.fs.info(place.path)
    except Exception as error:
        raise SourceError(f"{place.name}: {reason_of(error)}") from None
    digest = hashlib.sha256("\n".join(place.version(info)).encode()).hexdigest()[:24]
    directory = cache_root(cache_dir)
    target = directory / f"{digest}-{os.path.basename(place.path.partition('?')[0])[-_NAME_LENGTH:]}"
    if _is_whole(target, kind):
        return str(target)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not _is_whole(target, kind):
                _copy(place, kind, target, info.get("size"))
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(
            f"{place.name}: cannot write to the cache directory {directory}: {error.strerror or error}"
        ) from error
    return str(target)


def _copy(place: FilePlace, kind: str, target: Path, size: int | None) -> None:
    """Downloads a file, up to three times. A copy whose end is missing is made twice: the file itself may be damaged,
    which is reported when it is opened."""
    from gpuload.sources.places import tried

    def copy(attempt: int) -> None:
        with replacing(target) as partial:
            place.fs.get_file(place.path, str(partial))
            arrived = partial.stat().st_size
            if size is not None and arrived != size:
                raise OSError(f"{arrived} of {size} bytes arrived")
            if attempt == 1 and not _is_whole(partial, kind):
                raise OSError("the end of the file is missing")

    def failed(error: Exception, attempts: int) -> SourceError:
        many = f"{attempts} attempt{'s' * (attempts > 1)}"
        return SourceError(f"{place.name}: download failed after {many}: {reason_of(error)}")

    tried(copy, failed)


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
