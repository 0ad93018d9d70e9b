"""The stages of the host for data to train on: the texts of a row, their ids, and what becomes of them.

A row is one text, or several: a prompt with each of its completions, and alone. Texts and messages are rendered by
columns; rows with arguments of their own one by one. What the texts of a row begin with is encoded once.
"""

import json
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Array, Ragged, mask_of, offsets_of, ranges
from gpuload.core.arrow import as_arrow, as_numpy, as_scalar, fill_null
from gpuload.core.memory import garbage_collection_paused
from gpuload.engines.conversations import joined
from gpuload.engines.host.encode import needs_itself
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.host.prompts import (
    BY_PROMPT,
    MARKED_BY_ROW,
    attempt,
    encodable,
    render_column,
    render_messages,
    render_rows,
)
from gpuload.engines.host.render import AnswerSpans, HostText, MixedText
from gpuload.engines.protocol import ArrowPrompts, RenderedRows, Tokenized, add_seconds
from gpuload.kinds.prefixes import cut, cutting_tokens, divided
from gpuload.kinds.training_reference import KWARGS, TOOLS, TrainingReference, answers_in, messages_in, own_arguments
from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, is_messages, is_plain, is_text
from gpuload.template.compiler import FEWEST_ROWS, ChatProgram
from gpuload.template.program import Answer, ByReference, RenderedRow

SAMPLE = 8  # texts that are searched for the tokens that a template writes
_MOST_PROGRAMS = 32  # different arguments of rows for which the template is compiled


class TextSequences(NamedTuple):
    """What n rows consist of: one sequence each, or two."""

    begins: list[Array]  # of each sequence, (n,) int64: how many of its tokens have no loss
    # (n,) int64: how many tokens of the first sequence are those of the second one too, and stored once; all if there
    # is only one.
    shared: Array


