"""What a data set was made of, so that a training run is never resumed on other data by accident."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuload.arrays import Ragged
from gpuload.options import Options
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source

Fingerprint = dict[str, Any]

# Options that decide neither which rows there are nor what is in them.
_WITHOUT_EFFECT = frozenset(
    "cache_dir token_cache token_cache_bytes device tokens_on gpu_memory_limit verify strict progress "
    "trust_remote_code shuffle seed".split()
)


def fingerprint(sources: Sequence[Source], reference: Reference | None, options: Options) -> Fingerprint:
    """Plain data: `files` (name → content), `tokenizer` (None: nothing is tokenized), `options`. A data set adds
    `tokens`, the ids themselves.

    The ids are the last word: files that were rewritten, renamed or moved to another machine make no difference as
    long as every row has the same tokens. The other parts are there to say what changed when they differ.
    """
    names = [f"{number}: {os.path.basename(source.name)}" for number, source in enumerate(sources)]
    return {
        "files": {name: _digest(source.identity) for name, source in zip(names, sources, strict=True)},
        "tokenizer": reference.fingerprint() if reference else None,
        "options": {
            field.name: _plain(getattr(options, field.name))
            for field in dataclasses.fields(options)
            if field.name not in _WITHOUT_EFFECT
        },
    }


def token_digest(tokens: Ragged) -> str:
    """Tells ids apart, at a gigabyte a second."""
    return _digest(np.ascontiguousarray(tokens.values).data, np.ascontiguousarray(tokens.offsets).data)


def difference(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """In words, what makes two fingerprints different data; None where it is the same."""
    if saved.get("tokens") == current["tokens"] and saved.get("options") == current["options"]:
        return None
    found = []
    for part in ("files", "options"):
        was, now = saved.get(part, {}), current[part]
        for key in [*was, *(key for key in now if key not in was)]:
            if key not in now:
                found.append(f"{part}: {key} is gone")
            elif key not in was:
                found.append(f"{part}: {key} is new")
            elif was[key] != now[key]:
                found.append(f"{part}: {key} was {was[key]!r}, is {now[key]!r}")
    if saved.get("tokenizer") != current["tokenizer"]:
        found.append("tokenizer: another one, or another chat template")
    return "; ".join(found) or "the tokens differ although files, tokenizer and options are the same"


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else repr(value)
