"""Which parts have loss of rows that went through the automaton of a template together (`passes.py`).

A template with `{% generation %}` blocks says so. For others `template/answers.py` has the rule: an answer begins and
ends in the literals between the texts of two messages. What these literals are, which roles the two messages have, and
whether an answer is open before them decides, so that each such gap is looked at once, however many rows have it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpuload.core.arrays import offsets_of, ranges
from gpuload.engines.conversations import NULL, TEXTS
from gpuload.engines.host.texts import Bools, Ints, as_arrow_texts
from gpuload.engines.walk import Learned, PrintedSegments, Source, Walk
from gpuload.reference.mask_rules import mask_rules
from gpuload.template.answers import cuts_between
from gpuload.template.marks import UnknownAnswersError
from gpuload.template.program import Operation, Predicate, Ref
from gpuload.template.turns import Turns

_BITS, _MOST_LITERALS, _MOST_PIECES = 12, 4000, 5
"""The literals of a gap are one number: so many bits for each of them, at most so many."""


def learned_in_blocks(parts: Sequence[PrintedSegments], count: Ints) -> tuple[Learned, Ints]:
    """From the first text of each generation block to the last of those behind it that are in it. And the rows that
    begin with a block, if this version of transformers may not see it."""
    bounds = offsets_of(count)
    more = np.zeros(bounds[-1] + 1, bool)
    rows, first = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for part in parts:
        if part.loss == "first":
            rows.append(part.rows)
            first.append(part.place)
        elif part.loss:
            more[bounds[part.rows] + part.place] = True
    of_row, begins = np.concatenate(rows), np.concatenate(first)
    ends = begins + 1
    while (longer := np.flatnonzero(more[bounds[of_row] + ends])).size:  # as often as the longest block has texts
        ends[longer] += 1
    others = np.unique(of_row[begins == 0]) if mask_rules().ignores_first else of_row[:0]
    kept = ~np.isin(of_row, others)
    nothing = np.zeros(np.count_nonzero(kept), np.int64)
    return Learned(of_row[kept], begins[kept], nothing, ends[kept], nothing), others


class _Gaps(NamedTuple):
    """The g gaps of k rows, in order: before each text of a message, and behind the last one.

    Attributes:
        first: (k + 1,) the gaps of each row.
        place: (g,) how many segments of the row are before it.
        literals: each different gap.
        literal: (g,) which of them.
        before, after: (g,) numbers of the roles of the messages around it; 0 at the beginning and at the end.
        roles: by number, from 1.
    """

    first: Ints
    place: Ints
    literals: list[str]
    literal: Ints
    before: Ints
    after: Ints
    roles: list[str]


def learned_in_texts(turns: Turns, walk: Walk, parts: Sequence[PrintedSegments], count: Ints) -> tuple[Learned, Ints]:
    """Answers, by how the template writes turns.

    Args:
        turns: that.
        walk: the column.
        parts: what rows print.
        count: (n,) how many segments each row has.

    Returns:
        The parts with loss of some rows, and the other ones of those that print something.
    """
    rows = np.flatnonzero(count)
    pieces = _PrintedRows(walk, parts, count)
    plain = pieces.plain(rows)
    found = rows[plain]
    gaps = pieces.gaps(found)
    cuts = _Cuts(turns, gaps)
    known = cuts.known
    learned = cuts.learned(found, count)
    kept = known[np.searchsorted(found, learned.rows)] if len(found) else np.empty(0, bool)
    return Learned(*(each[kept] for each in learned)), np.concatenate([rows[~plain], found[~known]])


class _PrintedRows:
    """What rows print, segment by segment.

    Attributes:
        literal: (s,) the number of a segment's literal, from 1; 0 for the text of a message.
        message: (s,) the number of its message; -1 for a literal.
    """

    def __init__(self, walk: Walk, parts: Sequence[PrintedSegments], count: Ints) -> None:
        self._walk, self._column, self._count = walk, walk.prompts, count
        self._bounds = offsets_of(count)
        self._literals: dict[str, int] = {}
        self._odd = np.zeros(len(count), bool)  # rows in which something else is printed, or a text that is empty
        self.literal = np.zeros(self._bounds[-1], np.int64)
        self.message = np.full(self._bounds[-1], -1)
        roles: dict[tuple[Operation, ...], Ints] = {}
        for part in parts:
            at = self._bounds[part.rows] + part.place
            if isinstance(part.source, str):
                self.literal[at] = self._number(part.source)
                continue
            field, operations = part.source
            if field == "role":
                if operations not in roles:
                    roles[operations] = self._role_numbers(part.source)
                self.literal[at] = roles[operations][part.messages]
            elif field == "content":
                self.message[at] = part.messages
                self._odd[part.rows[self._walk.column(*part.source).length[part.messages] == 0]] = True
            else:
                self._odd[part.rows] = True

    def _number(self, literal: str) -> int:
        return self._literals.setdefault(literal, len(self._literals) + 1)

    def _role_numbers(self, source: Source) -> Ints:
        """(m,) the numbers of the roles of all messages, as literals."""
        numbers, texts = _distinct(self._walk, source)
        return np.array([self._number(text) for text in texts], np.int64)[numbers]

    def plain(self, rows: Ints) -> Bools:
        """(k,) bool: rows that print the text of each message once, in order, and whose messages have nothing else."""
        column = self._column
        odd = np.zeros(len(column.present), bool)
        for one in column.fields:
            odd |= one.kind != (TEXTS if one.name in ("role", "content") else NULL)
        odd |= self._walk.answer(Predicate(Ref(0), "contains", "think>"))
        before = offsets_of(odd)
        plain = ~self._odd[rows] & (before[column.first[rows] + column.count[rows]] == before[column.first[rows]])
        texts = offsets_of(self.message >= 0)
        plain &= texts[self._bounds[rows + 1]] - texts[self._bounds[rows]] == column.count[rows]
        some = rows[plain]
        slots = self._slots(some)
        printed = self.message[slots][self.message[slots] >= 0]
        wanted = self._messages(some)
        wrong = np.repeat(some, column.count[some])[printed != wanted]
        plain[np.searchsorted(rows, wrong)] = False
        if len(self._literals) > _MOST_LITERALS:
            plain[:] = False
        # Gaps of more literals than fit into a number.
        some = rows[plain]
        lengths, of_row = self._gap_lengths(some)
        plain[np.searchsorted(rows, some[of_row[lengths > _MOST_PIECES]])] = False
        return np.asarray(plain)

    def _slots(self, rows: Ints) -> Ints:
        return np.asarray(ranges(self._bounds[rows], self._count[rows], offsets_of(self._count[rows])))

    def _messages(self, rows: Ints) -> Ints:
        first, count = self._column.first[rows], self._column.count[rows]
        return np.asarray(ranges(first, count, offsets_of(count)))

    def _gap_starts(self, rows: Ints) -> tuple[Ints, Ints]:
        """(k + 1,) the gaps of each row, and (g,) at which of all segments each begins."""
        first = offsets_of(self._column.count[rows] + 1)
        starts = np.empty(first[-1], np.int64)
        starts[first[:-1]] = self._bounds[rows]
        slots = self._slots(rows)
        behind = np.ones(len(starts), bool)
        behind[first[:-1]] = False
        starts[behind] = slots[self.message[slots] >= 0] + 1
        return first, starts

    def _gap_lengths(self, rows: Ints) -> tuple[Ints, Ints]:
        """(g,) how many literals each gap has, and the place of its row among these rows."""
        first, starts = self._gap_starts(rows)
        ends = np.roll(starts, -1) - 1
        ends[first[1:] - 1] = self._bounds[rows + 1]
        return ends - starts, np.repeat(np.arange(len(rows)), np.diff(first))

    def gaps(self, rows: Ints) -> _Gaps:
        """Those of rows that are plain."""
        first, starts = self._gap_starts(rows)
        lengths, of_row = self._gap_lengths(rows)
        packed = np.zeros(len(starts), np.int64)
        for k in range(int(lengths.max(initial=0))):
            longer = np.flatnonzero(lengths > k)
            packed[longer] += self.literal[starts[longer] + k] << (_BITS * k)
        different, literal = np.unique(packed, return_inverse=True)
        numbers, roles = _distinct(self._walk, ("role", ()))
        role = (numbers + 1)[self._messages(rows)]
        before, after = np.zeros((2, len(starts)), np.int64)
        inside = np.ones(len(starts), bool)
        inside[first[:-1]] = False
        before[inside] = role
        inside[:] = True
        inside[first[1:] - 1] = False
        after[inside] = role
        texts = ["", *self._literals]
        literals = [
            "".join(texts[(number >> (_BITS * k)) & ((1 << _BITS) - 1)] for k in range(_MOST_PIECES))
            for number in different.tolist()
        ]
        return _Gaps(first, starts - self._bounds[rows][of_row], literals, literal, before, after, roles)


class _Cuts:
    """Where answers begin and end in gaps, in turn.

    Attributes:
        known: (k,) bool, rows of which it is known.
    """

    def __init__(self, turns: Turns, gaps: _Gaps) -> None:
        self._turns, self._gaps = turns, gaps
        sides = len(gaps.roles) + 1
        packed = (gaps.literal * sides + gaps.before) * sides + gaps.after
        self._kinds, kind = np.unique(packed, return_inverse=True)
        # A kind of gap with an answer open before it, or not: where it is cut, in bytes; None if that is unknown.
        self._cuts: dict[int, list[int] | None] = {}
        rows = len(gaps.first) - 1
        self.known = np.ones(rows, bool)
        self._of_gap = np.zeros(len(kind), np.int64)
        opened = np.zeros(rows, np.int64)
        lengths = np.diff(gaps.first)
        for j in range(int(lengths.max(initial=0))):
            some = np.flatnonzero(lengths > j)
            at = gaps.first[some] + j
            which = kind[at] * 2 + opened[some]
            self._of_gap[at] = which
            different, number = np.unique(which, return_inverse=True)
            found = [self._cut(each) for each in different.tolist()]
            self.known[some[np.array([each is None for each in found], bool)[number]]] = False
            opened[some] ^= np.array([len(each or ()) % 2 for each in found], np.int64)[number]
        self._opened = opened

    def _cut(self, which: int) -> list[int] | None:
        if which not in self._cuts:
            gaps, sides = self._gaps, len(self._gaps.roles) + 1
            rest, after = divmod(int(self._kinds[which // 2]), sides)
            number, before = divmod(rest, sides)
            literal = gaps.literals[number]
            roles = tuple(gaps.roles[role - 1] if role else False for role in (before, after))
            try:
                cuts = cuts_between(literal, bool(which % 2), roles, False, self._turns)
                self._cuts[which] = [len(literal[:cut].encode()) for cut in cuts]
            except UnknownAnswersError:
                self._cuts[which] = None
        return self._cuts[which]

    def learned(self, rows: Ints, count: Ints) -> Learned:
        """The parts between the cuts of each row."""
        different, number = np.unique(self._of_gap, return_inverse=True)
        cuts = [self._cuts[each] or [] for each in different.tolist()]
        sizes = np.array([len(each) for each in cuts], np.int64)
        starts, flat = offsets_of(sizes), np.array([cut for each in cuts for cut in each], np.int64)
        each_gap = sizes[number]
        gap = np.repeat(np.arange(len(number)), each_gap)
        bytes_in = flat[ranges(starts[:-1][number], each_gap, offsets_of(each_gap))]
        of_row = np.repeat(np.arange(len(rows)), np.diff(self._gaps.first))[gap]
        # An answer that is open at the end of a row ends there.
        last = np.flatnonzero(self._opened)
        of_row = np.concatenate([of_row, last])
        place = np.concatenate([self._gaps.place[gap], count[rows[last]]])
        bytes_in = np.concatenate([bytes_in, np.zeros(len(last), np.int64)])
        order = np.argsort(of_row, kind="stable")
        of_row, place, bytes_in = of_row[order], place[order], bytes_in[order]
        return Learned(rows[of_row[::2]], place[::2], bytes_in[::2], place[1::2], bytes_in[1::2])


def _distinct(walk: Walk, source: Source) -> tuple[Ints, list[str]]:
    """(m,) a number for the text of each message, and the different texts."""
    encoded = as_arrow_texts(walk.column(*source)).dictionary_encode()
    return np.asarray(encoded.indices).astype(np.int64), encoded.dictionary.to_pylist()
