"""Rendering on the host: a compiled template writes a column of conversations as Arrow text.

`walk.py` says which segments each row is made of: literals of the template, and texts of messages. Here every segment
gets a number in one table of slices, a row becomes a list of such numbers, and one gather copies all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.arrow import as_arrow, as_numpy, bitmap, fill_null
from gpuload.core.marks import LOSS, loss_bits
from gpuload.engines.conversations import Conversations, from_arrow
from gpuload.engines.host.sanitize import mark_column, reject_unplain
from gpuload.engines.host.texts import Bytes, HostTexts, Ints, gather
from gpuload.engines.protocol import RenderedRows, TextColumn, Tokenized, add_seconds, joined_control
from gpuload.template.program import Answer, ByReference

if TYPE_CHECKING:
    from gpuload.engines.walk import Operations, Walk
    from gpuload.template.compiler import ChatProgram

MOST_BYTES = 1 << 28
"""A column is rendered in slices of about this much text, which bounds the memory needed besides the result."""


class Spans(NamedTuple):
    """k parts of n texts, in order; those of one text do not overlap.

    Attributes:
        rows: (k,) int64, ascending, number of the text.
        start: (k,) int64, in bytes of the text.
        end: (k,) int64.
    """

    rows: Ints
    start: Ints
    end: Ints


class AnswerSpans(NamedTuple):
    """k parts of n texts that have loss, in order; those of one text do not overlap.

    Attributes:
        rows, start, end: as of `Spans`.
        bits: (k,) int32, those of their tokens (`core.marks`).
    """

    rows: Ints
    start: Ints
    end: Ints
    bits: np.ndarray[Any, np.dtype[np.int32]]

    @classmethod
    def of_rows(cls, parts: Mapping[int, Sequence[Answer]]) -> AnswerSpans:
        """The parts of some texts by their numbers, which are ascending."""
        rows = np.repeat(np.fromiter(parts, np.int64, len(parts)), [len(some) for some in parts.values()])
        found = [each if len(each) == 3 else (*each, 0) for some in parts.values() for each in some]
        start, end, number = np.array(found, np.int64).reshape(-1, 3).T
        return cls(rows, start, end, loss_bits(number.astype(np.int32)))


@dataclass(kw_only=True, eq=False)
class HostText(RenderedRows):
    """n prompts as text in host memory; a `protocol.RenderedText`.

    Attributes:
        text: (n,) large_string; null where a row was rejected.
        more: further texts of the same rows, column by column; those of a row are encoded together.
        by_template: whether a template made these texts; if not, special tokens are added to their ids.
        ids: n rows of token ids, where rendering and encoding were one step.
        answers: the parts of the texts that have loss; None if nobody asks.
    """

    text: pa.LargeStringArray
    more: list[pa.LargeStringArray] = field(default_factory=list)
    by_template: bool = True
    ids: Ragged | None = None
    answers: AnswerSpans | None = None

    def __len__(self) -> int:
        return len(self.text)

    @cached_property
    def sizes(self) -> Ints:
        """(n,) int64, bytes of the texts of each row, -1 where it was rejected."""
        sizes = [as_numpy(fill_null(pc.binary_length(each), 0)) for each in (self.text, *self.more)]
        return np.where(as_numpy(self.text.is_null()), -1, np.sum(sizes, axis=0, dtype=np.int64))

    @property
    def sampled_sizes(self) -> Ints:
        return self.sizes

    def tokenized(self, ids: Ragged) -> Tokenized:
        """The same rows with their ids."""
        sizes = np.maximum(self.sizes, 0)
        return Tokenized(ids=ids, text_sizes=sizes, text_nbytes=int(sizes.sum()), **self.counts())


@dataclass(kw_only=True, eq=False)
class MixedText(HostText):
    """n prompts of several forms, as text. Each part is encoded by itself.

    Attributes:
        parts: the rows of each form.
        order: (n,) int64, the place of each row among the rows of all parts.
    """

    parts: list[HostText]
    order: Ints

    @cached_property
    def sizes(self) -> Ints:
        return np.concatenate([part.sizes for part in self.parts])[self.order]

    @property
    def sampled_sizes(self) -> Ints:
        return np.concatenate([part.sampled_sizes for part in self.parts])[self.order]

    @classmethod
    def of(cls, parts: Sequence[tuple[Sequence[int], HostText]]) -> HostText:
        """The rows of all parts, in order.

        Args:
            parts: the numbers of some rows, which are ascending, and their text. Every row is in one part.
        """
        parts = [part for part in parts if part[0]] or parts[-1:]
        if len(parts) == 1:
            return parts[0][1]
        order = np.argsort(np.concatenate([rows for rows, _ in parts]))
        texts = [text for _, text in parts]
        made = cls(text=pa.concat_arrays([text.text for text in texts]).take(as_arrow(order)), parts=texts, order=order)
        for rows, text in parts:
            made.rejected.update((rows[at], why) for at, why in text.rejected.items())
            made.by_reference.update((rows[at], why) for at, why in text.by_reference.items())
            add_seconds(made.reason_seconds, text.reason_seconds)
        found = joined_control(texts)
        made.with_control = None if found is None else found[order]
        made.rejected, made.by_reference = (dict(sorted(each.items())) for each in (made.rejected, made.by_reference))
        return made


def render(program: ChatProgram, prompts: pa.Array | pa.ChunkedArray) -> HostText:
    """Renders every conversation of a column.

    Args:
        program: the compiled template; it grows where rows take a path that no earlier row has taken.
        prompts: (n,) list<struct<role, content, ...>>, or several such columns that are `joined`.

    Returns:
        The texts. If control tokens are sanitized, those that come from messages are marked.

    Raises:
        TypeError: `prompts` has another type.
    """
    parts = [_render(program, part) for part in _slices(prompts)]
    if len(parts) == 1:
        return parts[0]
    whole = HostText(text=pa.concat_arrays([part.text for part in parts]))
    whole.take_fates(parts)
    rows, answers = 0, []
    for part in parts:
        if part.answers is not None:
            answers.append(part.answers._replace(rows=part.answers.rows + rows))
        rows += len(part)
    if answers:
        whole.answers = AnswerSpans(*map(np.concatenate, zip(*answers, strict=True)))
    return whole


def _slices(prompts: pa.Array | pa.ChunkedArray) -> Iterator[pa.Array]:
    """A column in slices of at most about `MOST_BYTES`; at least one."""
    chunks = prompts.chunks or [pa.nulls(0, prompts.type)] if isinstance(prompts, pa.ChunkedArray) else [prompts]
    for chunk in chunks:
        count = max(1, -(-chunk.nbytes // MOST_BYTES))
        size = max(1, -(-len(chunk) // count))
        for low in range(0, max(1, len(chunk)), size):
            yield chunk.slice(low, size)


def _render(program: ChatProgram, prompts: pa.Array) -> HostText:
    if program.call.sanitizes:
        prompts = mark_column(prompts, program.call.control)
    made = render_conversations(program, from_arrow(HostTexts(), prompts))
    if program.call.sanitizes:
        made.text = reject_unplain(made.text, program.call.control, made.rejected)
    return made


def render_conversations(program: ChatProgram, column: Conversations) -> HostText:
    """Renders conversations that are in host memory. None of their control tokens is marked."""
    from gpuload.engines.walk import Walk  # few rows do without

    walk = Walk(program, column, together=_together)
    text, bounds, offsets = write(walk)
    answers = None if program.answers is None else _answers(walk, bounds, offsets)
    return HostText(text=text, answers=answers, **walk.fates())


def _together(walk: Walk, rows: Ints) -> Ints:
    """Sends rows through the automaton, which adds to `walk.printed`; returns those to be rendered one by one.

    What the automaton does not know yet, it learns from some of the rows that take such a way, which are rendered one
    by one: more of them each time.

    Args:
        rows: (k,) their numbers, ascending.
    """
    from gpuload.engines.host.passes import TogetherWalk  # few loads need it
    from gpuload.template.compiler import FEW_ROWS, FEWEST_ROWS

    renderer, few, alone = walk.program.renderer(False), FEWEST_ROWS, [rows[:0]]
    while len(rows) and not isinstance(renderer, ByReference) and (known := renderer.known) is not None:
        found = TogetherWalk(*known, walk).of(rows)
        renderer.count_rows(int((found.count > 0).sum()))
        walk.printed.append(found)
        walk.rejected.update(found.rejected)
        alone.append(found.others)
        some, rows = found.unknown[:few], found.unknown[few:]
        walk.render_rows(dict.fromkeys(some.tolist(), FEW_ROWS))
        few *= 2
    return np.concatenate([*alone, rows])


def write(walk: Walk) -> tuple[pa.LargeStringArray, Ints, Ints]:
    """Copies the segments of all rows in one gather.

    All texts that can be a segment are numbered: the literals first, then the texts that transformers rendered, then
    the columns that paths refer to, text by text. Segment j of a path is then, for a row whose first message has the
    number f, the text `constant[j] + factor[j] * f`: factor 0 for a literal, 1 for a message's text.

    Returns:
        The texts, n large_string, null where a row was rejected; (n + 1,) where the segments of each row begin; and the
        byte at which each segment's text begins, with the end of the last one. The texts of a row are consecutive.
    """
    rows = len(walk.prompts)
    slices = _Slices()
    printed = [part for found in walk.printed for part in found.parts]
    literals = {part: 0 for path, _ in walk.paths for part in path.segments if isinstance(part, str)}
    literals |= {part.source: 0 for part in printed if isinstance(part.source, str)}
    slices.add(_joined(literal.encode() for literal in literals))
    literals = {literal: number for number, literal in enumerate(literals)}
    by_reference = slices.add(_joined(walk.texts.values())) + np.arange(len(walk.texts))
    columns: dict[tuple[str, Operations], int] = {}

    counts = np.zeros(rows, np.int64)
    for path, some in walk.paths:
        counts[some] = len(path.segments)
    for found in walk.printed:
        counts += found.count
    counts[_numbers(walk.texts)] = 1
    bounds = offsets_of(counts)

    segments = np.empty(bounds[-1], np.int64)
    segments[bounds[_numbers(walk.texts)]] = by_reference
    for path, some in walk.paths:
        constant, factor = np.empty(len(path.segments), np.int64), np.zeros(len(path.segments), np.int64)
        for j, segment in enumerate(path.segments):
            if isinstance(segment, str):
                constant[j] = literals[segment]
                continue
            key = (segment.field, segment.operations)
            if key not in columns:
                columns[key] = slices.add(walk.column(*key))
            constant[j], factor[j] = columns[key] + segment.message, 1
        filled = walk.prompts.first[some][:, None] * factor + constant
        if len(some) == some[-1] - some[0] + 1:  # consecutive rows: their segments are one slice
            segments[bounds[some[0]] : bounds[some[-1] + 1]] = filled.ravel()
        else:
            segments[bounds[some][:, None] + np.arange(len(path.segments))] = filled

    for part in printed:
        if isinstance(part.source, str):
            text: Any = literals[part.source]
        else:
            if part.source not in columns:
                columns[part.source] = slices.add(walk.column(*part.source))
            text = columns[part.source] + part.messages
        segments[bounds[part.rows] + part.place] = text

    offsets, data = slices.gather(segments)
    valid = np.ones(rows, bool)
    valid[_numbers(walk.rejected)] = False
    mask = None if valid.all() else bitmap(valid)
    text = pa.LargeStringArray.from_buffers(rows, pa.py_buffer(offsets[bounds]), pa.py_buffer(data), mask)
    return text, bounds, offsets


def _answers(walk: Walk, bounds: Ints, offsets: Ints) -> AnswerSpans:
    """Where the answers of all rows are.

    Args:
        bounds, offsets: from `write`.
    """
    rows, start, end, bits = [], [], [], []
    for path, some in walk.paths:
        spans = np.array(path.generated, np.int64).reshape(-1, 2)
        place = offsets[bounds[some][:, None, None] + spans] - offsets[bounds[some]][:, None, None]
        rows.append(np.repeat(some, len(spans)))
        start.append(place[:, :, 0].ravel())
        end.append(place[:, :, 1].ravel())
        bits.append(np.full(len(some) * len(spans), LOSS))
    for learned in (each.learned for each in walk.printed if each.learned is not None):
        first = bounds[learned.rows]
        ends = (offsets[first + learned.begin] + learned.begin_bytes, offsets[first + learned.end] + learned.end_bytes)
        rows.append(learned.rows)
        start.append(ends[0] - offsets[first])
        end.append(ends[1] - offsets[first])
        bits.append(np.full(len(first), LOSS))
    by_reference = AnswerSpans.of_rows(walk.answers)
    found = [np.concatenate([*parts, rest]) for parts, rest in zip((rows, start, end, bits), by_reference, strict=True)]
    order = np.lexsort((found[2], found[1], found[0]))  # an empty one before that which begins there
    return AnswerSpans(*(parts[order] for parts in found))


class _Slices:
    """A table of slices of several buffers, which are laid end to end when it is used."""

    def __init__(self) -> None:
        self._base: dict[int, int] = {}  # id of a buffer → where it begins
        self._buffers: list[Bytes] = []
        self._bytes = self._texts = 0
        self._start: list[Ints] = []
        self._end: list[Ints] = []

    def add(self, texts: TextColumn) -> int:
        """Adds a column of texts; returns the number of its first one."""
        if id(texts.data) not in self._base:
            self._base[id(texts.data)] = self._bytes
            self._buffers.append(texts.data)
            self._bytes += len(texts.data)
        start = texts.start + self._base[id(texts.data)]
        self._start.append(start)
        self._end.append(start + texts.length)
        self._texts += len(start)
        return self._texts - len(start)

    def gather(self, which: Ints) -> tuple[Ints, Bytes]:
        """Offsets and bytes of the texts with these numbers, one after the other."""
        # Arrow's allocator reuses its pages from one batch to the next; fresh ones cost as much as the copy.
        arena = np.frombuffer(pa.allocate_buffer(self._bytes), np.uint8)
        np.concatenate(self._buffers, out=arena)
        return gather(arena, np.concatenate(self._start), np.concatenate(self._end), which)


def _numbers(rows: Mapping[int, object]) -> Ints:
    return np.fromiter(rows, np.int64, len(rows))


def _joined(texts: Iterable[bytes]) -> TextColumn:
    """Texts in one new buffer."""
    pieces = list(texts)
    length = np.array([len(text) for text in pieces], np.int64)
    return TextColumn(np.frombuffer(b"".join(pieces), np.uint8), np.cumsum(length) - length, length)
