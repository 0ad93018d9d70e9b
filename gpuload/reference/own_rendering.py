"""Tokenizers whose ids of a conversation need not be those of the text that they render."""

from functools import partial
from typing import Any

OWN_ENCODING = ("tokenizer_kwargs", "return_assistant_tokens_mask")
"""Arguments of `apply_chat_template` that change how its text is encoded."""


def renders_its_own_way(tokenizer: Any) -> bool:
    """Whether a tokenizer's class overrides `apply_chat_template`, or somebody has replaced it on the object.

    transformers' method with arguments given beforehand, as NeMo-RL keeps them on the object, is not meant, unless they
    are `OWN_ENCODING`.
    """
    from transformers import PreTrainedTokenizerBase

    method = PreTrainedTokenizerBase.apply_chat_template
    if type(tokenizer).apply_chat_template is not method:
        return True
    own: Any = vars(tokenizer).get("apply_chat_template")
    given: dict[str, Any] = {}
    if isinstance(own, partial) and not own.args:
        given, own = own.keywords, own.func
    if getattr(own, "__func__", None) is method:
        return any(map(given.get, OWN_ENCODING))
    return own is not None
