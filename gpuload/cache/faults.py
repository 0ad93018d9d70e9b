"""What can happen to files of a store on disk, in words."""

import errno
from pathlib import Path

from gpuload.core.errors import StoreError


def damaged(path: Path) -> StoreError:
    """The error for a file that is not as it was written."""
    return StoreError(
        f"{path}: the file is damaged: its checksum is wrong. Check the disk, remove this file, and load again"
    )


def missing(path: Path) -> StoreError:
    """The error for a file that another process cannot open."""
    return StoreError(f"{path}: the file was removed or replaced while a dataset used it: load again")


def too_little_space(directory: Path, needed: int, free: int) -> StoreError:
    """The error for a store that is larger than what is free."""
    return StoreError(
        f"{directory}: a store of about {needed:,} bytes is needed, and {free:,} bytes are free: set cache_dir to a "
        "directory on a larger disk, or make room ('gpuload cache' lists what is cached)"
    )


def not_written(directory: Path, error: OSError, written: int) -> StoreError:
    """The error for a store that could not be written, after some bytes were."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"{directory}: the disk is full after {written:,} bytes of the store were written: set cache_dir to a "
            "directory on a larger disk, or make room ('gpuload cache' lists what is cached)"
        )
    return StoreError(
        f"{directory}: cannot write the store: {error.strerror or error}: set cache_dir to a directory that can be "
        "written, or use store='memory'"
    )
