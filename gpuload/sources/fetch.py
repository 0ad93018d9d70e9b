"""Files, globs, folders and URLs → readable local files, remote ones fetched once.

A remote file is copied into `cache_dir` under a name made of its address and what the store says of its version (size,
etag, time), so a changed file is fetched anew and an unchanged one never again. A copy is made under a temporary name
and renamed when its size is right: no process ever sees half a file, and one that dies leaves nothing that counts. A
lock lets one of several processes fetch while the others wait for its copy.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuload.errors import SourceError

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_ATTEMPTS = 3
# What a store may say of a file's version, by fsspec's file systems.
_VERSION_KEYS = (
    *("size", "ETag", "etag", "md5Hash", "Content-MD5", "Digest", "blob_id"),
    *("LastModified", "Last-Modified", "last_modified", "mtime", "modificationTime", "modify", "updated"),
)
_NAME_LENGTH = 48  # characters of a remote file's name that its copy keeps: a file system takes 255 bytes


@dataclass(frozen=True)
class SourceFile:
    """One file to read: where it lies now, and what the user called it (for messages)."""

    path: str
    name: str
    format: str


def resolve(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], cache_dir: str) -> list[SourceFile]:
    """Local, readable files in the order given; the files of one glob or folder sorted by name.

    Raises:
        SourceError: nothing matches, the ending is unknown, or a remote file cannot be had.
    """
    given: list[Any]
    given = [files] if isinstance(files, str | bytes | os.PathLike) or not isinstance(files, Iterable) else list(files)
    if not given:
        raise SourceError("no files given: pass a path, a glob, a URL or a list of them")
    found: list[SourceFile] = []
    for item in given:
        if not isinstance(item, str | os.PathLike):
            raise SourceError(f"a file is named by a string or a path, not by {type(item).__name__}: {item!r:.80}")
        name = os.fspath(item)
        if not name:
            raise SourceError("the name of a file is empty")
        found += _remote(name, cache_dir) if "://" in name or name.startswith("hdfs:") else _local(name)
    return found


def _local(name: str) -> list[SourceFile]:
    path = Path(name).expanduser()
    if path.is_file():
        return [SourceFile(str(path), name, _format(name))]
    if path.is_dir():
        matches = sorted(p for p in path.iterdir() if p.suffix.lower() in FORMATS and p.is_file())
        if not matches:
            raise SourceError(f"{name}: no {', '.join(FORMATS)} file in this folder")
    else:
        matches = sorted(Path(p) for p in _glob(str(path)))
        if not matches:
            raise SourceError(f"{name}: no file matches{_hint(path)}")
    return [SourceFile(str(p), str(p), _format(str(p))) for p in matches]


def _glob(pattern: str) -> list[str]:
    import glob

    return [p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]


def _hint(path: Path) -> str:
    """Why nothing matched: the first part of the path that is not there."""
    parent = path.parent
    if any(mark in str(parent) for mark in "*?["):
        return ""
    if not parent.is_dir():
        return f": there is no folder {parent}"
    others = sorted(p.name for p in parent.iterdir() if p.suffix in FORMATS)[:5]
    return f" in {parent.resolve()}" + (f": there are {', '.join(others)}" if others else "")


def _format(name: str) -> str:
    ending = os.path.splitext(name.partition("?")[0])[1].lower()
    if ending not in FORMATS:
        raise SourceError(f"{name}: unknown ending {ending!r}: gpuload reads {', '.join(FORMATS)}")
    return FORMATS[ending]


def _remote(url: str, cache_dir: str) -> list[SourceFile]:
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    web = url.startswith("http")
    try:
        fs, path = fsspec.core.url_to_fs(url, **(_patience() if web else {}))
        if isinstance(fs, LocalFileSystem):
            return _local(path)
        fs.invalidate_cache()  # a listing of an earlier load need not be true any more
        if web:
            paths = [path]
        elif any(mark in path for mark in "*?["):
            paths = _files(fs.glob(path, detail=True).values())
        elif fs.isdir(path):
            paths = [p for p in _files(fs.ls(path, detail=True)) if os.path.splitext(p)[1].lower() in FORMATS]
        else:
            paths = [path]
    except SourceError:
        raise
    except ImportError as error:
        raise SourceError(f"{url}: {error}") from error
    except Exception as error:  # each file system has its own errors; all of them end here
        raise SourceError(f"{url}: {_reason(error)}") from error
    if not paths:
        raise SourceError(f"{url}: no file matches")
    names = [url if p == path else fs.unstrip_protocol(p) for p in paths]
    formats = [_format(name) for name in names]  # all of them, before the first download
    return [
        SourceFile(_fetch(fs, p, name, cache_dir), name, kind)
        for p, name, kind in zip(paths, names, formats, strict=True)
    ]


def _patience() -> dict[str, Any]:
    """For web servers: however long a download takes, while bytes are coming. aiohttp ends it after five minutes."""
    import fsspec

    fsspec.get_filesystem_class("http")  # says what to install where it is missing
    import aiohttp

    return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)}}


def _files(found: Iterable[dict[str, Any]]) -> list[str]:
    return sorted(info["name"] for info in found if info["type"] == "file")


def _fetch(fs: Any, path: str, name: str, cache_dir: str) -> str:
    """The local copy of a remote file, made now if there is none."""
    from filelock import FileLock

    try:
        info = fs.info(path)
    except Exception as error:
        raise SourceError(f"{name}: {_reason(error)}") from error
    version = [name] + [f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key) is not None]
    digest = hashlib.sha256("\n".join(version).encode()).hexdigest()[:24]
    folder = Path(cache_dir).expanduser()
    target = folder / f"{digest}-{os.path.basename(path.partition('?')[0])[-_NAME_LENGTH:]}"
    if target.exists():
        return str(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.exists():
                _copy(fs, path, name, target, info.get("size"))
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"{name}: cannot write to cache_dir {folder}: {error.strerror or error}") from error
    return str(target)


def _copy(fs: Any, path: str, name: str, target: Path, size: int | None) -> None:
    partial = target.with_name(f"{target.name}.partial")  # one of a killed process is overwritten: the lock is ours
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            fs.get_file(path, str(partial))
            arrived = partial.stat().st_size
            if size is not None and arrived != size:
                raise OSError(f"{arrived} of {size} bytes arrived")
            os.replace(partial, target)
            return
        except Exception as error:  # each file system has its own errors; all of them end here
            partial.unlink(missing_ok=True)
            if attempt == _ATTEMPTS or isinstance(error, FileNotFoundError | PermissionError):
                raise SourceError(f"{name}: not fetched in {attempt} attempts: {_reason(error)}") from error
            time.sleep(0.2 * attempt)


def _reason(error: BaseException) -> str:
    if not isinstance(error, FileNotFoundError):
        return f"{type(error).__name__}: {error}"
    # fsspec calls whatever goes wrong at a web server a missing file; what it was is the cause.
    cause = error.__cause__
    web = type(cause).__module__.startswith("aiohttp") or isinstance(cause, TimeoutError)
    if web and getattr(cause, "status", None) != 404:
        return f"{type(cause).__name__}: {cause}"
    return "no such file"
