"""Paths, globs, directories and URLs → local files; remote ones are downloaded once.

A remote file is copied into the cache directory. The name of the copy is a digest of the URL and of what the server
says about the file's version (size, etag, time), so a changed file is downloaded again and an unchanged one is not. The
copy is written under a temporary name and renamed once its size is right, so that no process ever sees half a file. A
lock lets one of several processes download while the others wait for its copy.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuload.errors import SourceError
from gpuload.files import cache_root, replacing

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_ATTEMPTS = 3
# The keys under which fsspec's file systems report a file's version.
_VERSION_KEYS = (
    *("size", "ETag", "etag", "md5Hash", "Content-MD5", "Digest", "blob_id"),
    *("LastModified", "Last-Modified", "last_modified", "mtime", "modificationTime", "modify", "updated"),
)
_NAME_LENGTH = 48  # characters of a remote file's name in its copy's name: file systems allow 255 bytes


@dataclass(frozen=True)
class SourceFile:
    """One local file.

    Attributes:
        path: of the file, or of the copy of a remote one.
        name: as the user gave it, for messages.
        format: "parquet" or "json".
    """

    path: str
    name: str
    format: str


def resolve(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], cache_dir: str | None = None
) -> list[SourceFile]:
    """Finds files, and downloads remote ones.

    Args:
        files: a path, glob, directory or URL, or several of them.
        cache_dir: where remote files are copied to; None for the default, see `files.cache_root`.

    Returns:
        Local files in the order given; those of one glob or directory are sorted by name.

    Raises:
        SourceError: nothing matches, the extension is unknown, or a remote file cannot be downloaded.
    """
    given: list[Any]
    given = [files] if isinstance(files, str | bytes | os.PathLike) or not isinstance(files, Iterable) else list(files)
    if not given:
        raise SourceError("no files given: pass a path, a glob, a directory, a URL, or a list of them")
    found: list[SourceFile] = []
    for item in given:
        if not isinstance(item, str | os.PathLike):
            raise SourceError(
                f"expected a path or URL as a string or PathLike, not {type(item).__name__}: {item!r:.80}"
            )
        name = os.fspath(item)
        if not name:
            raise SourceError("one of the given paths is an empty string")
        found += _remote(name, cache_dir) if "://" in name or name.startswith("hdfs:") else _local(name)
    return found


def _local(name: str) -> list[SourceFile]:
    path = Path(name).expanduser()
    if path.is_file():
        return [SourceFile(str(path), name, _format(name))]
    if path.is_dir():
        matches = sorted(p for p in path.iterdir() if p.suffix.lower() in FORMATS and p.is_file())
        if not matches:
            raise SourceError(f"{name}: no {', '.join(FORMATS)} file in this directory")
    else:
        matches = sorted(Path(p) for p in _glob(str(path)))
        if not matches:
            raise SourceError(f"{name}: no file matches{_hint(path)}")
    return [SourceFile(str(p), str(p), _format(str(p))) for p in matches]


def _glob(pattern: str) -> list[str]:
    import glob

    return [p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]


def _hint(path: Path) -> str:
    """Why nothing matched: the directory does not exist, or what it has instead."""
    parent = path.parent
    if any(mark in str(parent) for mark in "*?["):
        return ""
    if not parent.is_dir():
        return f": no such directory: {parent}"
    others = sorted(p.name for p in parent.iterdir() if p.suffix in FORMATS)[:5]
    return f" in {parent.resolve()}" + (f", which has {', '.join(others)}" if others else "")


def _format(name: str) -> str:
    ending = os.path.splitext(name.partition("?")[0])[1].lower()
    if ending not in FORMATS:
        raise SourceError(f"{name}: unknown file extension {ending!r}: gpuload reads {', '.join(FORMATS)}")
    return FORMATS[ending]


def _remote(url: str, cache_dir: str | None) -> list[SourceFile]:
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    web = url.startswith("http")
    try:
        fs, path = fsspec.core.url_to_fs(url, **(_patience() if web else {}))
        if isinstance(fs, LocalFileSystem):
            return _local(path)
        fs.invalidate_cache()  # a listing cached by an earlier load may be out of date
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
    except Exception as error:  # every file system raises errors of its own
        raise SourceError(f"{url}: {_reason(error)}") from error
    if not paths:
        raise SourceError(f"{url}: no file matches")
    names = [url if p == path else fs.unstrip_protocol(p) for p in paths]
    formats = [_format(name) for name in names]  # of all files, before the first download
    return [
        SourceFile(_fetch(fs, p, name, cache_dir), name, kind)
        for p, name, kind in zip(paths, names, formats, strict=True)
    ]


def _patience() -> dict[str, Any]:
    """Options for web servers: no limit on the whole download (aiohttp's is five minutes), only on silence."""
    import fsspec

    fsspec.get_filesystem_class("http")  # raises with what to install where aiohttp is missing
    import aiohttp

    return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)}}


def _files(found: Iterable[dict[str, Any]]) -> list[str]:
    return sorted(info["name"] for info in found if info["type"] == "file")


def _fetch(fs: Any, path: str, name: str, cache_dir: str | None) -> str:
    """The local copy of a remote file, downloaded if there is none."""
    from filelock import FileLock

    try:
        info = fs.info(path)
    except Exception as error:
        raise SourceError(f"{name}: {_reason(error)}") from error
    version = [name] + [f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key) is not None]
    digest = hashlib.sha256("\n".join(version).encode()).hexdigest()[:24]
    directory = cache_root(cache_dir)
    target = directory / f"{digest}-{os.path.basename(path.partition('?')[0])[-_NAME_LENGTH:]}"
    if target.exists():
        return str(target)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.exists():
                _copy(fs, path, name, target, info.get("size"))
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(
            f"{name}: cannot write to the cache directory {directory}: {error.strerror or error}"
        ) from error
    return str(target)


def _copy(fs: Any, path: str, name: str, target: Path, size: int | None) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with replacing(target, locked=True) as partial:
                fs.get_file(path, str(partial))
                arrived = partial.stat().st_size
                if size is not None and arrived != size:
                    raise OSError(f"{arrived} of {size} bytes arrived")
            return
        except Exception as error:  # every file system raises errors of its own
            if attempt == _ATTEMPTS or isinstance(error, FileNotFoundError | PermissionError):
                attempts = f"{attempt} attempt{'s' * (attempt > 1)}"
                raise SourceError(f"{name}: download failed after {attempts}: {_reason(error)}") from error
            time.sleep(0.2 * attempt)


def _reason(error: BaseException) -> str:
    if not isinstance(error, FileNotFoundError):
        return f"{type(error).__name__}: {error}"
    # fsspec reports every failure of a web server as a missing file; the cause says what it was.
    cause = error.__cause__
    web = type(cause).__module__.startswith("aiohttp") or isinstance(cause, TimeoutError)
    if web and getattr(cause, "status", None) != 404:
        return f"{type(cause).__name__}: {cause}"
    return "no such file"
