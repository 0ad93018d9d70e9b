"""The rows of conversations by columns: written, and compared where texts decide which one begins with which."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, RowNumbers, appended, offsets_of, ranges
from gpuload.engines.conversations import TEXTS, Conversations
from gpuload.engines.host.render import write
from gpuload.engines.walk import Walk
from gpuload.kinds.served.decisions import Decision, Family
from gpuload.kinds.served.stored import FIXED
from gpuload.kinds.served.turns import REASONING
from gpuload.template.program import Path

Bools = np.ndarray[Any, np.dtype[np.bool_]]

_NEAR = 16  # bytes that are compared at first
_AT_ONCE = 1 << 16  # pairs of texts


@dataclass(frozen=True, eq=False)
class ColumnTurns:
    """Rows of c conversations, r in all, with a answers."""

    numbers: RowNumbers  # (c,) ascending, of the conversations
    decided: Bools  # (c,) false where only the reference can tell which rows there are
    text: pa.LargeStringArray  # (r,)
    row_offsets: RowNumbers  # (c + 1,) which rows are those of each
    shared: RowNumbers  # (r,) bytes that each has in common with the one before, and where both may be cut
    number: RowNumbers  # (r,) the message that each ends with
    answer_offsets: RowNumbers  # (c + 1,) which answers are those of each
    row: RowNumbers  # (a,) in which each is learned
    begin: RowNumbers  # (a,) in bytes of the row's text
    end: RowNumbers  # likewise
    message: RowNumbers  # (a,) with the answer
    quiet: Bools  # (a,) whether it is behind the prompt without thinking
    lost: Bools  # (a,) whether its message has reasoning that it lacks
    prompt_end: RowNumbers  # (a,) which of `prompt_ends` its prompt ends with
    prompt_ends: list[str]  # literals
    reasons: RowNumbers  # (c, 2) why turns are not learned, as a number, and how many

    @property
    def joined(self) -> pa.LargeStringArray:
        """(c,) the rows of each conversation as one text."""
        _, offsets, data = self.text.buffers()
        bounds = np.frombuffer(offsets, np.int64)[self.row_offsets]
        return pa.LargeStringArray.from_buffers(len(self.numbers), pa.py_buffer(bounds), data)

    def stored(self, rows: Ragged, answers: RowNumbers, counts: RowNumbers, kept: Bools) -> Ragged:
        """(c,) what is stored of the conversations (`stored.py`), nothing of those that are not `kept`: by the tokens
        of all rows with their bits, (a, 4) row, begin, end and message of each answer, and (c, len(COUNTS))."""
        of_rows, of_answers = np.diff(self.row_offsets), np.diff(self.answer_offsets)
        count, learned = of_rows * kept, of_answers * kept
        said = kept & (self.reasons[:, 1] > 0)
        size = (FIXED + 2 * count + 4 * learned + 2 * said) * kept
        offsets = offsets_of(size)
        header, first = np.zeros(int(offsets[-1]), np.int32), offsets[:-1][kept]
        for at, values in enumerate((size, count, learned, said, *counts.T)):
            header[first + at] = values[kept]
        ends = np.stack([rows.lengths, self.number], axis=1)[np.repeat(kept, of_rows)]
        for before, items, values in (
            (FIXED, 2 * count, ends),
            (FIXED + 2 * count, 4 * learned, answers[np.repeat(kept, of_answers)]),
            (FIXED + 2 * count + 4 * learned, 2 * said, self.reasons[said]),
        ):
            header[ranges(offsets[:-1] + before, items, offsets_of(items))] = values.ravel()
        lengths = np.diff(rows.offsets[self.row_offsets])
        tokens = rows.values if kept.all() else rows.values[np.repeat(kept, lengths)]
        return appended(Ragged(header, offsets), Ragged(tokens, offsets_of(lengths * kept)))


def written(
    column: Conversations,
    walk: Walk,
    row: RowNumbers,
    message: RowNumbers,
    decisions: Sequence[Decision | None],
    of: RowNumbers,
    family_of: Callable[..., Family],
    reasons: RowNumbers,
) -> ColumnTurns:
    """The rows of conversations, each of which has an answer that is learned.

    Args:
        walk: of these, for its columns of texts.
        row, message: (a,) of the answers that are learned.
        decisions, of: what is decided about each of them.
        family_of: the rows of some decisions.
    """
    first = np.flatnonzero(np.append(True, np.diff(row) > 0))
    counts = np.diff(first, append=len(row))
    group_of = np.zeros(len(first), np.int64)  # conversations with the same turns
    for turn in range(int(counts.max())):
        there = turn < counts
        next_turn = np.where(there, of[first + turn * there] + 1, 0)
        _, group_of = np.unique(group_of * (len(decisions) + 1) + next_turn, return_inverse=True)
    _, example = np.unique(group_of, return_index=True)
    families: list[Family] = [
        family_of(*(decisions[k] for k in of[low : low + counts[at]].tolist()))
        for at, low in zip(example.tolist(), first[example].tolist(), strict=True)
    ]
    row_offsets = offsets_of(np.array([len(each.rows) for each in families])[group_of])
    ends, own = np.zeros(row_offsets[-1], np.int64), np.zeros(len(row), np.int64)
    shared = np.zeros((2, row_offsets[-1]), np.int64)
    forks = [np.zeros((5, 0), np.int64)]
    for number, family in enumerate(families):
        members = np.flatnonzero(group_of == number)[:, None]
        ends[row_offsets[members] + np.arange(len(family.rows))] = first[members] + np.array(family.rows)
        shared[:, row_offsets[members] + np.arange(len(family.rows))] = np.array(family.shared).T[:, None]
        own[first[members] + np.arange(len(family.row_of))] = family.row_of
        if family.forks:
            turn, other, unit, size = np.array([(*each[:2], *each.place) for each in family.forks]).T
            found = np.broadcast_arrays(first[members] + turn, row_offsets[members] + other, members, unit, size)
            forks.append(np.stack([each.ravel() for each in found]))
    paths = [(Path(decisions[k].units), np.flatnonzero(of[ends] == k)) for k in np.unique(of[ends]).tolist()]
    prompts = beginnings(column, row[ends], message[ends] + 1)
    text, bounds, offsets = write(walk.of_paths(prompts, paths))

    def place(of_rows: RowNumbers, unit: RowNumbers, size: RowNumbers) -> RowNumbers:
        """Bytes in rows, from units and bytes in these."""
        found: RowNumbers = offsets[bounds[of_rows] + unit] - offsets[bounds[of_rows]] + size
        return found

    some = [each or _NOTHING for each in decisions]
    known = np.array([(*each.begin, len(each.units) - 1, len(str(each.units[-1]).encode())) for each in some])[of].T
    at = row_offsets[np.repeat(np.arange(len(first)), counts)] + own
    begin, end = place(at, *known[:2]), place(at, *known[2:])
    turn, other, conversation, *where = np.concatenate(forks, axis=1)
    before, starts = place(at[turn], *where), offsets[bounds]
    common = np.minimum(end[turn], starts[other + 1] - starts[other]) - before
    apart = _differ(text, starts[at[turn]] + before, starts[other] + before, common)
    decided = np.ones(len(first), bool)
    decided[conversation[~apart]] = False
    unclear = np.flatnonzero(~np.array([each.reasons for each in some])[of])
    lost = np.zeros(len(row), bool)
    places = ((starts[at] + each)[unclear] for each in (begin, end))
    lost[unclear] = _lost(column, (column.first[row] + message)[unclear], text, *places)
    prompt_ends = list(dict.fromkeys(each.prompt_end for each in some))
    return ColumnTurns(
        numbers=row[first],
        decided=decided,
        text=text,
        row_offsets=row_offsets,
        shared=place(np.arange(len(ends)), *shared),
        number=message[ends],
        answer_offsets=offsets_of(counts),
        row=own,
        begin=begin,
        end=end,
        message=message,
        quiet=np.array([each.quiet for each in some])[of],
        prompt_end=np.array([prompt_ends.index(each.prompt_end) for each in some])[of],
        prompt_ends=prompt_ends,
        lost=lost,
        reasons=reasons,
    )


_NOTHING = Decision(("",), (0, 0), "", False, False)


def _lost(
    column: Conversations, messages: RowNumbers, text: pa.LargeStringArray, begin: RowNumbers, end: RowNumbers
) -> Bools:
    """Whether k answers, which begin and end in the bytes of all texts, lack the reasoning of their messages; these are
    numbered among all."""
    found, data = np.zeros(len(messages), bool), np.frombuffer(text.buffers()[2] or b"", np.uint8)
    known = found.copy()  # the first field that is not blank has the reasoning
    for field in sorted(
        (one for one in column.fields if one.name in REASONING), key=lambda one: REASONING.index(one.name)
    ):
        some = np.flatnonzero(~known & (field.kind[messages] == TEXTS))
        if field.texts is None or not len(some):
            continue
        for k, reasoning in zip(some.tolist(), column.ops.bytes_at(field.texts, messages[some].tolist()), strict=True):
            said = reasoning.decode().strip().encode()
            known[k], found[k] = bool(said), said not in data[begin[k] : end[k]].tobytes()
    return found


def _differ(text: pa.LargeStringArray, one: RowNumbers, other: RowNumbers, size: RowNumbers) -> Bools:
    """Whether k parts of some texts differ from k others of the same size; all begin in the bytes of all texts."""
    data, found = np.frombuffer(text.buffers()[2] or b"", np.uint8), np.zeros(len(one), bool)
    for low in range(0, len(one), _AT_ONCE):
        some = slice(low, low + _AT_ONCE)
        here, there = (data[np.minimum(at[some, None] + np.arange(_NEAR), len(data) - 1)] for at in (one, other))
        found[some] = ((here != there) & (np.arange(_NEAR) < size[some, None])).any(axis=1)
    for k in np.flatnonzero(~found).tolist():
        found[k] = not np.array_equal(data[one[k] :][: size[k]], data[other[k] :][: size[k]])
    return found


def beginnings(column: Conversations, row: RowNumbers, count: RowNumbers) -> Conversations:
    """The first messages of rows, over the same messages; rows may occur several times."""
    valid = np.ones(len(row), bool)
    first = column.first[row]
    return replace(column, valid=valid, first=first, count=count, rejected={}, by_reference={}, objects=None)
