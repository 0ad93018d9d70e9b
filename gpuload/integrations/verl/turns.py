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
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, common_prefixes, offsets_of
from gpuload.core.marks import split, with_loss
from gpuload.engines.host.encode import host_encoder
from gpuload.engines.protocol import RowCounts
from gpuload.integrations.verl.variants import (
    ConversationTexts,
    TemplateVariant,
    VariantKey,
    render_conversations,
    variant_key,
)

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_MISMATCH = "the ids of its messages differ from those of the whole conversation"


@dataclass
class TokenizedConversations:
    """n tokenized conversations.

    Attributes:
        ids: n rows of token ids, with a bit for loss (`core.marks`); empty for rows in `fallback` and `rejected`.
        fallback: row → why verl's method must tokenize it.
        rejected: row → why verl's method is expected to raise.
        mismatches: number of rows that are kept although the ids of their messages differ from those of the whole
            conversation (verl's `ignore_input_ids_mismatch`).
        rendering: how the texts were rendered.
    """

    ids: Ragged
    fallback: dict[int, str]
    rejected: dict[int, str]
    mismatches: int = 0
    rendering: RowCounts = field(default_factory=RowCounts)


class ConversationTokenizer:
    """Tokenizes batches of conversations.

    Args:
        tokenizer: a transformers tokenizer.
        kwargs: verl's `apply_chat_template_kwargs`.
        system_prompt: number of ids of the system prompt that the template adds to a single message.
        generation_prompt: number of ids at the start of an assistant message that are not learned.
        ignore_mismatch: keep rows whose messages have other ids than the whole conversation.

    Attributes:
        encodes_rendered_text: whether the ids of a conversation are the ids of its text. If not, this class cannot be
            used.

    Raises:
        OptionError: an argument in `kwargs` is not supported.
        TokenizerError: the tokenizer has no usable chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        kwargs: Mapping[str, Any],
        system_prompt: int,
        generation_prompt: int,
        ignore_mismatch: bool,
    ):
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        self._system_prompt = system_prompt
        self._generation_prompt = generation_prompt
        self._ignore_mismatch = ignore_mismatch
        self._instant = datetime.now()  # the same for all rows, in case the template prints it
        self._variants: dict[VariantKey, TemplateVariant] = {}
        reference = self._variant(None, None).reference
        self._encode = host_encoder(reference).encode
        self.encodes_rendered_text = reference.encodes_rendered_text and not reference.sanitizes

    def tokenize(
        self,
        conversations: pa.Array,
        tools: Sequence[Any] | None,
        thinking: Sequence[bool | None],
        rejected: Mapping[int, str],
    ) -> TokenizedConversations:
        """Tokenize one batch.

        Args:
            conversations: (n,) list or large_list of struct<role, ...>.
            tools: tools of each row; None if rows have no tools.
            thinking: `enable_thinking` of each row.
            rejected: row → reason, for rows that are known to be rejected.
        """
        layout = _flatten(conversations)
        variants, row_variant, message_variant = self._choose_variants(layout, tools, thinking)
        messages = render_conversations(layout.single_messages(), message_variant, variants, retry_after_user=True)
        wholes = render_conversations(conversations, row_variant, variants)
        # Tools often differ in each row: keep only variants that were compiled, and the default one.
        default = variant_key(None, None)
        self._variants = {
            key: variant for key, variant in self._variants.items() if variant.program is not None or key == default
        }
        result = TokenizedConversations(self._concatenate(layout, messages), {}, dict(rejected))
        result.rendering.add_counts(messages)
        result.rendering.add_counts(wholes)
        self._classify_rows(result, layout, messages, wholes)
        return _without_ids(result, [*result.fallback, *result.rejected])

    def _variant(self, tools: Any, thinking: bool | None) -> "TemplateVariant":
        key = variant_key(tools, thinking)
        if key not in self._variants:
            self._variants[key] = TemplateVariant(self._tokenizer, self._kwargs, tools, thinking, self._instant)
        return self._variants[key]

    def _choose_variants(
        self, layout: "_Layout", tools: Sequence[Any] | None, thinking: Sequence[bool | None]
    ) -> tuple[list["TemplateVariant"], Ints, Ints]:
        """The variants of a batch, the number of the variant of each row (n,), and of each message (m,).

        As in verl, whole conversations and first messages are rendered with the tools, later messages without.
        """
        numbers: dict[VariantKey, int] = {}
        variants: list[TemplateVariant] = []

        def number(row: int, with_tools: bool) -> int:
            row_tools = tools[row] if with_tools and tools is not None else None
            key = variant_key(row_tools, thinking[row])
            if key not in numbers:
                numbers[key] = len(variants)
                variants.append(self._variant(row_tools, thinking[row]))
            return numbers[key]

        n = len(layout.counts)
        with_tools = np.fromiter((number(row, True) for row in range(n)), np.int64, n)
        without_tools = np.fromiter((number(row, False) for row in range(n)), np.int64, n)
        of_message = without_tools[layout.row]
        of_message[layout.opening] = with_tools[layout.counts > 0]
        return variants, with_tools, of_message

    def _concatenate(self, layout: "_Layout", messages: "ConversationTexts") -> Ragged:
        """The ids of each row, from those of its messages, with bits."""
        ids = self._encode(messages.text())
        role = layout.messages.field("role").cast(pa.large_string())
        # How many ids verl removes from the start of each message: the empty user message, if the template needed one,
        # and the system prompt, except from a row's first message and from system messages.
        removed = messages.prefix + self._system_prompt * _differs_from(role, "system")
        removed[layout.opening] = messages.prefix[layout.opening]
        lengths = ids.lengths - np.minimum(removed, ids.lengths)
        # Position of each id in its message after the removal; negative if it is removed.
        position = np.arange(len(ids.values)) - np.repeat(ids.offsets[:-1] + removed, ids.lengths)
        is_assistant = np.repeat(~_differs_from(role, "assistant"), ids.lengths)
        learned = is_assistant & (position >= self._generation_prompt)
        offsets = offsets_of(lengths)[layout.offsets]  # of rows instead of messages
        return with_loss(Ragged(ids.values[position >= 0], offsets), learned[position >= 0])

    def _classify_rows(
        self,
        result: TokenizedConversations,
        layout: "_Layout",
        messages: "ConversationTexts",
        wholes: "ConversationTexts",
    ) -> None:
        """Fill in `fallback`, `rejected` and `mismatches`."""
        for row in np.flatnonzero(layout.counts == 0).tolist():
            result.rejected.setdefault(row, "no messages")
        for message, reason in messages.rejected.items():
            row = int(layout.row[message])
            if row not in result.rejected:
                result.fallback.setdefault(row, reason)
        for row, reason in wholes.rejected.items():
            if row not in result.fallback:
                result.rejected.setdefault(row, reason)
        concatenated, whole = split(result.ids)[0], self._encode(wholes.text())
        same = (concatenated.lengths == whole.lengths) & (common_prefixes(concatenated, whole) == whole.lengths)
        for row in np.flatnonzero(~same).tolist():
            if row in result.fallback or row in result.rejected:
                continue
            if self._ignore_mismatch:
                result.mismatches += 1
            else:
                result.rejected[row] = _MISMATCH


# -- conversations as columns ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """n conversations as one column of m messages.

    Attributes:
        messages: (m,) structs.
        counts: (n,) number of messages of each row.
        offsets: (n + 1,) position of each row's first message.
        row: (m,) row of each message.
    """

    messages: pa.StructArray
    counts: Ints
    offsets: Ints
    row: Ints

    @property
    def opening(self) -> Ints:
        """Positions of the first messages, one for each row that has messages."""
        return self.offsets[:-1][self.counts > 0]

    def single_messages(self) -> pa.LargeListArray:
        """(m,) each message as a conversation of one message."""
        return pa.LargeListArray.from_arrays(pa.array(np.arange(len(self.messages) + 1), pa.int64()), self.messages)


def _flatten(conversations: pa.Array) -> _Layout:
    counts = np.asarray(pc.fill_null(pc.list_value_length(conversations), 0), np.int64)
    return _Layout(conversations.flatten(), counts, offsets_of(counts), np.repeat(np.arange(len(counts)), counts))


# -- ids ---------------------------------------------------------------------------------------------------------------


def _differs_from(role: pa.Array, name: str) -> Bools:
    """(m,) whether a role is another one, or null."""
    return np.asarray(pc.fill_null(pc.not_equal(role, name), True), bool)


def _without_ids(result: TokenizedConversations, rows: list[int]) -> TokenizedConversations:
    """The same batch with no ids in the given rows."""
    if rows:
        keep = np.ones(len(result.ids), bool)
        keep[rows] = False
        lengths = result.ids.lengths
        result.ids = Ragged(result.ids.values[np.repeat(keep, lengths)], offsets_of(np.where(keep, lengths, 0)))
    return result
