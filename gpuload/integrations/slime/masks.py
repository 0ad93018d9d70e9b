"""Conversations for slime's SFT, tokenized by columns, with slime's loss masks.

    qwen          a turn is a message. The ids of the system prompt that the template adds are removed from all but the
                  first
    qwen3         a turn is a message, or consecutive messages of tools. The first turn of a row is rendered before a
                  message of the user, the others after it, and the ids of that message are removed; then as above
    qwen3_5       the tokens of the rendered conversation. Those between the header of an assistant's message and the
                  end marker after it have loss, without the beginning of a thought
    distill_qwen  the first message with a generation prompt, then the content of the last one, which has loss

With the first two, all ids of an assistant's turn have loss, except for the first ones, as many as a generation prompt
has. These counts are slime's own. Rows that cannot be tokenized, and those for which slime raises an error, have no
ids: slime tokenizes them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from slime.utils.mask_utils import MultiTurnLossMaskGenerator

from gpuload.core.arrays import appended, stretches
from gpuload.core.errors import DataError
from gpuload.core.marks import with_loss
from gpuload.engines.host.spans import TokenSpans
from gpuload.integrations.core import are_messages, runs
from gpuload.integrations.messages.rows import NO_LOSS, MessageRows, each_part, trimmed
from gpuload.integrations.messages.templates import Arguments, Templates, render
from gpuload.integrations.messages.turns import Flags, MessageTurns
from gpuload.integrations.slime.samples import SampleColumns
from gpuload.sources.types import is_text

_PREFIX = {"role": "user", "content": "FOR CALCULATING LOSS MASK ONLY"}  # slime's
_HEADER, _THOUGHT, _END = b"<|im_start|>assistant\n", b"<think>\n", b"<|im_end|>"  # slime's
_AT_ONCE = 20_000  # messages

Rule = Callable[[pa.Array, Sequence[Arguments]], MessageRows]
"""n conversations with a message at least, and what each of them passes to the template → their rows."""


class MaskedConversations:
    """n conversations with one of slime's loss masks; a `DataError` if slime has to tokenize all rows."""

    def __init__(self, args: Any, tokenizer: Any, samples: SampleColumns):
        kind = args.loss_mask_type
        if kind not in ("qwen", "qwen3", "qwen3_5", "distill_qwen"):
            raise DataError(f"loss_mask_type={kind!r} is not supported")
        self._samples, self._column = samples, samples.columns.table()[samples.prompt].combine_chunks()
        if not are_messages(self._column.type):
            raise DataError(f"column {samples.prompt!r} is not messages with text")
        self._counts = np.asarray(pc.fill_null(pc.list_value_length(self._column), 0), np.int64)
        if not self._counts.any():
            raise DataError(f"column {samples.prompt!r} has no messages")
        try:
            self._generator = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type=kind)
        except Exception as error:  # whatever the template raises: slime raises it at the first step
            raise DataError(f"slime's loss mask cannot be made: {error!s:.200}") from error
        if kind == "qwen" and "<｜Assistant｜>" in tokenizer.get_added_vocab():
            kind = "distill_qwen"
        self._kind, self.templates = kind, Templates(tokenizer)
        if kind in ("qwen3_5", "distill_qwen") and not self.templates.encodes_rendered_text:
            raise DataError("the tokenizer class changes how texts are encoded")
        # What decides ids and masks, in addition to the rows and the tokenizer.
        self.settings = {
            "loss_mask_type": kind,
            "system_message_length": self._generator.system_message_length,
            "gen_token_length": self._generator.gen_token_length,
        }

    def rows(self) -> MessageRows:
        """Ids of all rows, with a bit for loss (`gpuload.core.marks`); a `DataError` if slime has to tokenize all
        rows."""
        if self._kind == "qwen3_5":
            rule = by_markers(self.templates)
        elif self._kind == "distill_qwen":
            rule = by_answer(self.templates)
        else:
            rule = by_turns(self._kind, self._generator, self.templates)
        given, others = _arguments(self._samples)
        others |= dict.fromkeys(np.flatnonzero(self._counts == 0).tolist(), "it has no messages")
        rows = np.setdiff1d(np.arange(len(self._column)), list(others))

        def made(part: Sequence[int]) -> MessageRows:
            return rule(self._column.take(pa.array(part)), [given[row] for row in part])

        return MessageRows.joined(each_part(made, runs(rows.tolist(), self._counts[rows], _AT_ONCE)), rows, others)


def _arguments(samples: SampleColumns) -> tuple[list[Arguments], dict[int, str]]:
    """(n,) what rows pass to the template: the tools in their metadata. And rows of which only slime knows that."""
    kind = None if samples.metadata is None else samples.columns.table()[samples.metadata].type
    none = kind is None or pa.types.is_null(kind) or (pa.types.is_struct(kind) and kind.get_field_index("tools") < 0)
    if samples.tools is None and none:
        return [{}] * len(samples), {}
    given: list[Arguments] = [{}] * len(samples)
    others: dict[int, str] = {}
    for row, sample in enumerate(samples.take(np.arange(len(samples)))):
        tools = sample.metadata.get("tools") if isinstance(sample.metadata, dict) else sample.metadata
        if tools is None:
            continue
        if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
            given[row] = {"tools": tools}
        else:
            others[row] = "its tools are not a list of objects"
    return given, others


def _has_loss(turns: MessageTurns) -> Flags:
    """(t,) whether `step_loss_mask` of a turn's first message allows loss."""
    index = turns.messages.type.get_field_index("step_loss_mask")
    if index < 0:
        return np.ones(len(turns.start), bool)
    given = turns.messages.field(index)
    if is_text(given.type):  # slime compares with the number 1, which no text is
        return np.zeros(len(turns.start), bool)
    try:
        mask = given.cast(pa.float64()).take(pa.array(turns.start))
    except pa.ArrowException as error:
        raise DataError(f"step_loss_mask is not a number: {error}") from error
    # A null is not 1: slime's default is for messages without the key.
    return np.asarray(pc.fill_null(pc.equal(mask, 1.0), False), bool)


