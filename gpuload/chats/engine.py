"""The stages of a load for SFT on the host: rendered text, ids, and which of them have loss."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.arrays import Ragged, offsets_of, ranges, stretches
from gpuload.chats.batches import HostChatBatches
from gpuload.chats.reference import ChatReference, messages_in
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.host.prompts import attempt, render_column, render_rows
from gpuload.engines.host.render import HostText, Spans
from gpuload.engines.protocol import Prompts, Tokenized
from gpuload.loss import split, with_loss
from gpuload.options import Truncation
from gpuload.reference.training import own_arguments
from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, as_json, is_text
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
            return render_rows(column, self._reference, self.program, with_ids=True)
        if is_text(column.type):
            return self._texts(column.cast(pa.large_string()))
        if pa.types.is_struct(column.type):
            prompt, completion = column.field("prompt"), column.field("completion")
            if is_text(prompt.type):
                return self._texts(completion.cast(pa.large_string()), prompt.cast(pa.large_string()))
            return self._completions(prompt, joined(prompt, completion))
        if column.type == JSON_TYPE:
            rows = to_python(column)
            if any(isinstance(row, dict) for row in rows):
                return self._by_row(rows)
        return super().render(prompts)

    def _by_row(self, rows: list[Any]) -> HostText:
        """Renders rows of different forms with the reference, one by one: those with their own tools, for example."""
        rejected: dict[int, str] = {}
        whole, alone, spans = [], [], {}
        for number, row in enumerate(rows):
            parts = None
            if reason := self._reference.problem(row):
                rejected[number] = reason
            else:
                parts = attempt(rejected, number, self._row, row)
            text, before, spans[number] = parts or (None, None, [])
            whole.append(text)
            alone.append(before)
        counts: dict[str, Any] = {"rejected": rejected, "reference_rows": len(rows) - len(rejected)}
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
        if answers is not None:
            spans = answers.with_call(reference.call_with(own)).in_bytes(messages_in(row), text)
        if isinstance(row, dict) and "prompt" in row:
            alone = reference.call_with(own, prompt_only=True).render(row["prompt"])
        return text, alone, spans

    def _completions(self, prompt: pa.Array, whole: pa.Array) -> Completions:
        text = render_column(whole, self._reference, self.program)
        alone = render_column(prompt, self._reference, self._prompting)
        made = Completions(text=text.text, answers=text.answers, alone=alone, **text.counts())
        made.rejected = text.rejected | alone.rejected
        return made

    def _texts(self, text: pa.LargeStringArray, prompt: pa.LargeStringArray | None = None) -> PlainText:
        ended = with_eos(text, self._reference.eos)
        if prompt is not None:
            ended = pc.binary_join_element_wise(prompt, ended, pa.scalar("", pa.large_string()))
        rejected = {int(row): "the text is null" for row in np.flatnonzero(np.asarray(ended.is_null()))}
        return PlainText(
            text=ended, alone=prompt, rejected=rejected, compiled_rows=len(ended) - len(rejected), control_rows=0
        )

    @staticmethod
    def batches(store: Ragged, limit: int, side: Truncation, pad_id: int) -> HostChatBatches:
        return HostChatBatches(pad_id)

    def encode(self, text: HostText) -> Tokenized:
        if isinstance(text, PlainText):
            made = text.tokenized(self._plain(text))
        else:
            made = super().encode(text)
            if isinstance(text, Completions):
                made.ids = self._with_completion_loss(made.ids, self.ids(filled(text.alone.text)))
            elif text.ids is None and self.program.answers is None:
                made.ids = _all_with_loss(made.ids)
        return made

    def _plain(self, text: PlainText) -> Ragged:
        ids = surrounded(self.ids(filled(text.text)), *self._reference.added)
        if text.alone is None:
            return _all_with_loss(ids)
        return self._with_completion_loss(ids, surrounded(self.ids(filled(text.alone)), *self._reference.added))

    def _with_completion_loss(self, ids: Ragged, alone: Ragged) -> Ragged:
        """Ids whose loss begins where they first differ from those of the prompt alone.

        Args:
            ids: n rows; with bits if the answers of an assistant are marked.
            alone: n rows without bits.
        """
        bare, marked = split(ids)
        if self._reference.loss_on == "all":
            return _all_with_loss(bare)
        prompt = common_prefixes(bare, alone)
        mask = stretches(prompt, ids.lengths - prompt)
        return with_loss(bare, mask if self.program.answers is None else mask & marked.values)


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


def joined(prompts: pa.Array, completions: pa.Array) -> pa.Array:
    """(n,) lists of messages, each a prompt followed by its completion; null if either is null."""
    if completions.type != prompts.type:
        try:
            completions = completions.cast(prompts.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            rows = zip(to_python(prompts), to_python(completions), strict=True)
            return as_json([None if one is None or other is None else one + other for one, other in rows])
    valid = np.asarray(pc.and_(prompts.is_valid(), completions.is_valid()))
    sizes = [
        np.where(valid, np.asarray(pc.fill_null(pc.list_value_length(each), 0)), 0) for each in (prompts, completions)
    ]
    bounds = [each.offsets.to_numpy().astype(np.int64) for each in (prompts, completions)]
    values = pa.concat_arrays([prompts.values, completions.values])
    offsets = offsets_of(sizes[0] + sizes[1])
    starts = np.stack([bounds[0][:-1], bounds[1][:-1] + len(prompts.values)], axis=1).ravel()
    counts = np.stack(sizes, axis=1).ravel()
    taken = values.take(pa.array(ranges(starts, counts, offsets_of(counts))))
    return pa.LargeListArray.from_arrays(pa.array(offsets), taken, mask=pa.array(~valid))


def _all_with_loss(ids: Ragged) -> Ragged:
    return with_loss(ids, np.ones(len(ids.values), bool))


def filled(text: pa.LargeStringArray) -> pa.LargeStringArray:
    """Texts with empty ones for nulls."""
    return pc.fill_null(text, "") if text.null_count else text
