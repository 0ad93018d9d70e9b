"""`gpuload cache`: what is in the token cache."""

import time

from gpuload.cache.store import cached_files, clear, tokens_directory
from gpuload.files import partial_bytes
from gpuload.report import megabytes


def list_cache(cache_dir: str | None = None) -> None:
    """Prints the files whose tokens are cached, most recently used first.

    Args:
        cache_dir: as the option of `load`.
    """
    directory = tokens_directory(cache_dir)
    files = cached_files(directory)
    unfinished = partial_bytes(directory)
    print(f"{directory}: {len(files):,} entries, {megabytes(sum(file.nbytes for file in files))}")
    if unfinished:
        print(f"being written: {megabytes(unfinished)}")
    if files:
        print(f"\n{'last use':16}  {'size':>12}  {'rows':>12}  file")
    for file in files:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.last_use))
        name = file.source or "(damaged: its tokens are made again when they are needed)"
        print(f"{used:16}  {megabytes(file.nbytes):>12}  {file.rows:>12,}  {name}")


def clear_cache(cache_dir: str | None = None) -> None:
    """Removes all cached tokens.

    Args:
        cache_dir: as the option of `load`.
    """
    directory = tokens_directory(cache_dir)
    entries, nbytes = clear(directory)
    print(f"{directory}: removed {entries:,} entries, {megabytes(nbytes)}")
