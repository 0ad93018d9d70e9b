"""The stages of a load for SFT on the host: rendered text, ids, and which of them have loss."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, offsets_of, ranges, stretches
from gpuload.core.marks import split, with_loss
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.host.prompts import BY_PROMPT, MARKED_BY_ROW, attempt, render_column, render_messages, render_rows
from gpuload.engines.host.render import HostText, MixedText, Spans
from gpuload.engines.protocol import Prompts, RenderedRows, Tokenized
from gpuload.kinds.chats.reference import ChatReference, messages_in
from gpuload.kinds.training_reference import TOOLS, own_arguments
from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, as_json, is_messages, is_text
from gpuload.template.compiler import ChatProgram


@dataclass(kw_only=True, eq=False)
class Completions(HostText):
    """n prompts with their completions, as text.

    Attributes:
        alone: the prompts without them.
    """

    alone: HostText


@dataclass(kw_only=True, eq=False)
class PlainText(HostText):
    """n texts, or prompts with completions, that no template renders; special tokens are added to their ids.

    Attributes:
        alone: the prompts without their completions; None for texts.
    """

    alone: pa.LargeStringArray | None = None


class ChatEngine(HostEngine):
    """The `Engine` of a load for SFT.

    Args:
        reference: the tokenizer.
        exact_only: render and encode with the tokenizer object itself, row by row.
        notes: further lines for the report.
    """

    _reference: ChatReference

    @cached_property
    def _prompting(self) -> ChatProgram:
        """The template of prompts alone; made for the first completion."""
        return ChatProgram(self._reference.prompting)

    def render(self, prompts: Prompts) -> HostText:
        column: pa.Array = prompts.column  # type: ignore[attr-defined]
        if self.by_prompt:
            return render_rows(column, self._reference, self.program, with_ids=True, why=BY_PROMPT)
        if is_text(column.type):
            return self._texts(column.cast(pa.large_string()))
        if pa.types.is_struct(column.type):
            prompt, completion = column.field("prompt"), column.field("completion")
            if is_text(prompt.type) and is_text(completion.type):
                return self._texts(completion.cast(pa.large_string()), prompt.cast(pa.large_string()))
            if is_messages(prompt.type) and is_messages(completion.type):
                text = render_column(column, self._reference, self.program)
                return _with_alone(text, render_column(prompt, self._reference, self._prompting))
            return self._json(to_python(column))
        return self._json(to_python(column)) if column.type == JSON_TYPE else super().render(prompts)

    def _json(self, rows: list[Any]) -> HostText:
        """Rows of different forms: texts, conversations and prompts with completions by columns; those with arguments
        of their own one by one."""
        forms: dict[str, list[int]] = {}
        rejected: dict[int, str] = {}
        for number, row in enumerate(rows):
            if reason := self._reference.problem(row):
                rejected[number] = reason
            elif (form := _form(row)) != "text" or attempt(rejected, number, str.encode, messages_in(row)) is not None:
                forms.setdefault(form, []).append(number)
        made: list[tuple[list[int], HostText]] = []
        for form, numbers in forms.items():
            some = [rows[number] for number in numbers]
            made.append((numbers, self._by_row(some) if form == "own arguments" else self._by_columns(form, some)))
        nothing = HostText(text=pa.nulls(len(rejected), pa.large_string()), rejected=dict(enumerate(rejected.values())))
        return MixedText.of([*made, (list(rejected), nothing)])

    def _by_columns(self, form: str, rows: list[Any]) -> HostText:
        """Renders rows of one form without arguments of their own, none of which is rejected."""
        if form == "text":
            whole, alone = (
                [row[name] if isinstance(row, dict) else row for row in rows] for name in ("completion", "prompt")
            )
            prompts = pa.array(alone, pa.large_string()) if isinstance(rows[0], dict) else None
            return self._texts(pa.array(whole, pa.large_string()), prompts)
        if not self._reference.uses_template:  # conversations in a column of texts
            return render_rows(as_json(rows), self._reference, self.program, why="there is no chat template")
        text = render_messages([messages_in(row) for row in rows], {}, self.program)
        if form == "messages":
            return text
        return _with_alone(text, render_messages([row["prompt"] for row in rows], {}, self._prompting))

    def _by_row(self, rows: list[Any]) -> HostText:
        """Renders rows of different forms with the reference, one by one: those with their own tools, for example."""
        rejected: dict[int, str] = {}
        started, by_reference = time.perf_counter(), {}
        whole, alone, spans = [], [], {}
        for number, row in enumerate(rows):
            parts = None
            if reason := self._reference.problem(row):
                rejected[number] = reason
            else:
                if not isinstance(messages_in(row), str):
                    by_reference[number] = why_by_row(row)
                parts = attempt(rejected, number, self._row, row)
            text, before, spans[number] = parts or (None, None, [])
            whole.append(text)
            alone.append(before)
        counts: dict[str, Any] = {"rejected": rejected, "by_reference": by_reference}
        counts["reference_seconds"] = time.perf_counter() - started if by_reference else 0.0
        text = HostText(text=pa.array(whole, pa.large_string()), answers=Spans.of_rows(spans), **counts)
        if self.program.answers is None:
            text.answers = None
        if not any(isinstance(row, dict) and "prompt" in row for row in rows):
            return text
        return Completions(
            text=text.text, answers=text.answers, alone=HostText(text=pa.array(alone, pa.large_string())), **counts
        )

    def _row(self, row: Any) -> tuple[str, str | None, list[tuple[int, int]]]:
        """One row's text, the text of its prompt alone, and where its answers are, in bytes."""
        reference, answers, own = self._reference, self.program.answers, own_arguments(row)
        text, spans, alone = reference.render(row), [], None
        text.encode()  # raises for a lone surrogate, for this row only
        if answers is not None:
            spans = answers.with_call(reference.call_with(own)).in_bytes(messages_in(row), text)
        if isinstance(row, dict) and "prompt" in row:
            alone = reference.call_with(own, prompt_only=True).render(row["prompt"])
        return text, alone, spans

    def _texts(self, text: pa.LargeStringArray, prompt: pa.LargeStringArray | None = None) -> PlainText:
        ended = with_eos(text, self._reference.eos)
        if prompt is not None:
            ended = pc.binary_join_element_wise(prompt, ended, pa.scalar("", pa.large_string()))
        rejected = {int(row): "the text is null" for row in np.flatnonzero(np.asarray(ended.is_null()))}
        return PlainText(text=ended, alone=prompt, rejected=rejected)

    def encode(self, text: HostText) -> Tokenized:
        if isinstance(text, PlainText):
            made = text.tokenized(self._plain(text))
        elif isinstance(text, MixedText):
            made = super().encode(text)
        else:
            made = super().encode(text)
            if isinstance(text, Completions):
                alone = self.ids(filled(text.alone.text))
                made.ids = self._with_completion_loss(made.ids, alone, answers=self.program.answers is not None)
            elif text.ids is None and self.program.answers is None:
                made.ids = _all_with_loss(made.ids)
        return made

    def _plain(self, text: PlainText) -> Ragged:
        ids = surrounded(self.ids(filled(text.text)), *self._reference.added)
        if text.alone is None:
            return _all_with_loss(ids)
        alone = surrounded(self.ids(filled(text.alone)), *self._reference.added)
        return self._with_completion_loss(ids, alone, answers=False)

    def _with_completion_loss(self, ids: Ragged, alone: Ragged, answers: bool) -> Ragged:
        """Ids whose loss begins where they first differ from those of the prompt alone.

        Args:
            ids: n rows; with bits if the answers of an assistant are marked.
            alone: n rows without bits.
            answers: whether only marked ids have loss.
        """
        bare, marked = split(ids)
        if self._reference.loss_on == "all":
            return _all_with_loss(bare)
        prompt = common_prefixes(bare, alone)
        mask = stretches(prompt, ids.lengths - prompt)
        return with_loss(bare, mask & marked.values if answers else mask)


