"""Fingerprints of datasets, so that a training run is not resumed on other data by accident."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuload.core.arrays import offsets_of
from gpuload.core.lazy import Later, LazyDict
from gpuload.core.options import Options
from gpuload.engines.protocol import TokenStore
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source

Fingerprint = dict[str, Any]

# Options that do not affect which rows a dataset has, nor their content.
_WITHOUT_EFFECT = frozenset(
    "cache_dir remote_timeout token_cache token_cache_bytes device tokens_on store gpu_memory_limit verify strict "
    "progress trust_remote_code distributed shuffle seed".split()
)


def fingerprint(sources: Sequence[Source], reference: Reference | None, options: Options) -> LazyDict:
    """Makes the fingerprint of a dataset, except for its tokens. Without a reference, nothing is tokenized.

    Returns:
        Plain data: `files` (name → digest), `tokenizer` and `options`. A dataset adds `tokens`, a digest of its ids,
        and `columns` (name → digest of the values), which decide: files that were rewritten, renamed or moved make no
        difference as long as every row is the same. The other parts say what changed.
    """
    # As the tokenizer is now: it may change later.
    tokenizer = Later(reference.fingerprint_later()) if reference else None
    names = [f"{number}: {os.path.basename(source.name)}" for number, source in enumerate(sources)]
    parts = {
        "files": {name: _digest(source.identity) for name, source in zip(names, sources, strict=True)},
        "tokenizer": tokenizer,
        "options": {
            field.name: _plain(getattr(options, field.name))
            for field in dataclasses.fields(options)
            if field.name not in _WITHOUT_EFFECT
        },
    }
    return LazyDict(parts)


def token_digest(tokens: TokenStore) -> str:
    """Digest of all ids; about a gigabyte per second."""
    values = (np.ascontiguousarray(chunk).data for chunk in tokens.chunks())
    return _digest(*values, offsets_of(tokens.lengths).data)


def difference(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Describes in words how two fingerprints differ; None if they are of the same data. A fingerprint that was saved
    before there were digests of columns has none; then only tokens and options are compared."""
    columns = saved.get("columns", current["columns"])
    if (saved.get("tokens"), saved.get("options"), columns) == (
        current["tokens"],
        current["options"],
        current["columns"],
    ):
        return None
    found = []
    for part, was in (
        ("files", saved.get("files") or {}),
        ("options", saved.get("options") or {}),
        ("columns", columns),
    ):
        now = current[part]
        for key in [*was, *(key for key in now if key not in was)]:
            if key not in now:
                found.append(f"{part}: {key} is missing now")
            elif key not in was:
                found.append(f"{part}: {key} is new")
            elif was[key] != now[key]:
                change = "has other values" if part == "columns" else f"was {was[key]!r}, is {now[key]!r}"
                found.append(f"{part}: {key} {change}")
    if saved.get("tokenizer") != current["tokenizer"]:
        found.append("tokenizer: another one, or another chat template")
    return "; ".join(found) or (
        "the tokens differ although files, tokenizer and options are the same: other rows may have been selected"
    )


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else repr(value)
