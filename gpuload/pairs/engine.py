"""The stages of a load of preference data on the host: rendered texts, ids, and the parts of each row."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.arrays import Ragged
from gpuload.chats.engine import common_prefixes, filled, joined, surrounded, with_eos
from gpuload.chats.formats import PLAIN_MESSAGES
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.host.prompts import attempt, render_column, render_rows
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import Prompts, RowCounts, Tokenized
from gpuload.options import Truncation
from gpuload.pairs.batches import HostPairBatches
from gpuload.pairs.formats import is_plain_row
from gpuload.pairs.parts import appended, paired, with_completion
from gpuload.pairs.prefixes import cut, cutting_tokens, divided
from gpuload.pairs.reference import PairReference, answers_in
from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, is_text
from gpuload.template.compiler import ChatProgram


@dataclass(kw_only=True, eq=False)
class PairText(HostText):
    """n pairs, or prompts with one completion, as text: the prompts with the first completions.

    Attributes:
        more: the prompts with the second completions if there are any, then the prompts alone if the objective has
            prompts.
        by_template: whether a chat template made these texts; if not, special tokens are added to their ids.
    """

    more: list[pa.LargeStringArray]
    by_template: bool

    @cached_property
    def sizes(self) -> np.ndarray[Any, Any]:
        """(n,) int64, bytes of a row's texts, -1 where a row was rejected."""
        whole = sum((np.asarray(pc.binary_length(filled(each))) for each in (self.text, *self.more)), start=np.int64(0))
        return np.where(np.asarray(self.text.is_null()), -1, whole)


class PairEngine(HostEngine):
    """The `Engine` of a load of preference data.

    Args:
        reference: the tokenizer.
        exact_only: render and encode with the tokenizer object itself, row by row.
        notes: further lines for the report.
    """

    _reference: PairReference

    def __init__(self, reference: PairReference, exact_only: bool = False, notes: tuple[str, ...] = ()):
        super().__init__(reference, exact_only, notes)
        self.diverging, self._counting = 0, threading.Lock()
        self._cuts: tuple[bytes, ...] | None = None

    @cached_property
    def prompting(self) -> ChatProgram:
        """The template of prompts alone; made for the first of them."""
        return ChatProgram(self._reference.prompting)

    @property
    def notes(self) -> tuple[str, ...]:
        return (*super().notes, *self.notes_of_pairs)

    @property
    def notes_of_pairs(self) -> tuple[str, ...]:
        """The lines for the report that do not depend on what renders and encodes."""
        if not self.diverging:
            return ()
        note = (
            f"in {self.diverging:,} rows the prompt alone is encoded otherwise than in front of a completion, which "
            "begins where they differ"
        )
        return (note,)

    # -- rendering ---------------------------------------------------------------------------------------------------

    def render(self, prompts: Prompts) -> HostText:
        column: pa.Array = prompts.column  # type: ignore[attr-defined]
        if self.by_prompt:
            return render_rows(column, self._reference, self.program, with_ids=True)
        if column.type == JSON_TYPE:
            return self._json(to_python(column))
        names = [field.name for field in column.type]
        prompt, completions = column.field("prompt"), [column.field(name) for name in answers_in(names)]
        made = self._texts(prompt, completions) if is_text(prompt.type) else self._messages(prompt, completions)
        return _without(made, problems_in(column))

    def _texts(self, prompt: pa.Array, completions: Sequence[pa.Array]) -> PairText:
        nothing = pa.scalar("", pa.large_string())
        start, ends = prompt.cast(pa.large_string()), [each.cast(pa.large_string()) for each in completions]
        whole = [pc.binary_join_element_wise(start, with_eos(each, self._reference.eos), nothing) for each in ends]
        first, *more = [*whole, start] if self._reference.objective != "rm" else whole
        return PairText(text=first, more=more, by_template=False, compiled_rows=len(first))

    def _messages(self, prompt: pa.Array, completions: Sequence[pa.Array]) -> PairText:
        whole = [render_column(joined(prompt, each), self._reference, self.program) for each in completions]
        if self._reference.objective != "rm":
            whole.append(render_column(prompt, self._reference, self.prompting))
        first, *more = whole
        made = PairText(text=first.text, more=[each.text for each in more], by_template=True, **first.counts())
        return _without(made, rejected_in(more))

    def _json(self, rows: list[Any]) -> PairText:
        """Rows of different forms: those with messages of role and content alone by columns, the others one by one."""
        answers = answers_in(next((row for row in rows if "prompt" in row), ()))
        if all(row.get("problem") is not None or isinstance(row["prompt"], str) for row in rows):
            return self._by_row(rows, answers, by_template=False)
        plain = np.array([is_plain_row(row, answers) for row in rows], bool)
        some = [rows[row] for row in np.flatnonzero(plain)]
        try:
            prompt, *completions = (
                pa.array([row[name] for row in some], PLAIN_MESSAGES) for name in ("prompt", *answers)
            )
        except UnicodeEncodeError:  # a lone surrogate: then only its row is rejected
            return self._by_row(rows, answers, by_template=True)
        others = self._by_row([rows[row] for row in np.flatnonzero(~plain)], answers, by_template=True)
        order = np.concatenate([np.flatnonzero(plain), np.flatnonzero(~plain)])
        return _merged([self._messages(prompt, completions), others], order)

    def _by_row(self, rows: list[Any], answers: Sequence[str], by_template: bool) -> PairText:
        """Renders rows with the reference, one by one.

        Args:
            answers: the names of their completions.
            by_template: whether they are messages.
        """
        rejected: dict[int, str] = {}
        nothing: list[str | None] = [None] * (len(answers) + (self._reference.objective != "rm"))
        made = []
        for number, row in enumerate(rows):
            reason = self._reference.problem(row)
            if reason is None and isinstance(row["prompt"], str) == by_template:
                reason = "prompt and completions are text, in a file of messages"
            if reason is not None:
                rejected[number] = reason
                made.append(nothing)
            else:
                made.append(attempt(rejected, number, self._encodable, row) or nothing)
        first, *more = (pa.array([texts[k] for texts in made], pa.large_string()) for k in range(len(nothing)))
        counts: dict[str, Any] = {"rejected": rejected, "reference_rows": len(rows) - len(rejected)}
        return PairText(text=first, more=more, by_template=by_template, **counts)

    def _encodable(self, row: Any) -> list[str]:
        texts = self._reference.texts(row)
        for text in texts:
            text.encode()  # raises for a lone surrogate, for this row only
        return texts

    @staticmethod
    def batches(store: Ragged, limit: int, side: Truncation, pad_id: int) -> HostPairBatches:
        return HostPairBatches(pad_id)

    # -- encoding ----------------------------------------------------------------------------------------------------

    def encode(self, text: HostText) -> Tokenized:
        if text.ids is not None:
            return text.tokenized(text.ids)
        assert isinstance(text, PairText)
        columns = [filled(each) for each in (text.text, *text.more)]
        if text.by_template:
            tokens = self.cutting_tokens(lambda: columns[0][:SAMPLE].to_pylist()) if len(text) else ()
            start, *ids = divided(self.ids(cut(columns, tokens)), len(columns) + 1)
        else:
            start, ids = None, [surrounded(self.ids(each), *self._reference.added) for each in columns]
        rows = self._rows(ids)
        return text.tokenized(rows if start is None else appended(start, rows))

    def cutting_tokens(self, texts: Callable[[], list[str]]) -> tuple[bytes, ...]:
        """The tokens in front of which texts may be cut: see `pairs.prefixes`.

        Args:
            texts: returns the first texts of a load. All have the tokens that the template writes.
        """
        if self._cuts is None:
            self._cuts = cutting_tokens(self._reference, texts())
        return self._cuts

    def _rows(self, ids: list[Ragged]) -> Ragged:
        """Rows of ids with the bits of their parts.

        Args:
            ids: of the texts of a `PairText`, without what all texts of a row begin with.
        """
        if self._reference.objective == "rm":
            chosen, rejected = ids
            return paired(chosen, rejected, common_prefixes(chosen, rejected))
        *whole, alone = ids
        begins = [common_prefixes(each, alone) for each in whole]
        shared = np.minimum.reduce(begins)
        with self._counting:
            self.diverging += int((shared < alone.lengths).sum())
        if self._reference.objective == "dpo":
            begins = [shared, shared]
        marked = [with_completion(each, begin) for each, begin in zip(whole, begins, strict=True)]
        return marked[0] if len(marked) == 1 else paired(marked[0], marked[1], shared)


