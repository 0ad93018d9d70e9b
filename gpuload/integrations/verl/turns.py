"""Conversations as verl's SFT data set tokenizes them, message by message, made by columns.

verl renders and encodes every message as a conversation of its own, cuts off the system prompt that the template put
before it, and sets the messages' ids one after the other; then it renders the whole conversation once more, to see that
the ids are the same. A batch of conversations is therefore two columns here:

    messages          every message of every row, each a conversation of one    → ids, cut, joined
    conversations     the rows                                                  → ids, to compare with

Both go through the compiled template and the host encoder. A message that the template rejects to render alone is
rendered after an empty user message, whose ids are then cut off, as verl does it. Rows that cannot be made like this
are named, with the reason, and left to verl's own code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.arrays import Ragged, offsets_of
from gpuload.engines.host.encode import host_encoder
from gpuload.engines.host.prompts import render_column, render_rows
from gpuload.engines.host.rendered import Rendered
from gpuload.options import check_template_kwargs, plain
from gpuload.reference.reference import Reference
from gpuload.template import ChatProgram

Ints = npt.NDArray[np.int64]

_EMPTY_USER = [{"role": "user", "content": [{"type": "text", "text": ""}]}]

# transformers' templates lose the first newline after a block: this one is ours, and none of the template's is lost.
_AFTER_EMPTY_USER = f"{{% set messages = {_EMPTY_USER} + messages %}}\n"

FEWEST_ROWS = 16
"""Tools are often of one row each. A template is compiled for so many conversations with the same ones."""


@dataclass
class Tokenized:
    """n conversations.

    Attributes:
        ids: n rows; empty ones where verl is to make them.
        loss: (len(ids.values),) uint8, 1 where a token is learned.
        once: row → why verl's code has to make its ids.
        rejected: row → why verl's code is expected to raise.
        ignored: how many rows have messages whose ids are not those of the whole conversation, and are kept.
        by_column, by_reference: how many texts the compiled template rendered, and how many transformers.
        reasons: why the template was not used, and how many texts each.
    """

    ids: Ragged
    loss: npt.NDArray[np.uint8]
    once: dict[int, str]
    rejected: dict[int, str]
    ignored: int = 0
    by_column: int = 0
    by_reference: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


class Turns:
    """Tokenizes batches of conversations.

    Args:
        tokenizer: a transformers tokenizer.
        kwargs: the configured arguments of the chat template.
        system_prompt: how many ids of a later message's rendering are the system prompt.
        generation_prompt: how many ids of an assistant's message are not learned.
        ignore_mismatch: keep rows whose messages' ids are not those of the whole conversation.

    Raises:
        OptionError, TokenizerError: verl's class would not tokenize with such arguments either, or not like this.
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
        self._instant = datetime.now()
        self._ways: dict[tuple[str, bool | None], _Way] = {}
        plain = self._way(None, None)
        self._encode = host_encoder(plain.reference).encode
        self.exact_by_text = plain.reference.encodes_rendered_text

    def tokenize(
        self,
        conversations: pa.Array,
        tools: Sequence[Any] | None,
        thinking: Sequence[bool | None],
        rejected: Mapping[int, str],
    ) -> Tokenized:
        """Tokenizes one batch.

        Args:
            conversations: (n,) list<struct<role, ...>>, large or not.
            tools: of each row; None: rows have no tools.
            thinking: `enable_thinking` of each row.
            rejected: rows that are known to be rejected already, and why.
        """
        counts = np.asarray(pc.fill_null(pc.list_value_length(conversations), 0), np.int64)
        messages = conversations.flatten()
        first = offsets_of(counts)
        row_of = np.repeat(np.arange(len(counts)), counts)
        numbers: dict[tuple[str, bool | None], int] = {}
        ways: list[_Way] = []

        def number(row: int, with_tools: bool) -> int:
            its = tools[row] if with_tools and tools is not None else None
            key = ("" if its is None else repr(its), thinking[row])
            if key not in numbers:
                numbers[key] = len(ways)
                ways.append(self._way(its, thinking[row]))
            return numbers[key]

        whole_way = np.fromiter((number(row, True) for row in range(len(counts))), np.int64, len(counts))
        later_way = np.fromiter((number(row, False) for row in range(len(counts))), np.int64, len(counts))
        message_way = later_way[row_of]
        opening = first[:-1][counts > 0]
        message_way[opening] = whole_way[counts > 0]

        alone = pa.LargeListArray.from_arrays(pa.array(np.arange(len(messages) + 1), pa.int64()), messages)
        said = self._texts(alone, message_way, ways, alone=True)
        whole = self._texts(conversations, whole_way, ways)
        self._ways = {key: way for key, way in self._ways.items() if way.program is not None or key == ("", None)}

        parts = self._encode(said.text)
        role = messages.field("role").cast(pa.large_string())
        cut = said.cut + self._system_prompt * _unlike(role, "system")
        cut[opening] = said.cut[opening]
        kept = parts.lengths - np.minimum(cut, parts.lengths)
        place = np.arange(len(parts.values)) - np.repeat(parts.offsets[:-1], parts.lengths)
        place -= np.repeat(cut, parts.lengths)
        learned = np.repeat(~_unlike(role, "assistant"), parts.lengths) & (place >= self._generation_prompt)
        row_ends = np.concatenate([[0], np.cumsum(kept)])[first]
        ids = Ragged(parts.values[place >= 0], row_ends)
        loss = learned[place >= 0].astype(np.uint8)

        result = Tokenized(ids, loss, {}, dict(rejected), by_column=said.by_column + whole.by_column)
        result.by_reference = said.by_reference + whole.by_reference
        for found in (said.reasons, whole.reasons):
            for why, many in found.items():
                result.reasons[why] = result.reasons.get(why, 0) + many
        for row in np.flatnonzero(counts == 0).tolist():
            result.rejected.setdefault(row, "no messages")
        for message, why in said.rejected.items():
            if int(row_of[message]) not in result.rejected:
                result.once.setdefault(int(row_of[message]), why)
        for row, why in whole.rejected.items():
            if row not in result.once:
                result.rejected.setdefault(row, why)
        for row in np.flatnonzero(_differing(ids, self._encode(whole.text))).tolist():
            if row in result.once or row in result.rejected:
                continue
            if self._ignore_mismatch:
                result.ignored += 1
            else:
                result.rejected[row] = "the ids of its messages are not those of the whole conversation"
        return _emptied(result)

    def _way(self, tools: Any, thinking: bool | None) -> "_Way":
        key = ("" if tools is None else repr(tools), thinking)
        if key not in self._ways:
            self._ways[key] = _Way(self._tokenizer, self._kwargs, tools, thinking, self._instant)
        return self._ways[key]

    def _texts(self, conversations: pa.Array, way_of: Ints, ways: list["_Way"], alone: bool = False) -> "_Texts":
        """Renders conversations, each in its way.

        Args:
            alone: they are messages; one that cannot be rendered comes after an empty user message.
        """
        count = len(conversations)
        found = _Texts(pa.array([], pa.large_string()), np.zeros(count, np.int64))
        texts: list[pa.Array] = []
        rows_of: list[Ints] = []

        def take(rendered: Rendered, rows: Ints) -> Ints:
            texts.append(pc.fill_null(rendered.text, ""))
            rows_of.append(rows)
            found.by_column += rendered.compiled_rows
            found.by_reference += rendered.reference_rows
            for why, many in rendered.reasons.items():
                found.reasons[why] = found.reasons.get(why, 0) + many
            found.rejected.update((int(rows[row]), why) for row, why in rendered.rejected.items())
            return rows[sorted(rendered.rejected)]

        for number in np.unique(way_of).tolist():
            rows = np.flatnonzero(way_of == number)
            some = conversations if len(rows) == count else conversations.take(pa.array(rows))
            missing = take(ways[number].render(some), rows)
            if alone and len(missing):
                after = ways[number].after_empty_user(conversations.take(pa.array(missing[:8])))
                if after is not None:
                    for row in missing.tolist():
                        del found.rejected[row]
                    take(after.render(conversations.take(pa.array(missing))), missing)
                    found.cut[missing] = after.cut
        # A row that was rendered twice has its later text: of equal indices, the last assignment stays.
        at = np.zeros(count, np.int64)
        if count:
            at[np.concatenate(rows_of)] = np.arange(sum(map(len, rows_of)))
            found.text = pa.concat_arrays(texts).take(pa.array(at))
        return found