class TrainingEngine(HostEngine):
    """The `Engine` of a load of data to train on. For the arguments see `HostEngine`."""

    may_be_few = False
    _reference: TrainingReference

    def __init__(self, reference: Any, exact_only: bool = False, notes: tuple[str, ...] = ()):
        super().__init__(reference, exact_only, notes)
        self._cuts: tuple[bytes, ...] | None = None
        # For rows with arguments of their own: the template of all that they have, and that of their prompts.
        self._programs: dict[str, tuple[ChatProgram, ChatProgram]] = {}

    @abstractmethod
    def tokens(self, start: Ragged | None, ids: list[Ragged], text: HostText) -> Ragged:
        """Rows of tokens.

        Args:
            start: ids that all texts of a row begin with; None if nothing was cut off.
            ids: of each column of texts, without them.
            text: these texts.
        """

    @property
    def marks_completions(self) -> bool:
        """Whether completions have loss, and nothing else."""
        return True

    def sequences(self, lengths: Sequence[Array], common: Callable[[int, int], Array]) -> TextSequences:
        """The sequences of n rows, if `marks_completions`.

        Args:
            lengths: (n,) of each column of texts, tokens without what all texts of a row begin with; in any memory.
            common: numbers of two columns → (n,) how many tokens their texts have in common at the beginning.
        """
        raise NotImplementedError

    @cached_property
    def prompting(self) -> ChatProgram:
        """The template of prompts alone; made for the first of them."""
        return ChatProgram(self._reference.prompting)

    # -- rendering ---------------------------------------------------------------------------------------------------

    @garbage_collection_paused()
    def _render(self, prompts: ArrowPrompts) -> HostText:
        column = prompts.column
        if self.by_prompt:
            return render_rows(column, self._reference, self.program, with_ids=True, why=BY_PROMPT)
        if is_text(column.type):
            return self._texts(None, [column])
        if not pa.types.is_struct(column.type):
            return self._json(to_python(column), True) if column.type == JSON_TYPE else super()._render(prompts)
        if pieces := self.pieces(column):
            made = _combined([render_column(each, self._reference, program) for each, program in pieces])
        elif all(is_text(each.type) for each in _columns(column)):
            prompt, *completions = _columns(column)
            made = self._texts(prompt, completions)
        else:
            return self._json(to_python(column), is_plain(column.type))
        return _without(made, problems_in(column))

    def pieces(self, column: pa.Array) -> list[tuple[pa.Array, ChatProgram]]:
        """The columns of messages that the texts of each row are rendered from, and the template of each: a prompt with
        each of its completions, and alone. None if the rows are something else."""
        prompt, *completions = parts = _columns(column) if pa.types.is_struct(column.type) else [column]
        if not completions or not all(is_messages(each.type) for each in parts):
            return []
        alone = [(prompt, self.prompting)] * self._reference.prompts_alone
        return [*((joined(prompt, each), self.program) for each in completions), *alone]

    def _texts(self, prompt: pa.Array | None, completions: Sequence[pa.Array]) -> HostText:
        """Texts that no template renders: prompts with each of their completions, and alone; or texts alone."""
        nothing = as_scalar("", pa.large_string())
        whole = [with_eos(each.cast(pa.large_string()), self._reference.eos) for each in completions]
        if prompt is not None:
            start = prompt.cast(pa.large_string())
            whole = [pc.binary_join_element_wise(start, each, nothing) for each in whole]
            whole += [start] * self._reference.prompts_alone
        first, *more = whole
        rejected = {int(row): "the text is null" for row in np.flatnonzero(as_numpy(first.is_null()))}
        return HostText(text=first, more=more, by_template=False, rejected=rejected)

    def _json(self, rows: list[Any], plain: bool) -> HostText:
        """Rows of different forms: texts and messages by columns; those with arguments of their own one by one.

        `plain`: everything in them is plain data, as `json.loads` returns it.
        """
        forms: dict[tuple[str, int], list[int]] = {}
        rejected: dict[int, str] = {}
        for number, row in enumerate(rows):
            if reason := self._reference.problem(row):
                rejected[number] = reason
                continue
            parts = _parts(row)
            form = "texts" if isinstance(parts[0], str) else "messages"
            if form == "messages" and (own_arguments(row) or self._reference.sanitizes):
                form = "one by one"
            if form != "texts" or attempt(rejected, number, _all_encodable, self._given(row)):
                forms.setdefault((form, len(parts)), []).append(number)
        made: list[tuple[list[int], HostText]] = []
        for (form, _), numbers in forms.items():
            some = [rows[number] for number in numbers]
            made.append(
                (numbers, self._by_row(some, plain) if form == "one by one" else self._of_form(form, some, plain))
            )
        nothing = HostText(text=pa.nulls(len(rejected), pa.large_string()), rejected=dict(enumerate(rejected.values())))
        return MixedText.of([*made, (list(rejected), nothing)])

    def _given(self, row: Any) -> list[str]:
        """The texts of a row of texts, as errors name places in them."""
        return _parts(row)

    def _of_form(self, form: str, rows: list[Any], plain: bool) -> HostText:
        """Renders texts or messages, none of which is rejected."""
        start, *ends = zip(*map(_parts, rows), strict=True)
        if form == "texts":
            prompt, *completions = (as_arrow(part, pa.large_string()) for part in (start, *ends))
            return self._texts(prompt, completions) if completions else self._texts(None, [prompt])
        if not ends:
            return render_messages(start, {}, self.program, plain)
        texts = [
            render_messages([one + other for one, other in zip(start, each, strict=True)], {}, self.program, plain)
            for each in ends
        ]
        if self._reference.prompts_alone:
            texts.append(render_messages(start, {}, self.prompting, plain))
        return _combined(texts)

    def _by_row(self, rows: list[Any], plain: bool) -> HostText:
        """Renders rows of messages one by one: those with their own tools, for example. What is known of the template's
        loops renders rows with tools; the reference renders the others."""
        rejected: dict[int, str] = {}
        by_reference: dict[int, str] = {}
        seconds: dict[str, float] = {}
        made: list[list[str]] = []
        if plain:
            self._compile_for(rows)
        spans: dict[int, list[Answer]] = {}
        for number, row in enumerate(rows):
            found = self._compiled(row) if plain else ByReference(why_by_row(row))
            if isinstance(found, ByReference):
                by_reference[number], started = found.reason, time.perf_counter()
                found = attempt(rejected, number, self._row, row) or ([], [])
                add_seconds(seconds, {by_reference[number]: time.perf_counter() - started})
            texts, spans[number] = found
            made.append(texts)
        count = max(map(len, made))
        columns = [[texts[k] if texts else None for texts in made] for k in range(count)] or [[None] * len(rows)]
        first, *more = (as_arrow(column, pa.large_string()) for column in columns)
        return HostText(
            text=first,
            more=more,
            answers=None if self.program.answers is None else AnswerSpans.of_rows(spans),
            rejected=rejected,
            by_reference=by_reference,
            reason_seconds=seconds,
        )

    def _compile_for(self, rows: list[Any]) -> None:
        """Compiles the template for the `chat_template_kwargs` that many of some rows have."""
        given = [row[KWARGS] for row in rows if isinstance(row, dict) and row.get(KWARGS)]
        counts = Counter(map(_key, given))
        for kwargs in {_key(each): each for each in given}.values():
            key = _key(kwargs)
            with self._lock:
                if key in self._programs or counts[key] < FEWEST_ROWS or len(self._programs) >= _MOST_PROGRAMS:
                    continue
                call, prompting = (self._reference.call_with(kwargs, prompt_only) for prompt_only in (False, True))
                answers = None if self.program.answers is None else self.program.answers.with_call(call)
                self._programs[key] = ChatProgram(call, answers), ChatProgram(prompting)

    def _compiled(self, row: Any) -> tuple[list[str], list[Answer]] | ByReference:
        """As `_row`, without transformers; or why that is not possible."""
        own = own_arguments(row)
        tools = own.pop(TOOLS, None)
        programs = self._programs.get(_key(own)) if own else None
        if (own and programs is None) or not isinstance(tools, list | None) or self._reference.sanitizes:
            return ByReference(why_by_row(row))
        program = programs[0] if programs else self.program
        start, *ends = _parts(row)
        wanted = [(program, start + end) for end in ends] or [(program, start)]
        if ends and self._reference.prompts_alone:
            wanted.append((programs[1] if programs else self.prompting, start))
        made = []
        for program, messages in wanted:
            found = program.render_row(messages, tools)
            if not isinstance(found, RenderedRow):  # transformers says why a row is rejected
                return found if isinstance(found, ByReference) else ByReference(why_by_row(row))
            made.append(found)
        try:
            return _all_encodable([each.text for each in made]), made[0].answers
        except UnicodeEncodeError as error:
            return ByReference(str(error))

    def _row(self, row: Any) -> tuple[list[str], list[Answer]]:
        """The texts of a row, and where the answers are in the first of them, in bytes."""
        texts, answers = _all_encodable(self._reference.texts(row)), self.program.answers
        if answers is None:
            return texts, []
        call = self._reference.call_with(own_arguments(row))
        return texts, answers.with_call(call).in_bytes(messages_in(row), texts[0])

    # -- encoding ----------------------------------------------------------------------------------------------------

    def encode(self, text: HostText) -> Tokenized:
        if text.ids is not None or isinstance(text, MixedText):
            return super().encode(text)
        if len(text.rejected) == len(text):
            return text.tokenized(Ragged(np.zeros(0, np.int32), np.zeros(len(text) + 1, np.int64)))
        columns, start = [fill_null(each, "") for each in (text.text, *text.more)], None
        if not text.by_template and needs_itself(self._reference):
            # What its class adds around a text may depend on the text.
            whole = [[self._reference.with_special_tokens(one) for one in each.to_pylist()] for each in columns]
            ids = [Ragged.from_lists(each) for each in whole]
        elif not text.by_template:
            ids = [surrounded(self.ids(each), *self._reference.added) for each in columns]
        elif not text.more:
            ids = [self.ids(columns[0])]
        else:
            tokens = self.cutting_tokens(lambda: columns[0][:SAMPLE].to_pylist())
            start, *ids = divided(self.ids(cut(columns, tokens)), len(columns) + 1)
        return text.tokenized(self.tokens(start, ids, text))

    def cutting_tokens(self, texts: Callable[[], list[str]]) -> tuple[bytes, ...]:
        """The tokens in front of which texts may be cut: see `kinds.prefixes`. `texts` returns the first texts of a
        load; all have the tokens that the template writes."""
        if self._cuts is None:
            self._cuts = cutting_tokens(self._reference, texts())
        return self._cuts