SAMPLE = 8  # texts that are searched for the tokens that a template writes


def _without(text: PairText, rejected: Mapping[int, str]) -> PairText:
    """The same texts with further rows rejected, for reasons that come before others."""
    reject(text, rejected)
    if rejected:
        valid = np.ones(len(text), bool)
        valid[list(text.rejected)] = False
        nothing = pa.scalar(None, pa.large_string())
        text.text, *text.more = (pc.if_else(pa.array(valid), each, nothing) for each in (text.text, *text.more))
    return text


def reject(counts: RowCounts, rejected: Mapping[int, str]) -> None:
    """Rejects further rows, for reasons that come before others."""
    counted = len(counts.rejected)
    counts.rejected = {**counts.rejected, **rejected}
    # Rows that were rendered, and are rejected for another reason.
    counts.compiled_rows = max(counts.compiled_rows - (len(counts.rejected) - counted), 0)


def rejected_in(texts: Sequence[RowCounts]) -> dict[int, str]:
    """The rows that are rejected in one of several columns of texts: row → the first reason."""
    return {row: why for each in reversed(texts) for row, why in each.rejected.items()}


def problems_in(column: pa.Array) -> dict[int, str]:
    """The rows of a column of pairs of which nothing can be made: row → why."""
    problems = column.field("problem")
    at = np.flatnonzero(np.asarray(problems.is_valid()))
    return dict(zip(at.tolist(), problems.take(pa.array(at)).to_pylist(), strict=True))


def _merged(parts: Sequence[PairText], rows: np.ndarray[Any, Any]) -> PairText:
    """The texts of all parts, in the order of their rows.

    Args:
        rows: (n,) the row of each text, part after part.
    """
    order = pa.array(np.argsort(rows))
    text, *more = (
        pa.concat_arrays(each).take(order) for each in zip(*((part.text, *part.more) for part in parts), strict=True)
    )
    made = PairText(text=text, more=more, by_template=True)
    first = 0
    for part in parts:
        made.add(part, first)
        first += len(part)
    made.rejected = {int(rows[at]): why for at, why in made.rejected.items()}
    return made
