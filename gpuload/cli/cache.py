"""`gpuload cache`: what is in the token cache, and in stores on disk."""

import argparse
import os
import shutil
import time
from pathlib import Path

from gpuload.cache.directory import (
    cached_files,
    clear,
    digests_directory,
    media_directory,
    store_directory,
    tokens_directory,
)
from gpuload.cli.output import printable
from gpuload.core.files import partial_bytes
from gpuload.core.words import counted
from gpuload.dataset.report import megabytes
from gpuload.sources.urls import is_url, without_secrets


def run(given: argparse.Namespace) -> int:
    """Prints the files whose tokens are cached, or which have a store on disk, most recently used first; or removes
    all of them."""
    if is_url(given.cache_dir or ""):
        given.parser.error(f"--cache-dir {without_secrets(given.cache_dir)}: a URL: pass a local directory")
    for number, directory in enumerate(_directories(given.cache_dir)):
        if given.clear:
            entries, nbytes = clear(directory)
            print(f"{directory}: removed {counted(entries, 'entries')}, {megabytes(nbytes)}")
        else:
            print(end="\n" * (number > 0))
            _list(directory)
    if given.clear:
        shutil.rmtree(digests_directory(given.cache_dir), ignore_errors=True)
    return 0


def _directories(cache_dir: str | None) -> list[Path]:
    """That of tokens, and the others that exist."""
    others = (store_directory(cache_dir), media_directory(cache_dir))
    return [tokens_directory(cache_dir), *(each for each in others if os.path.exists(each))]


def _list(directory: Path) -> None:
    files = cached_files(directory)
    unfinished = partial_bytes(directory)
    print(f"{directory}: {counted(len(files), 'entries')}, {megabytes(sum(file.nbytes for file in files))}")
    if unfinished:
        print(f"being written: {megabytes(unfinished)}")
    if files:
        print(f"\n{'last use':16}  {'size':>12}  {'rows':>12}  {'what':7}  file")
    for file in files:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.last_use))
        name = file.source or "(damaged: it is made again when it is needed)"
        print(f"{used:16}  {megabytes(file.nbytes):>12}  {file.rows:>12,}  {file.what:7}  {printable(name)}")
