"""Prompt ids that travel with their rows, sealed, so that an agent loop knows them for its own.

verl tokenizes a prompt in the agent loop, once for each of its n samples. The loader has made the same ids long
before. They may be used only where the loop would make exactly these, and the loop runs in another process, with its
own tokenizer and configuration. So a row carries, beside the ids, a seal: what decided them, as two digests.

    source      tokenizer, chat template and its arguments, tools; the day, where the template tells the time
    messages    the conversation

The loop makes the seal anew from what it holds itself. Equal seals: the ids are used. Otherwise the prompt is
tokenized, which is slower and never wrong. Nothing has to be promised by a configuration, and a trainer that rewrites
`raw_prompt` after the loader is noticed too.
"""

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from gpuload.errors import GpuloadError
from gpuload.options import check_template_kwargs, plain
from gpuload.reference.reference import Reference

IDS = "gpuload_prompt_ids"
"""The key of a row's ids: list[int], all of them, not truncated."""

SEAL = "gpuload_prompt_seal"
"""The key of their seal: str."""

# Arguments of verl's own call of `apply_chat_template`: among the configured ones, it fails.
_VERLS = ("add_generation_prompt", "tokenize", "tools", "return_dict")

_sources: WeakKeyDictionary[Any, dict[str, str | None]] = WeakKeyDictionary()


def prompt_source(tokenizer: Any, kwargs: Mapping[str, Any], tools: Sequence[Any] | None = None) -> str | None:
    """A digest of all that decides a prompt's ids besides its messages.

    Made once for each tokenizer and set of arguments in a process: a tokenizer is megabytes of tables.

    Args:
        tokenizer: a transformers tokenizer.
        kwargs: verl's `data.apply_chat_template_kwargs`.
        tools: the schemas of the tools that the prompt is rendered with.

    Returns:
        The digest, or None where the loader makes no ids with such a tokenizer or such arguments.
    """
    # What is easily changed on a tokenizer, and quickly read: its length, for one, takes longer than a prompt's ids.
    changes = (tokenizer.chat_template, tokenizer.special_tokens_map, len(tokenizer.added_tokens_decoder))
    settings = repr((changes, dict(kwargs), tools))
    known = _sources.setdefault(tokenizer, {})
    if settings not in known:
        known[settings] = _digest_source(tokenizer, kwargs, tools)
    source = known[settings]
    return source and f"{source}{_day(tokenizer, kwargs)}"


def seal(source: str, messages: Sequence[Any]) -> str:
    """The seal of one prompt's ids.

    Args:
        source: see `prompt_source`.
        messages: the conversation, as rows carry it in `raw_prompt`.
    """
    return f"{source}/{_digest(repr(list(messages)))}"


def _digest_source(tokenizer: Any, kwargs: Mapping[str, Any], tools: Sequence[Any] | None) -> str | None:
    if any(name in kwargs for name in _VERLS):
        return None
    given = dict(kwargs) if tools is None else {**kwargs, "tools": tools}
    template = given.pop("chat_template", None) or "default"
    try:
        given = plain(given)
        check_template_kwargs(given)
        return Reference(tokenizer, chat_template=template, template_kwargs=given).fingerprint()
    except GpuloadError:
        return None


def _day(tokenizer: Any, kwargs: Mapping[str, Any]) -> str:
    """Today's date, where the template could print it."""
    templates = f"{tokenizer.chat_template}{kwargs.get('chat_template')}"
    return f"@{datetime.date.today()}" if "strftime_now" in templates else ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=12).hexdigest()
