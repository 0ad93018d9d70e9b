"""The stages of a load of preference data on the host: rendered texts, ids, and the parts of each row."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, appended
from gpuload.core.marks import paired, with_loss_from
from gpuload.engines.conversations import joined
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.host.prompts import BY_PROMPT, attempt, render_column, render_messages, render_rows
from gpuload.engines.host.render import HostText, MixedText
from gpuload.engines.protocol import Prompts, RenderedRows, Tokenized
from gpuload.kinds.chats.engine import add_by_reference, common_prefixes, filled, surrounded, why_by_row, with_eos
from gpuload.kinds.pairs.prefixes import cut, cutting_tokens, divided
from gpuload.kinds.pairs.reference import PairReference, answers_in
from gpuload.kinds.training_reference import own_arguments
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
    def counts(self) -> dict[str, int]:
        what = (
            "rows whose prompt alone is encoded otherwise than in front of a completion, which begins where they differ"
        )
        return {what: self.diverging} if self.diverging else {}

    # -- rendering ---------------------------------------------------------------------------------------------------

    def render(self, prompts: Prompts) -> HostText:
        column: pa.Array = prompts.column  # type: ignore[attr-defined]
        if self.by_prompt:
            return render_rows(column, self._reference, self.program, with_ids=True, why=BY_PROMPT)
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
        return PairText(text=first, more=more, by_template=False)

    def _messages(self, prompt: pa.Array, completions: Sequence[pa.Array]) -> PairText:
        whole = [render_column(joined(prompt, each), self._reference, self.program) for each in completions]
        if self._reference.objective != "rm":
            whole.append(render_column(prompt, self._reference, self.prompting))
        return _by_template(whole)

    def _json(self, rows: list[Any]) -> HostText:
        """Rows of different forms: texts and messages by columns, and those with arguments of their own one by one."""
        answers = answers_in(next((row for row in rows if "prompt" in row), ()))
        forms: dict[str, list[int]] = {}
        rejected: dict[int, str] = {}
        for number, row in enumerate(rows):
            if reason := self._reference.problem(row):
                rejected[number] = reason
            elif isinstance(row["prompt"], str):
                if attempt(rejected, number, _encoded, [row[name] for name in ("prompt", *answers)]):
                    forms.setdefault("texts", []).append(number)
            else:
                alone = own_arguments(row) or self._reference.sanitizes
                forms.setdefault("one by one" if alone else "messages", []).append(number)
        made: list[tuple[list[int], HostText]] = []
        for form, numbers in forms.items():
            made.append((numbers, self._of_form(form, [rows[number] for number in numbers], answers)))
        nothing = pa.nulls(len(rejected), pa.large_string())
        counts: dict[str, Any] = {"rejected": dict(enumerate(rejected.values())), "by_template": True}
        more = [nothing] * (len(answers) - (self._reference.objective == "rm"))
        return MixedText.of([*made, (list(rejected), PairText(text=nothing, more=more, **counts))])

    def _of_form(self, form: str, rows: list[Any], answers: Sequence[str]) -> PairText:
        if form == "one by one":
            return self._by_row(rows, answers)
        parts = [[row[name] for row in rows] for name in ("prompt", *answers)]
        if form == "texts":
            prompt, *completions = (pa.array(part, pa.large_string()) for part in parts)
            return self._texts(prompt, completions)
        start, *ends = parts
        texts = [
            render_messages([one + other for one, other in zip(start, each, strict=True)], {}, self.program)
            for each in ends
        ]
        if self._reference.objective != "rm":
            texts.append(render_messages(start, {}, self.prompting))
        return _by_template(texts)

    def _by_row(self, rows: list[Any], answers: Sequence[str]) -> PairText:
        """Renders rows of messages with the reference, one by one.

        Args:
            answers: the names of their completions.
        """
        rejected: dict[int, str] = {}
        nothing: list[str | None] = [None] * (len(answers) + (self._reference.objective != "rm"))
        started = time.perf_counter()
        made = [attempt(rejected, number, self._encodable, row) or nothing for number, row in enumerate(rows)]
        first, *more = (pa.array([texts[k] for texts in made], pa.large_string()) for k in range(len(nothing)))
        by_reference = {number: why_by_row(row) for number, row in enumerate(rows)}
        seconds = time.perf_counter() - started
        counts: dict[str, Any] = {"by_reference": by_reference, "reference_seconds": seconds}
        return PairText(text=first, more=more, by_template=True, rejected=rejected, **counts)

    def _encodable(self, row: Any) -> list[str]:
        return _encoded(self._reference.texts(row))

    # -- encoding ----------------------------------------------------------------------------------------------------

    def encode(self, text: HostText) -> Tokenized:
        if text.ids is not None or isinstance(text, MixedText):
            return super().encode(text)
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
        """Rows of tokens.

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
        marked = [with_loss_from(each, begin) for each, begin in zip(whole, begins, strict=True)]
        return marked[0] if len(marked) == 1 else paired(marked[0], marked[1], shared)


SAMPLE = 8  # texts that are searched for the tokens that a template writes


def _encoded(texts: list[str]) -> list[str]:
    """The same texts, if UTF-8 can encode them: a lone surrogate is an error of its row."""
    for text in texts:
        text.encode()
    return texts


def _by_template(texts: Sequence[HostText]) -> PairText:
    """The texts of pairs that a chat template has rendered."""
    first, *more = texts
    made = PairText(text=first.text, more=[each.text for each in more], by_template=True, **first.fates())
    add_by_reference(made, more)
    return _without(made, rejected_in(more))


def _without(text: PairText, rejected: Mapping[int, str]) -> PairText:
    """The same texts with further rows rejected, for reasons that come before others."""
    text.reject(rejected)
    if rejected:
        valid = np.ones(len(text), bool)
        valid[list(text.rejected)] = False
        nothing = pa.scalar(None, pa.large_string())
        text.text, *text.more = (pc.if_else(pa.array(valid), each, nothing) for each in (text.text, *text.more))
    return text


def rejected_in(texts: Sequence[RenderedRows]) -> dict[int, str]:
    """The rows that are rejected in one of several columns of texts: row → the first reason."""
    return {row: why for each in reversed(texts) for row, why in each.rejected.items()}


def problems_in(column: pa.Array) -> dict[int, str]:
    """The rows of a column of pairs of which nothing can be made: row → why."""
    problems = column.field("problem")
    at = np.flatnonzero(np.asarray(problems.is_valid()))
    return dict(zip(at.tolist(), problems.take(pa.array(at)).to_pylist(), strict=True))
