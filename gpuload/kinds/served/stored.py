"""A conversation as rows as served, in one row of a store.

Caches, filters and stores take one row per conversation. So its rows are stored end to end, behind a header that says
where each begins. The header is of the same type as tokens:

    size of the header, rows, answers, reasons, counts (COUNTS)
    of each row      its length, the number of the message that it ends with
    of each answer   its row, its first token and its end there, its message
    of each reason   its number (turns.REASONS), how many turns are not learned for it
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuload.core.arrays import Array, Ragged, RowNumbers, count_in_rows, offsets_of, ranges
from gpuload.core.marks import IDS, LOSS
from gpuload.kinds.served.turns import Turn

COUNTS = (
    "answers whose reasoning the template does not write",
    "answers that would merge with the prompt: ids of both parts, one after the other",
    "answers without reasoning, behind the template's prompt without thinking",
    "answers with token_ids that are not those of their text",
    "prompts in which the template rewrites answers with token_ids: ids of their text",
    "answers whose own text has an empty thinking block, which is learned",
)
"""What is counted of a conversation's answers."""

LOST, MERGED, WITHOUT_THINKING, RESAMPLED, REWRITTEN, EMPTY_THINKING = range(len(COUNTS))

FIXED = 4 + len(COUNTS)
"""Of how many numbers the first line of a header is."""

Ids = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class LearnedAnswer:
    """An answer and what is before it: S, as ids."""

    number: int  # of its message
    ids: Ids  # of prompt and answer, without bits
    begin: int  # how many of them are the prompt's
    bits: Ids  # of each token from `begin` on


def count_answer(counts: list[int], turn: Turn, merged: bool = False) -> None:
    """Counts what is to be said of an answer that is made of its text; `merged`: it would merge with the prompt."""
    counts[LOST] += turn.lost
    counts[MERGED] += merged
    counts[WITHOUT_THINKING] += turn.without_thinking
    counts[EMPTY_THINKING] += turn.empties


@dataclass
class ServedRows:
    """The rows of a conversation."""

    # Ids with their bits, and the number of the message that each ends with
    rows: list[tuple[Ids, int]] = field(default_factory=list)
    answers: list[tuple[int, int, int, int]] = field(default_factory=list)  # row, begin, end and message of each
    reasons: dict[int, int] = field(default_factory=dict)  # number of a reason → turns that are not learned for it
    counts: list[int] = field(default_factory=lambda: [0] * len(COUNTS))  # see `COUNTS`

    @classmethod
    def of(cls, turns: Sequence[LearnedAnswer | int], counts: list[int]) -> "ServedRows":
        """The fewest rows that have each answer behind its prompt: those that are not the beginning of another one.
        Each answer is learned in the first of them that begins with it. In the place of a turn that is not learned is
        the number of the reason."""
        answers = [turn for turn in turns if not isinstance(turn, int)]
        made = cls(reasons=dict(Counter(turn for turn in turns if isinstance(turn, int))), counts=counts)
        texts = [one.ids.tobytes() for one in answers]
        # A row need not be written if another one begins with it; of equal ones the first is written.
        kept = [
            k
            for k, own in enumerate(texts)
            if not any(other.startswith(own) and (len(other) > len(own) or j < k) for j, other in enumerate(texts))
        ]
        whole = [answers[k].ids.copy() for k in kept]
        for one, own in zip(answers, texts, strict=True):
            row, end = next(k for k, at in enumerate(kept) if texts[at].startswith(own)), len(one.ids)
            free = (whole[row][one.begin : end] & LOSS) == 0
            whole[row][one.begin : end] |= np.where(free, one.bits, 0)
            made.answers.append((row, one.begin, end, one.number))
        made.rows = [(ids, answers[k].number) for ids, k in zip(whole, kept, strict=True)]
        return made

    def words(self) -> Ids:
        """The conversation as it is stored."""
        reasons = sorted(self.reasons.items())
        header = [0, len(self.rows), len(self.answers), len(reasons), *self.counts]
        for ids, number in self.rows:
            header += [len(ids), number]
        for answer in self.answers:
            header += answer
        for reason in reasons:
            header += reason
        header[0] = len(header)
        return np.concatenate([np.array(header, np.int32), *(ids for ids, _ in self.rows)])