def _key(kwargs: Mapping[str, Any]) -> str:
    return json.dumps(kwargs)  # templates may print keys in their order


def _columns(column: pa.Array) -> list[pa.Array]:
    """The prompts and their completions, of a column of structs."""
    return [column.field(name) for name in ("prompt", *answers_in([field.name for field in column.type]))]


def _parts(row: Any) -> list[Any]:
    """What a row consists of: a prompt and its completions, or one text, or the messages of one conversation."""
    if not isinstance(row, dict) or "messages" in row:
        return [messages_in(row)]
    return [row[name] for name in ("prompt", *answers_in(row))]


def _combined(texts: Sequence[HostText]) -> HostText:
    """The texts of rows that a chat template has rendered, column by column."""
    first, *more = texts
    made = HostText(text=first.text, more=[each.text for each in more], answers=first.answers, **first.fates())
    add_texts(made, more)
    return _without(made, rejected_in(more))


def _without(text: HostText, rejected: Mapping[int, str]) -> HostText:
    """The same texts with further rows rejected, for reasons that come before others."""
    text.reject(rejected)
    if text.rejected:
        valid, nothing = as_arrow(~mask_of(text.rejected, len(text))), as_scalar(None, pa.large_string())
        text.text, *text.more = (pc.if_else(valid, each, nothing) for each in (text.text, *text.more))
    return text


