"""Whether a tokenizer was opened with its vocabulary.

transformers 5 opens a directory, or a model of the hub, that has a tokenizer_config.json but no vocabulary, without an
error: the tokenizer then has special and added tokens only, and all other text becomes nothing, or unknown tokens.
"""

import os
from pathlib import Path
from typing import Any

from gpuload.core.errors import TokenizerError

MOST_IDS = 1 << 21
"""Ids are below; the bits above are for what else is known of a token (`core.marks`)."""

_LARGE = 1000  # tokens; more are a vocabulary, and need not be read
_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model")  # of any class


def check_vocabulary(tokenizer: Any) -> None:
    """Check that a transformers tokenizer has a vocabulary.

    Raises:
        TokenizerError: it has none, and there is no file of one where it comes from; or an id is too large.
    """
    added = tokenizer.added_tokens_decoder
    # The length of a tokenizer takes a copy of its vocabulary.
    tokens = tokenizer.vocab_size + len(added)
    largest = max([tokens - 1 if tokens < MOST_IDS else len(tokenizer) - 1, *added])
    if largest >= MOST_IDS:
        raise TokenizerError(
            f"the tokenizer has the id {largest:,}, and ids up to {MOST_IDS - 1:,} are supported: use another tokenizer"
        )
    if tokenizer.vocab_size > _LARGE:
        return
    # transformers adds the mark of a space, or another single token, to the vocabularies of some classes.
    if len({*tokenizer.get_vocab()} - {*tokenizer.get_added_vocab()} - {*tokenizer.all_special_tokens}) > 1:
        return
    place = str(getattr(tokenizer, "name_or_path", ""))
    files = [*dict.fromkeys([*_FILES, *type(tokenizer).vocab_files_names.values()])]
    # A tokenizer that was made in memory, or whose vocabulary consists of added tokens, is what its owner wants.
    if not place or any(file_of(place, file) for file in files):
        return
    raise TokenizerError(
        f"tokenizer {place!r} has no vocabulary, only {len(tokenizer):,} special and added tokens: "
        f"add the files of its vocabulary, one or more of {', '.join(files)}"
    )


def is_id(given: int, tokenizer: Any) -> bool:
    """Whether a tokenizer has an id. Its length is asked for last: that takes a copy of its vocabulary."""
    return 0 <= given < tokenizer.vocab_size or 0 <= given < len(tokenizer)


def file_of(place: str, name: str) -> Path | None:
    """A file of a model that was opened before: in its directory, or in the cache of the hub; None if there is none."""
    if os.path.isdir(place):
        found = Path(place, name)
        return found if os.path.exists(found) else None
    if os.path.exists(place):  # a tokenizer.json by itself
        return Path(place)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(place, name)
    return Path(cached) if isinstance(cached, str) else None
