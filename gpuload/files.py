"""The cache directory, and how files are written into it."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root(given: str | os.PathLike[str] | None = None) -> Path:
    """The directory for everything gpuload caches: remote files, token ids, tokenizer tables, the demo's tokenizer.

    Args:
        given: the `cache_dir` option. None: `$GPULOAD_CACHE`, else `$XDG_CACHE_HOME/gpuload`, else `~/.cache/gpuload`.
    """
    if not given:
        given = os.environ.get("GPULOAD_CACHE")
    if not given:
        given = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "gpuload"
    return Path(given).expanduser()


def partial_path(path: Path) -> Path:
    """A new temporary path in the directory of `path`, for a file that is renamed to `path` once it is complete."""
    return path.with_name(f"{path.name}-{uuid.uuid4().hex}.partial")


@contextmanager
def replacing(path: Path, locked: bool = False) -> Iterator[Path]:
    """Yields a temporary path in the directory of `path`, which is renamed to `path` if the block succeeds.

    Other processes see the old file or the new one, never half of one. If the block raises, nothing is left behind.

    Args:
        path: the file to write.
        locked: the caller holds a lock on `path`. The temporary name is then always the same, so that the next
            attempt overwrites what a killed process left.

    Raises:
        OSError: the directory or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial") if locked else partial_path(path)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
