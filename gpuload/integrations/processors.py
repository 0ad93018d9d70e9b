"""Processors of vision models, for data that is only text: their tokenizer, with their template, has the same ids.

A processor gives its template messages whose content is a list of parts, where a tokenizer gives it text. So the
template gets a beginning that makes one part of each text: then it does with texts what it does for the processor.
Trainers compare rows of every shape with the processor before they rely on it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from gpuload.core.arrays import Ragged, count_in_rows
from gpuload.kinds.images.messages import AS_PARTS


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor; a tokenizer is its own."""
    return processor.tokenizer if isinstance(processor, ProcessorMixin) else processor


def template_of(processor: Any, chat_template: str | None = None) -> str:
    """The template with which the tokenizer renders texts as the processor does; a tokenizer's is the one given.
    `chat_template` replaces the default one, by a name or its text."""
    if not isinstance(processor, ProcessorMixin):
        return chat_template or "default"
    return AS_PARTS + (chosen_template(processor, chat_template) or "")


def chosen_template(processor: Any, chat_template: str | None) -> str | None:
    """The template of a processor that `chat_template` is the name of, or this text; its default one for None."""
    own = processor.chat_template
    named = own if isinstance(own, Mapping) else {"default": own}
    found: str | None = named.get(chat_template or "default", chat_template)
    return found


def processor_change(processor: Any) -> str | None:
    """That rows are compared because of a processor; None for a tokenizer."""
    return f"{type(processor).__name__} is a processor" if isinstance(processor, ProcessorMixin) else None


def processor_problem(processor: Any) -> str | None:
    """Why a processor's tokenizer may not take its place; None if it may, or if it is a tokenizer itself."""
    if isinstance(processor, PreTrainedTokenizerBase):
        return None
    name = type(processor).__name__
    if not isinstance(processor, ProcessorMixin):
        return f"{name} is neither a tokenizer nor a processor of transformers"
    if changed := [kind for kind in type(processor).__mro__ if not kind.__module__.startswith("transformers.")][:-1]:
        return f"{name} is a processor whose code is not of transformers, but of {changed[0].__module__}"
    tokenizer = getattr(processor, "tokenizer", None)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return f"{name} is a processor without a tokenizer of transformers"
    added = tokenizer.get_added_vocab()
    if unknown := sorted(_media_tokens(processor) - set(added)):
        return f"{name} is a processor, and {unknown[0]} in a text would not be one token"
    return None


def _media_tokens(processor: Any) -> set[str]:
    """The tokens that stand for images, videos and sounds in a text."""
    of_tokenizer = {getattr(processor.tokenizer, f"{kind}_token", None) for kind in ("image", "video", "audio")}
    own = {value for name, value in vars(processor).items() if name.endswith("_token")}
    return {str(value) for value in of_tokenizer | own if value is not None}


def adds_special_tokens(processor: Any) -> bool:
    """Whether a processor may add special tokens to a text: those that do not begin with one get them."""
    tokenizer = tokenizer_of(processor)
    return bool(tokenizer("x")["input_ids"] != tokenizer("x", add_special_tokens=False)["input_ids"])


def media_rows(processor: Any, rows: Ragged) -> list[int]:
    """Which texts have a token that stands for an image, a video or a sound, which the processor would need."""
    if not isinstance(processor, ProcessorMixin):
        return []
    media = np.isin(rows.values, processor.tokenizer.convert_tokens_to_ids(sorted(_media_tokens(processor))))
    return np.flatnonzero(count_in_rows(media, rows.offsets)).tolist()


def difference_of_ids(processor: Any, rows: Ragged, beginnings: bool) -> str | None:
    """Why a processor may have other ids for some texts than these; None if it has these, or is a tokenizer. Texts, or
    parts of them, may begin with these (`beginnings`)."""
    if not isinstance(processor, ProcessorMixin):
        return None
    if found := media_rows(processor, rows):
        return f"row {found[0]} has a token that stands for an image, which {type(processor).__name__} would need"
    bos = processor.tokenizer.bos_token_id
    if not beginnings or (rows.lengths.all() and (rows.values[rows.offsets[:-1]] == bos).all()):
        return None
    if not adds_special_tokens(processor):
        return None
    token = processor.tokenizer.bos_token
    return f"{type(processor).__name__} adds special tokens to texts, of which some do not begin with {token}"