@dataclass
class _Texts:
    """Texts of n conversations: "" where rejected, and how many ids at the start of each are not its own."""

    text: pa.Array
    cut: Ints
    rejected: dict[int, str] = field(default_factory=dict)
    by_column: int = 0
    by_reference: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


class _Way:
    """How conversations with the same tools and arguments are rendered: compiled once there are enough of them.

    Attributes:
        cut: how many ids at the start of every text are not its own.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any], tools: Any, thinking: bool | None, instant: datetime):
        self._given = (tokenizer, kwargs, tools, thinking, instant)
        arguments = dict(kwargs) | {"add_generation_prompt": False}
        template = arguments.pop("chat_template", None) or "default"
        if tools is not None:
            arguments["tools"] = tools
        if thinking is not None:
            arguments["enable_thinking"] = thinking
        arguments = plain(arguments)
        check_template_kwargs(arguments)
        self.reference = Reference(tokenizer, chat_template=template, template_kwargs=arguments)
        self.reference.call = replace(self.reference.call, instant=instant)
        self.program: ChatProgram | None = None
        self.cut = 0
        self._after: _Way | None = None

    def render(self, conversations: pa.Array) -> Rendered:
        with self.reference.call.clock_stopped():
            if self.program is None and len(conversations) >= FEWEST_ROWS:
                self.program = ChatProgram(self.reference.call)
            if self.program is None:
                return render_rows(conversations, self.reference)
            return render_column(conversations, self.reference, self.program)

    def after_empty_user(self, examples: pa.Array) -> "_Way | None":
        """The way to render messages after an empty user message, or None where there is none.

        Args:
            examples: messages that need it, to see on one of them that the template does so what verl does.
        """
        if self._after is None:
            tokenizer, kwargs, tools, thinking, instant = self._given
            call = self.reference.call
            for example in range(len(examples)):
                try:
                    message = examples[example].as_py()
                    expected = call.render(_EMPTY_USER + message)
                    template = _AFTER_EMPTY_USER + call.text()
                    after = _Way(tokenizer, {**kwargs, "chat_template": template}, tools, thinking, instant)
                    if after.reference.render(message) != expected:
                        return None
                    after.cut = len(call.ids(_EMPTY_USER))
                except Exception:  # whatever a template raises: then verl's code raises it too
                    continue
                self._after = after
                break
        return self._after


def _unlike(role: pa.Array, name: str) -> npt.NDArray[np.bool_]:
    return np.asarray(pc.fill_null(pc.not_equal(role, name), True), bool)


def _differing(one: Ragged, other: Ragged) -> npt.NDArray[np.bool_]:
    """(n,) which rows are not the same."""
    differing: npt.NDArray[np.bool_] = one.lengths != other.lengths
    rows = np.flatnonzero(~differing)
    mine, others = one.take(rows), other.take(rows)
    unequal = np.flatnonzero(mine.values != others.values)
    differing[rows[np.searchsorted(mine.offsets, unequal, side="right") - 1]] = True
    return differing


def _emptied(result: Tokenized) -> Tokenized:
    """The same, with no ids in the rows that are verl's to make."""
    gone = [*result.once, *result.rejected]
    if gone:
        lengths = result.ids.lengths.copy()
        kept = np.ones(len(lengths), bool)
        kept[gone] = False
        tokens = np.repeat(kept, lengths)
        lengths[~kept] = 0
        result.ids = Ragged(result.ids.values[tokens], offsets_of(lengths))
        result.loss = result.loss[tokens]
    return result
