"""Digests that decide whether an agent loop may reuse the prompt ids of the loader.

verl tokenizes a prompt in the agent loop, once for each of its n samples, although the loader has made the same ids
before. The loop may reuse them only if its own call would return exactly these ids, and it runs in another process,
with its own tokenizer and configuration. So each row carries, next to its ids, two digests of everything that
determines them:

    source      tokenizer, chat template, template arguments and tools; also the date, if the template can print it
    messages    the conversation

The loop computes the same digests from its own tokenizer, configuration and messages. The ids are reused only if both
match; otherwise verl tokenizes the prompt. A wrong configuration, or a trainer that edits `raw_prompt` after loading,
therefore costs time but never changes the ids.
"""

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from gpuload.core.errors import GpuloadError
from gpuload.core.options import check_template_kwargs, plain
from gpuload.reference.reference import Reference

IDS_KEY = "gpuload_prompt_ids"
"""Row key of the prompt ids: list[int], not truncated."""

DIGEST_KEY = "gpuload_prompt_digest"
"""Row key of the digests of a prompt: str, see `prompt_digest`."""

# verl passes these to `apply_chat_template` itself: repeated in apply_chat_template_kwargs, they are a TypeError there.
_PASSED_BY_VERL = ("add_generation_prompt", "tokenize", "tools", "return_dict")

_known_sources: WeakKeyDictionary[Any, dict[str, str | None]] = WeakKeyDictionary()


def source_digest(tokenizer: Any, kwargs: Mapping[str, Any], tools: Sequence[Any] | None = None) -> str | None:
    """Compute the digest of everything except the messages that determines the ids of a prompt: the tokenizer, verl's
    `data.apply_chat_template_kwargs`, and the schemas of tools. None if the loader cannot make ids with these.

    Cached per process for each tokenizer and set of arguments, because a tokenizer holds megabytes of tables.
    """
    # Part of the cache key: changes that users make to a tokenizer and that are cheap to read. `len(tokenizer)`, for
    # example, would notice more of them, but takes longer than tokenizing a prompt.
    changes = (tokenizer.chat_template, tokenizer.special_tokens_map, len(tokenizer.added_tokens_decoder))
    settings = repr((changes, dict(kwargs), tools))
    known = _known_sources.setdefault(tokenizer, {})
    if settings not in known:
        known[settings] = _compute_source_digest(tokenizer, kwargs, tools)
    source = known[settings]
    return source and f"{source}{_date_suffix(tokenizer, kwargs)}"


def prompt_digest(source: str, messages: Sequence[Any]) -> str:
    """Compute the digests of one prompt, as "source/messages", of the `source_digest` and the messages of a row's
    `raw_prompt`."""
    return f"{source}/{_digest(repr(list(messages)))}"


def source_of(digest: str) -> str:
    """Return the source part of a `prompt_digest`."""
    return digest.rpartition("/")[0]


def _compute_source_digest(tokenizer: Any, kwargs: Mapping[str, Any], tools: Sequence[Any] | None) -> str | None:
    if any(name in kwargs for name in _PASSED_BY_VERL):
        return None
    arguments = dict(kwargs) if tools is None else {**kwargs, "tools": tools}
    template = arguments.pop("chat_template", None) or "default"
    try:
        arguments = plain(arguments)
        check_template_kwargs(arguments)
        return Reference(tokenizer, chat_template=template, template_kwargs=arguments).fingerprint()
    except GpuloadError:
        return None


def _date_suffix(tokenizer: Any, kwargs: Mapping[str, Any]) -> str:
    """Today's date, if the template can print it."""
    templates = f"{tokenizer.chat_template}{kwargs.get('chat_template')}"
    return f"@{datetime.date.today()}" if "strftime_now" in templates else ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=12).hexdigest()
