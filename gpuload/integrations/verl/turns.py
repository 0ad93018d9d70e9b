"""Tokenize multi-turn conversations by columns, with the same result as verl's SFT dataset.

verl renders and encodes each message as a conversation of one message, removes the ids of the system prompt that the
template puts before it, and concatenates the ids of all messages. It then renders the whole conversation, and raises if
its ids differ. Here a batch of conversations becomes two columns of text:

    messages         each message of each row, as a conversation of one    → ids, trimmed and concatenated
    conversations    each row                                              → ids, compared with the others

The compiled template renders both columns and the host encoder tokenizes them. If the template rejects a single message
(Qwen3.5 needs a user message), verl renders it after an empty user message and removes the ids of that message; so does
this module. Rows that cannot be tokenized like this are returned with a reason: the caller falls back to verl's method.

This is not built on `load_chats`, whose results are other ones: it tokenizes whole conversations, while verl keeps the
ids of the messages where they differ (Qwen3's thoughts, OLMo 2's EOS), and its loss has the answers that the template
writes, while verl's has all ids of an assistant's message after as many as a generation prompt has. What is shared:
rendering and encoding by columns, ids with a bit for loss, and their comparison.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import RowNumbers, common_prefixes, mask_of
from gpuload.core.marks import split
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import add_seconds
from gpuload.integrations.messages.rows import NO_LOSS, MessageRows, trimmed, without
from gpuload.integrations.messages.templates import Template, Templates, render
from gpuload.integrations.messages.turns import MessageTurns

_MISMATCH = "the ids of its messages differ from those of the whole conversation"

_EMPTY_USER = [{"role": "user", "content": [{"type": "text", "text": ""}]}]

# transformers renders with trim_blocks, which removes the newline after a block. The newline at the end of this prefix
# is the one that is removed, so that a newline at the start of the template is not.
_AFTER_EMPTY_USER = f"{{% set messages = {_EMPTY_USER} + messages %}}\n"

_EXAMPLES = 8  # messages on which the template with the prefix is compared with verl's call


@dataclass
class TokenizedConversations(MessageRows):
    """n tokenized conversations. Rows in `fallback` are tokenized by verl's method, once."""

    # Row → why verl's method is expected to raise. Such rows have no ids.
    rejected: dict[int, str] = field(default_factory=dict)
    # Number of rows that are kept although the ids of their messages differ from those of the whole conversation
    # (verl's `ignore_input_ids_mismatch`).
    mismatches: int = 0