# -- rules -------------------------------------------------------------------------------------------------------------


def by_turns(kind: str, generator: Any, templates: Templates) -> Rule:
    """The rule "trim", of slime's `gen_multi_turn_loss_mask_qwen` and `gen_multi_turn_loss_mask_qwen3`. A `DataError`:
    slime has to tokenize all rows."""
    system, unlearned = generator.system_message_length, generator.gen_token_length
    try:
        added = len(templates.default.reference.call.ids([_PREFIX])) if kind == "qwen3" else 0
    except Exception as error:
        raise DataError(f"slime's loss mask cannot be made: {error!s:.200}") from error
    if min(system, unlearned) < 0:
        raise DataError("the template's system prompt or generation prompt has no length")

    def rows(column: pa.Array, given: Sequence[Arguments]) -> MessageRows:
        turns = MessageTurns(column, joined="tool" if kind == "qwen3" else None)
        pieces = turns.with_message(_PREFIX, after=turns.opening) if kind == "qwen3" else turns.alone()
        chosen, number = templates.choose([*given, {}])
        # Only the first turn of a row is rendered with its tools.
        text = render(pieces, chosen, np.where(turns.opening, number[turns.row], number[-1]))
        ids = templates.encode(text)
        answers = turns.is_role("assistant")
        front = np.where(turns.opening, 0, added + np.where(turns.is_role("system"), 0, system))
        back = np.where(turns.opening, added, 0)
        loss_from = np.where(answers & _has_loss(turns), unlearned, NO_LOSS)
        # The mask of a turn that is shorter than a generation prompt has another length than its ids.
        short = np.flatnonzero(answers & (np.maximum(ids.lengths - front - back, 0) < unlearned))
        fallback = dict.fromkeys(turns.row[short].tolist(), "a turn is shorter than the generation prompt")
        fallback |= {int(turns.row[turn]): why for turn, why in text.rejected.items()}
        return MessageRows.of(trimmed(ids, turns, front, loss_from, back), fallback, text)

    return rows


def by_markers(templates: Templates) -> Rule:
    """The rule of slime's `gen_multi_turn_loss_mask_qwen3_5`: what is between markers in the rendered text has loss. A
    `DataError`: slime has to tokenize all rows."""
    token_spans = TokenSpans(templates.default.reference)
    table = token_spans.table
    if table is not None and (table.leading.any() or table.trailing.any()):
        raise DataError("the tokenizer trims white space from offsets, which decide about slime's loss mask")

    def rows(column: pa.Array, given: Sequence[Arguments]) -> MessageRows:
        turns = MessageTurns(column)
        answers = np.flatnonzero(turns.is_role("assistant"))
        of_row = np.split(_has_loss(turns)[answers], np.searchsorted(turns.row[answers], np.arange(1, len(column))))
        text = render(column, *templates.choose(given))
        fallback, spans = dict(text.rejected), []
        for row, (whole, has_loss) in enumerate(zip(text.text.cast(pa.large_binary()), of_row, strict=True)):
            found = None if row in fallback else _marked(whole.as_py(), has_loss.tolist())
            if found is None:
                fallback.setdefault(row, "an answer is not between slime's markers")
            spans += [(row, *span) for span in found or []]
        ids, texts = templates.ids(text.text), pc.fill_null(text.text, "")
        owner, known = token_spans.owners(texts, ids, *np.array(spans, np.int64).reshape(-1, 3).T)
        fallback |= dict.fromkeys(np.flatnonzero(~known).tolist(), "places of its tokens are not known")
        return MessageRows.of(with_loss(ids, owner >= 0), fallback, text)

    return rows


def _marked(text: bytes, learned: Sequence[bool]) -> list[tuple[int, int]] | None:
    """Where the answers with loss are in one text, in bytes; None if not all of them are found."""
    spans, cursor = [], 0
    for has_loss in learned:
        start = text.find(_HEADER, cursor)
        end = text.find(_END, start + len(_HEADER))
        if start < 0 or end < 0:
            return None
        start += len(_HEADER)
        cursor = end + len(_END)
        cursor += text[cursor : cursor + 1] == b"\n"
        if has_loss:
            spans.append((start + len(_THOUGHT) * text.startswith(_THOUGHT, start), cursor))
    return spans


def by_answer(templates: Templates) -> Rule:
    """The rule of slime's `gen_multi_turn_loss_mask_distill_qwen`: first messages, and last contents with loss."""

    def rows(column: pa.Array, given: Sequence[Arguments]) -> MessageRows:
        turns = MessageTurns(column)
        first = turns.alone().take(pa.array(np.flatnonzero(turns.opening)))
        text = render(first, *templates.choose([{**own, "add_generation_prompt": True} for own in given]))
        last = np.cumsum(turns.counts) - 1
        contents = turns.messages.field("content").take(pa.array(last)).cast(pa.large_string())
        fallback = dict.fromkeys(np.flatnonzero(np.asarray(contents.is_null())).tolist(), "its last content is null")
        both = templates.ids(pa.concat_arrays([text.text, contents]))
        prompt, answer = (both.take(np.arange(len(column)) + start) for start in (0, len(column)))
        loss = stretches(prompt.lengths, answer.lengths)
        loss &= np.repeat(_has_loss(turns)[last], prompt.lengths + answer.lengths)
        return MessageRows.of(with_loss(appended(prompt, answer), loss), fallback | text.rejected, text)

    return rows
