"""Control tokens: the texts of a tokenizer that stand for one id, and must not come from a message.

By default the text `<|im_start|>` in a message becomes the control token, in transformers as here. With
`sanitize_control_tokens=True`, transformers puts two private-use characters around each such text before it renders the
template. Where a text is still between them in the rendered prompt, it is encoded as plain text. What that means in
detail is defined by transformers' own functions, which are called here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

FIRST_VERSION = "5.20"
"""The first version of transformers with `sanitize_control_tokens`."""

START, END = "\U000f0000", "\U000f0001"
"""The characters around the text of a control token that came from a message."""

_FUNCTIONS = ("mark_control_tokens", "encode_marked_chat", "_encode_chat_piece", "_get_control_token_patterns")


class ControlTokens:
    """The control tokens of a tokenizer with a chat template.

    Args:
        tokenizer: a transformers tokenizer.
        texts: the control tokens.

    Attributes:
        texts: the same, longest first, without empty ones.
    """

    def __init__(self, tokenizer: Any, texts: Iterable[str]) -> None:
        self._tokenizer, self._texts = tokenizer, tuple(texts)
        self.texts = tuple(sorted(filter(None, self._texts), key=len, reverse=True))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches any control token."""
        return re.compile("|".join(map(re.escape, self.texts)) or "(?!)")

    def found_in(self, value: Any) -> bool:
        """Whether any string inside a value contains the text of a control token."""
        waiting = [value]  # not by recursion, which rows that are nested deeply would exceed
        shortest, search = len(self.texts[-1]) if self.texts else 0, self.pattern.search
        while waiting:
            part = waiting.pop()
            if isinstance(part, str):
                if len(part) >= shortest and search(part):
                    return True
            elif isinstance(part, (dict, list, tuple)):
                waiting.extend(part.values() if isinstance(part, dict) else part)
        return False

    def mark(self, value: Any) -> Any:
        """A value with every control token in its strings marked, as transformers marks them."""
        from transformers.utils import chat_template_utils

        return chat_template_utils.mark_control_tokens(value, self._plain)

    def pieces(self, text: str) -> list[str | None]:
        """A rendered text, split at its marks: text, control token, text, ... with None for a lone mark."""
        return list(self._marked.split(text))

    @cached_property
    def _plain(self) -> re.Pattern[str]:
        return self._patterns(self._texts)[0]

    @cached_property
    def _marked(self) -> re.Pattern[str]:
        return self._patterns(tuple(self._tokenizer.added_tokens_encoder))[1]

    @staticmethod
    def _patterns(texts: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """transformers' patterns of control tokens, and of marked ones and lone marks. It caches them."""
        from transformers.utils import chat_template_utils

        plain, marked = chat_template_utils._get_control_token_patterns(texts)
        return plain, marked

    @cached_property
    def newline(self) -> list[int]:
        """The ids of a newline, after which transformers encodes every piece but the first."""
        return list(self._tokenizer.encode("\n", add_special_tokens=False))

    def plain_ids(self, token: str) -> list[int]:
        """The ids of a control token as plain text.

        Raises:
            ValueError: the tokenizer produces the control token even from plain text.
        """
        if token not in self._plain_ids:
            from transformers.utils import chat_template_utils

            ids = list(chat_template_utils._encode_chat_piece(self._tokenizer, token, True, self.newline))
            if self._tokenizer.convert_tokens_to_ids(token) in ids:
                # transformers' own message
                raise ValueError(f"Can't sanitize {token!r}: the tokenizer produces it from plain text")
            self._plain_ids[token] = ids
        return self._plain_ids[token]

    @cached_property
    def _plain_ids(self) -> dict[str, list[int]]:
        return {}


def added_control_tokens(tokenizer: Any, literals: str) -> tuple[str, ...]:
    """The control tokens of a tokenizer: its special tokens, and other added tokens that a template writes.

    Args:
        literals: the literal strings of the template.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    listed = getattr(tokenizer, "chat_control_tokens", None)
    if listed is not None:
        return tuple(token.content for token in added if token.special or token.content in listed)
    return tuple(
        token.content for token in added if token.special or (token.content in literals and not token.content.isspace())
    )


def arguments_are_marked() -> bool:
    """Whether transformers marks control tokens in further arguments of a template: 5.20 to 5.22 do not."""
    from transformers import PreTrainedTokenizerBase

    return hasattr(PreTrainedTokenizerBase, "_mark_chat_inputs")


def sanitizing_is_known() -> bool:
    """Whether the functions of transformers that are called here exist."""
    from transformers.utils import chat_template_utils

    marks = [getattr(chat_template_utils, f"_CONTROL_TOKEN_{side}", None) for side in ("START", "END")]
    return marks == [START, END] and all(hasattr(chat_template_utils, name) for name in _FUNCTIONS)
