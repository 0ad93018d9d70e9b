"""Where files are on any file system of fsspec, and how work on them is tried again."""

import errno
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from gpuload.core.errors import GpuloadError
from gpuload.sources.urls import without_secrets

ATTEMPTS = 3
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
# The keys under which fsspec's file systems report a file's version.
_VERSION_KEYS = (
    *("size", "ETag", "etag", "md5Hash", "Content-MD5", "Digest", "blob_id", "CRC", "sha", "md5", "checksum"),
    *("LastModified", "Last-Modified", "last_modified", "mtime", "modificationTime", "modify", "updated"),
    *("modified", "last_write_time", "date_time", "created"),
)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class FilePlace:
    """A file for any process that can reach it: file systems can be pickled."""

    fs: Any  # fsspec's file system
    path: str  # in that file system
    url: str  # as the user gave it; it may have what is secret

    @property
    def name(self) -> str:
        """For messages, without what may be secret."""
        return without_secrets(self.url)

    def version(self, info: Mapping[str, Any]) -> list[str]:
        """The URL, and what the server says about the file's version in its answer, `info`."""
        return [self.url] + [f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key) is not None]

    def version_now(self) -> tuple[str, ...]:
        """The same, asked again; file systems remember answers."""
        self.fs.invalidate_cache()
        return tuple(self.version(self.fs.info(self.path)))


def tried(work: Callable[[int], _Result], failed: Callable[[Exception, int], GpuloadError]) -> _Result:
    """The result of some work on a file system, which is tried up to three times. `failed` makes the error that is
    raised of the last one, and of how many attempts there were: at once if there is no such file, no permission or no
    space."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return work(attempt)
        except GpuloadError:
            raise
        except Exception as error:  # every file system raises errors of its own
            final = isinstance(error, _FINAL) or (isinstance(error, OSError) and error.errno in NO_SPACE)
            if attempt == ATTEMPTS or final:
                raise failed(error, attempt) from None
            time.sleep(0.2 * attempt)
    raise AssertionError