def why_by_row(row: Any) -> str:
    """Why a row that is not in a column of messages is rendered by transformers."""
    own = own_arguments(row)
    if TOOLS in own:
        return "they have tools of their own"
    return "they have arguments of their own, in chat_template_kwargs" if own else MARKED_BY_ROW


def add_texts(text: RenderedRows, parts: Sequence[RenderedRows]) -> None:
    """Adds further texts of the same rows: a row was rendered by transformers, or has the text of a control token, if
    that is so of one of its texts."""
    for part in parts:
        text.by_reference = part.by_reference | text.by_reference
        add_seconds(text.reason_seconds, part.reason_seconds)
        if text.with_control is not None:
            text.with_control = None if part.with_control is None else text.with_control | part.with_control


def rejected_in(texts: Sequence[RenderedRows]) -> dict[int, str]:
    """The rows that are rejected in one of several columns of texts: row → the first reason."""
    return {row: why for each in reversed(texts) for row, why in each.rejected.items()}


def problems_in(column: pa.Array) -> dict[int, str]:
    """The rows of a column of prompts with completions of which nothing can be made: row → why."""
    if column.type.get_field_index("problem") < 0:
        return {}
    problems = column.field("problem")
    at = np.flatnonzero(as_numpy(problems.is_valid()))
    return dict(zip(at.tolist(), problems.take(as_arrow(at)).to_pylist(), strict=True))


def surrounded(ids: Ragged, before: list[int], after: list[int]) -> Ragged:
    """Rows with the special tokens that the tokenizer's call adds before and after each."""
    if not before and not after:
        return ids
    offsets = offsets_of(ids.lengths + len(before) + len(after))
    values = np.empty(int(offsets[-1]), np.int32)
    values[ranges(offsets[:-1] + len(before), ids.lengths, ids.offsets)] = ids.values
    for k, token in enumerate(before):
        values[offsets[:-1] + k] = token
    for k, token in enumerate(reversed(after), 1):
        values[offsets[1:] - k] = token
    return Ragged(values, offsets)


def with_eos(text: pa.Array | pa.ChunkedArray, eos: str) -> Any:
    """Texts of any type, each followed by an EOS token if it does not end with it."""
    token, nothing = (as_scalar(value, text.type) for value in (eos, ""))
    return pc.if_else(pc.ends_with(text, eos), text, pc.binary_join_element_wise(text, token, nothing))


def _all_encodable(texts: Sequence[str]) -> list[str]:
    """The same texts, if UTF-8 can encode all of them."""
    return [encodable(text) for text in texts]