@dataclass(frozen=True, eq=False)
class Headers:
    """What the headers of n conversations say."""

    size: RowNumbers  # (n,) of each header
    rows: RowNumbers  # (r, 2) length and last message of each row, those of a conversation one after the other
    row_offsets: RowNumbers  # (n + 1,) which of them are those of a conversation
    answers: RowNumbers  # (a, 4) row in its conversation, first token, end, and message of each answer
    answer_offsets: RowNumbers  # (n + 1,) which of them are those of a conversation
    reasons: RowNumbers  # (q, 2) number of a reason, and turns
    reason_offsets: RowNumbers  # (n + 1,) which of them are those of a conversation
    counts: RowNumbers  # (n, len(COUNTS))

    @classmethod
    def of(cls, stored: Ragged) -> "Headers":
        """Those of conversations in host memory; a row without anything counts as one without rows."""
        values, some = stored.values, stored.lengths > 0
        fixed = np.zeros((len(stored), FIXED), np.int64)
        fixed[some] = values[stored.offsets[:-1][some][:, None] + np.arange(FIXED)]
        begin: RowNumbers = stored.offsets[:-1] + FIXED
        found: list[RowNumbers] = []
        for column, width in ((1, 2), (2, 4), (3, 2)):
            count = fixed[:, column]
            offsets = offsets_of(count * width)
            rows = values[ranges(begin, count * width, offsets)].astype(np.int64)
            found += [rows.reshape(-1, width), offsets_of(count)]
            begin = begin + count * width
        rows, row_offsets, answers, answer_offsets, reasons, reason_offsets = found
        sizes, counts = fixed[:, 0], fixed[:, 4:]
        return cls(sizes, rows, row_offsets, answers, answer_offsets, reasons, reason_offsets, counts)

    @property
    def begin(self) -> RowNumbers:
        """(r,) where each row begins in what is stored of its conversation."""
        lengths = self.rows[:, 0]
        before = offsets_of(lengths)
        first = before[self.row_offsets[:-1]]
        begin: RowNumbers = before[:-1] - np.repeat(first - self.size, np.diff(self.row_offsets))
        return begin

    @property
    def row_of_answer(self) -> RowNumbers:
        """(a,) in which row, of all, each answer is learned."""
        row: RowNumbers = np.repeat(self.row_offsets[:-1], np.diff(self.answer_offsets)) + self.answers[:, 0]
        return row

    @property
    def conversation(self) -> RowNumbers:
        """(r,) of which conversation each row is."""
        return np.repeat(np.arange(len(self.size)), np.diff(self.row_offsets))


def headers_only(stored: Ragged) -> Ragged:
    """The headers of conversations, without their rows."""
    size, some = np.zeros(len(stored), np.int64), stored.lengths > 0
    size[some] = stored.values[stored.offsets[:-1][some]]
    offsets = offsets_of(size)
    return Ragged(stored.values[ranges(stored.offsets[:-1], size, offsets)], offsets)


def served_sizes(stored: Ragged) -> Array:
    """(4, n): what is stored of each conversation, its tokens with loss, those of its shortest row, and its rows."""
    headers = Headers.of(stored)
    lengths, rows = headers.rows[:, 0], np.diff(headers.row_offsets)
    shortest = np.zeros(len(rows), np.int64)
    some = rows > 0
    if some.any():
        shortest[some] = np.minimum.reduceat(lengths, headers.row_offsets[:-1][some])
    loss = count_in_rows((stored.values & LOSS) != 0, stored.offsets)  # no number in a header is so large
    return np.stack([stored.lengths, loss, shortest, rows])


def holds(found: Sequence[int], wanted: Sequence[int], number: int, made: LearnedAnswer | int) -> bool:
    """Whether a conversation, as it is stored, has an answer as it should be, and rows that are possible at all.

    To make all answers of a conversation by the definition costs their number times its length, and verification has a
    tenth of a second for a load: of long conversations it would see two or three. So the tokenizer makes one answer.

    Of the messages that are to be learned (`wanted`), the one with this number has the answer `made` by the definition,
    or a reason why it is not learned. False also where one cannot say so, such as for an answer that shares tokens with
    loss with another one.
    """
    words = np.array(found, np.int32)
    headers = Headers.of(Ragged(words, np.array([0, len(words)])))
    ends = headers.size[0] + np.cumsum(headers.rows[:, 0])
    if not len(ends) or ends[-1] != len(words):
        return False
    rows = np.split(words, [headers.size[0], *ends[:-1]])[1:]
    texts = [(row & IDS).tobytes() for row in rows]
    places = headers.answers[:, :3].tolist()
    answers = dict(zip(headers.answers[:, 3].tolist(), places, strict=True))
    turns = len(places) + int(headers.reasons[:, 1].sum())
    if len(answers) != len(places) or turns != len(wanted) or not answers.keys() <= set(wanted):
        return False
    # Each answer is learned in the first row that begins with it, and nothing else is. No row is needed that another
    # one begins with.
    for row, _, end in places:
        if row != next(k for k, text in enumerate(texts) if text.startswith(texts[row][: 4 * end])):
            return False
    for k, (row, number_at_end) in enumerate(zip(rows, headers.rows[:, 1].tolist(), strict=True)):
        learned = np.zeros(len(row), bool)
        for of, begin, end in places:
            learned[begin:end] |= of == k
        ended = answers.get(number_at_end, (-1, 0, 0))
        if (ended[0], ended[2]) != (k, len(row)) or ((row & LOSS) != 0)[~learned].any():
            return False
        if sum(text.startswith(texts[k]) for text in texts) != 1:
            return False
    if isinstance(made, int) or number not in answers:
        return number not in answers and made in headers.reasons[:, 0].tolist()
    of, begin, end = answers[number]
    ids, bits = rows[of][:end] & IDS, rows[of][begin:end] & ~IDS
    return begin == made.begin and np.array_equal(ids, made.ids) and np.array_equal(bits, made.bits)