def why_by_row(row: Any) -> str:
    """Why a row that is not in a column of messages is rendered by transformers."""
    own = own_arguments(row)
    if TOOLS in own:
        return "they have tools of their own"
    return "they have arguments of their own, in chat_template_kwargs" if own else MARKED_BY_ROW


def add_by_reference(text: RenderedRows, parts: Sequence[RenderedRows]) -> None:
    """Adds further texts of the same rows: a row was rendered by transformers if one of its texts was."""
    for part in parts:
        text.by_reference = part.by_reference | text.by_reference
        text.reference_seconds += part.reference_seconds


def surrounded(ids: Ragged, before: list[int], after: list[int]) -> Ragged:
    """Rows with the special tokens that the tokenizer's call adds before and after each."""
    if not before and not after:
        return ids
    offsets = offsets_of(ids.lengths + len(before) + len(after))
    values = np.empty(int(offsets[-1]), np.int32)
    inside = np.ones(len(values), bool)
    for k, token in enumerate(before):
        values[offsets[:-1] + k], inside[offsets[:-1] + k] = token, False
    for k, token in enumerate(reversed(after), 1):
        values[offsets[1:] - k], inside[offsets[1:] - k] = token, False
    values[inside] = ids.values
    return Ragged(values, offsets)


def with_eos(text: pa.Array | pa.ChunkedArray, eos: str) -> Any:
    """Texts of any type, each followed by an EOS token if it does not end with it."""
    token, nothing = (pa.scalar(value, text.type) for value in (eos, ""))
    return pc.if_else(pc.ends_with(text, eos), text, pc.binary_join_element_wise(text, token, nothing))


def common_prefixes(ids: Ragged, others: Ragged) -> np.ndarray[Any, np.dtype[np.int64]]:
    """(n,) int64: how many leading ids the rows of two columns have in common."""
    shorter = np.minimum(ids.lengths, others.lengths)
    bounds = offsets_of(shorter)
    one, other = (each.values[ranges(each.offsets[:-1], shorter, bounds)] for each in (ids, others))
    # The first difference at or after each row's beginning; `shorter` if it is not in the row.
    differing = np.append(np.flatnonzero(one != other), bounds[-1])
    first = differing[np.searchsorted(differing, bounds[:-1])]
    prefixes: np.ndarray[Any, np.dtype[np.int64]] = np.minimum(first - bounds[:-1], shorter)
    return prefixes


def _form(row: Any) -> str:
    """How a row is rendered that is not rejected."""
    if isinstance(messages_in(row), str):
        return "text"
    if own_arguments(row):
        return "own arguments"
    return "completion" if isinstance(row, dict) and "prompt" in row else "messages"


def _with_alone(text: HostText, alone: HostText) -> Completions:
    """The texts of prompts with their completions, and of the prompts alone."""
    made = Completions(text=text.text, answers=text.answers, alone=alone, **text.fates())
    add_by_reference(made, [alone])
    if alone.rejected:
        made.reject(alone.rejected)
        valid = np.ones(len(text), bool)
        valid[list(alone.rejected)] = False
        made.text = pc.if_else(pa.array(valid), text.text, pa.scalar(None, pa.large_string()))
    return made


def _all_with_loss(ids: Ragged) -> Ragged:
    return with_loss(ids, np.ones(len(ids.values), bool))


def filled(text: pa.LargeStringArray) -> pa.LargeStringArray:
    """Texts with empty ones for nulls."""
    return pc.fill_null(text, "") if text.null_count else text
