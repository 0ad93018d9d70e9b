"""A cache on disk for tables that take seconds to build."""

import contextlib
import hashlib
import os
import zipfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gpuload.core.files import cache_root, replacing

Arrays = dict[str, Any]  # name → numpy array

_SMALL = 1 << 20  # characters of a tokenizer


@lru_cache(maxsize=2)
def model_digest(model_json: str) -> str:
    """Identifies a tokenizer, as text of several megabytes: that of the last two is remembered.

    Args:
        model_json: the result of `tokenizers.Tokenizer.to_str()`.
    """
    return hashlib.blake2b(model_json.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def cached(kind: str, content: str, build: Callable[[], Arrays]) -> Arrays:
    """Return arrays from the cache, or build and cache them.

    Args:
        kind: the first part of the file's name; the second is a digest of `content`.
        content: everything that the arrays depend on, including versions.
        build: builds the arrays if the file is missing or damaged. If the file cannot be written, that is ignored.
    """
    digest = hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=12).hexdigest()
    file = cache_root() / "tables" / f"{kind}-{digest}.npz"
    with contextlib.suppress(Exception):  # a damaged file can raise nearly any, such as SyntaxError and RuntimeError
        return _read(file)
    arrays = build()
    with contextlib.suppress(OSError), replacing(file) as unfinished, unfinished.open("wb") as stream:
        np.savez(stream, **arrays)  # given a path, NumPy would append .npz to it
    return arrays


def of_model(kind: str, version: int, model_json: str, build: Callable[[], Arrays]) -> Arrays:
    """`cached` for what depends on a tokenizer and a version of rules; a small tokenizer is read every time."""
    return build() if len(model_json) < _SMALL else cached(kind, f"{version} {model_digest(model_json)}", build)


def _read(file: Path) -> Arrays:
    """The arrays of a file, of which every byte is checked: `numpy.load` reads no more than a damaged shape asks for,
    and does not miss an array.

    Raises:
        Exception: it is missing or damaged.
    """
    arrays = {}
    with file.open("rb") as stream, zipfile.ZipFile(stream) as members:
        for name in members.namelist():
            with members.open(name) as member:
                arrays[name.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
                if member.read(1):  # the checksum is compared at the end
                    raise ValueError(f"{name} is longer than its array")
        stream.seek(-12, os.SEEK_END)
        if not arrays or len(arrays) != int.from_bytes(stream.read(2), "little"):
            raise ValueError("some arrays are missing")
    return arrays
