"""A cache on disk for tables that take seconds to build."""

import contextlib
import hashlib
import zipfile
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from gpuload.files import cache_root, replacing

Arrays = dict[str, Any]  # name → numpy array


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
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(file) as arrays:
        return dict(arrays)
    arrays = build()
    with contextlib.suppress(OSError), replacing(file) as unfinished, unfinished.open("wb") as stream:
        np.savez(stream, **arrays)  # given a path, NumPy would append .npz to it
    return arrays