class ConversationTokenizer:
    """Tokenizes batches of conversations.

    Attributes:
        encodes_rendered_text: whether the ids of a conversation are the ids of its text. If not, this class cannot be
            used.
        reference: the tokenizer with its template.

    Raises:
        OptionError: an argument in `kwargs` is not supported.
        TokenizerError: the tokenizer has no usable chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        kwargs: Mapping[str, Any],  # verl's `apply_chat_template_kwargs`
        system_prompt: int,  # number of ids of the system prompt that the template adds to a single message
        generation_prompt: int,  # number of ids at the start of an assistant message that are not learned
        ignore_mismatch: bool,  # keep rows whose messages have other ids than the whole conversation
    ):
        self._system_prompt = system_prompt
        self._generation_prompt = generation_prompt
        self._ignore_mismatch = ignore_mismatch
        self._templates = Templates(tokenizer, kwargs)
        self._after_user: WeakKeyDictionary[Template, tuple[Template, int]] = WeakKeyDictionary()
        self.encodes_rendered_text = self._templates.encodes_rendered_text
        self.reference = self._templates.default.reference

    def tokenize(
        self,
        conversations: pa.Array,  # (n,) list or large_list of struct<role, ...>
        tools: Sequence[Any] | None,  # (n,); None if rows have no tools
        thinking: Sequence[bool | None],  # (n,) `enable_thinking`
        rejected: Mapping[int, str],  # row → reason, for rows that are known to be rejected
    ) -> TokenizedConversations:
        """Tokenize one batch."""
        turns, n = MessageTurns(conversations), len(conversations)
        # As in verl, whole conversations and first messages are rendered with the tools, later messages without.
        without_tools = [{} if flag is None else {"enable_thinking": flag} for flag in thinking]
        with_tools = [
            own if given is None else {"tools": given, **own}
            for given, own in zip(tools or [None] * n, without_tools, strict=True)
        ]
        templates, number = self._templates.choose(with_tools + without_tools)
        of_message = np.where(turns.opening, number[turns.row], number[n + turns.row])
        messages, prefix = self._messages(turns.alone(), templates, of_message)
        wholes = render(conversations, templates, number[:n])
        # The rule "trim", of verl's `_process_single_message` and `__getitem__`. How many ids verl removes from the
        # start of each message: the empty user message, if the template needed one, and the system prompt, except from
        # a row's first message and from system messages.
        front = prefix + self._system_prompt * (~turns.opening & ~turns.is_role("system"))
        loss_from = np.where(turns.is_role("assistant"), self._generation_prompt, NO_LOSS)
        ids = trimmed(self._templates.ids(messages.text), turns, front, loss_from)
        result = TokenizedConversations(ids, {}, rejected=dict(rejected))
        result.rendering.add_counts(messages)
        result.rendering.add_counts(wholes)
        self._classify_rows(result, turns, messages, wholes)
        result.ids = without(result.ids, [*result.fallback, *result.rejected])
        return result

    def _messages(
        self, pieces: pa.Array, templates: Sequence[Template], number: RowNumbers
    ) -> tuple[HostText, RowNumbers]:
        """The texts of m single messages, and (m,) how many ids of each are those of an empty user message."""
        text = render(pieces, templates, number)
        prefix = np.zeros(len(pieces), np.int64)
        failed = np.array(sorted(text.rejected), np.int64)
        for k in np.unique(number[failed]).tolist():
            again = failed[number[failed] == k]
            found = self._after_empty_user(templates[k], pieces.take(pa.array(again[:_EXAMPLES])))
            if found is not None:
                template, prefix[again] = found
                template.needed_by(len(again))
                _replace(text, again, template.render(pieces.take(pa.array(again))))
        return text, prefix

    def _after_empty_user(self, template: Template, examples: pa.Array) -> tuple[Template, int] | None:
        """The template that renders an empty user message first, and how many ids that has; None if it cannot do so.
        The first example, of messages that need it, that renders is compared with verl's call."""
        if template in self._after_user:
            return self._after_user[template]
        for example in examples:
            try:
                conversation = example.as_py()
                expected = template.reference.call.render(_EMPTY_USER + conversation)
                after = template.beginning_with(_AFTER_EMPTY_USER)
                if after.reference.render(conversation) != expected:
                    return None
                found = after, len(template.reference.call.ids(_EMPTY_USER))
            except Exception:  # whatever the template raises, verl's code raises it too: try the next example
                continue
            self._after_user[template] = found
            return found
        return None

    def _classify_rows(
        self, result: TokenizedConversations, turns: MessageTurns, messages: HostText, wholes: HostText
    ) -> None:
        """Fill in `fallback`, `rejected` and `mismatches`."""
        for row in np.flatnonzero(turns.counts == 0).tolist():
            result.rejected.setdefault(row, "no messages")
        for message, reason in messages.rejected.items():
            row = int(turns.row[message])
            if row not in result.rejected:
                result.fallback.setdefault(row, reason)
        for row, reason in wholes.rejected.items():
            if row not in result.fallback:
                result.rejected.setdefault(row, reason)
        concatenated, whole = split(result.ids)[0], self._templates.ids(wholes.text)
        same = (concatenated.lengths == whole.lengths) & (common_prefixes(concatenated, whole) == whole.lengths)
        for row in np.flatnonzero(~same).tolist():
            if row in result.fallback or row in result.rejected:
                continue
            if self._ignore_mismatch:
                result.mismatches += 1
            else:
                result.rejected[row] = _MISMATCH


def _replace(text: HostText, rows: RowNumbers, other: HostText) -> None:
    """Puts other texts in the place of those of some rows."""
    text.text = pc.replace_with_mask(text.text, pa.array(mask_of(rows, len(text))), other.text)
    for place, row in enumerate(rows.tolist()):
        for own, others in ((text.rejected, other.rejected), (text.by_reference, other.by_reference)):
            own.pop(row, None)
            if place in others:
                own[row] = others[place]
    add_seconds(text.reason_seconds, other.reason_seconds)
    if text.with_control is not None and other.with_control is not None:
        text.with_control[rows] = other.with_control
