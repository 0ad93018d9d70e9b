"""Conversations whose history is never rewritten, by columns: one row each, in which every answer is learned.

Prompts and conversations up to each answer take paths through the compiled template (`engines/walk.py`): lists of
literals and of texts of messages. Whether P is the beginning of R, where the answer ends, and whether both are the
beginning of the whole conversation, is decided once for the three paths, whatever the texts are. Only the whole
conversation is written.

Everything else is made row by row (`engine.py`): answers that begin with a thinking block, texts with stop tokens or
with empty thinking blocks, and paths about which the literals do not decide.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import RowNumbers, offsets_of, ranges
from gpuload.core.options import LossOn
from gpuload.engines.conversations import Conversations
from gpuload.engines.host.render import write
from gpuload.engines.shapes import group
from gpuload.engines.walk import Walk
from gpuload.kinds.served.sampled import PROMPT_IDS, TOKEN_IDS
from gpuload.kinds.served.turns import REASONING, empty_blocks
from gpuload.sources.columns import to_python
from gpuload.template.compiler import FEWEST_ROWS, FREE_LEAVES, ChatProgram
from gpuload.template.program import Path, Ref

Units = tuple[str | Ref, ...]
"""The segments of a path, without literals next to each other."""

Place = tuple[int, int]
"""A unit, and a character in it if it is a literal."""


class Decision(NamedTuple):
    """Where an answer is in a whole conversation, for all rows that take three paths.

    Attributes:
        begin, end: in the units of the whole conversation.
        prompt_end: the literal at the end of the prompt.
        reasons: whether the answer has a field with reasoning.
        path: the whole conversation, up to `end`.
    """

    begin: Place
    end: Place
    prompt_end: str
    reasons: bool
    path: Path


@dataclass(frozen=True, eq=False)
class ColumnTurns:
    """Rows of c conversations, with a answers.

    Attributes:
        rows: (c,) ascending, their numbers.
        text: (c,) large_string.
        number: (c,) the message that each ends with.
        answer_offsets: (c + 1,) which answers are those of each.
        begin, end: (a,) in bytes of the text.
        message: (a,) with the answer.
        prompt_end: (a,) which of `prompt_ends` its prompt ends with.
        prompt_ends: literals.
    """

    rows: RowNumbers
    text: pa.LargeStringArray
    number: RowNumbers
    answer_offsets: RowNumbers
    begin: RowNumbers
    end: RowNumbers
    message: RowNumbers
    prompt_end: RowNumbers
    prompt_ends: list[str]


class ColumnFinder:
    """Finds such conversations in columns. Several threads may do so at once.

    Args:
        program, prompting: the template of conversations and of prompts.
        stops: finds stop tokens.
        stop_texts: these tokens.
        thinking: literals that open and close reasoning.
        loss_on: "assistant", "last" or "last_turn".
    """

    def __init__(
        self,
        program: ChatProgram,
        prompting: ChatProgram,
        stops: re.Pattern[str],
        stop_texts: Sequence[str],
        thinking: Sequence[tuple[str, str]],
        loss_on: LossOn,
    ):
        self._program, self._prompting = program, prompting
        self._stops, self._loss_on = stops, loss_on
        self._apart = [*stop_texts, *empty_blocks(thinking)]  # texts with one of these are looked at row by row
        self._thinking = [literal for pair in thinking for literal in pair]
        self._decisions: dict[tuple[int, int, int], Decision | None] = {}
        self._paths: list[Path] = []  # keeps their ids
        self._units: dict[int, Units] = {}

    def find(self, column: Conversations) -> ColumnTurns | None:
        """Those of some conversations; None if there are none."""
        row, message = self._learned(column)
        if not len(row):
            return None
        last = np.append(np.diff(row) > 0, True)  # of each conversation
        first = column.first[row]
        prompts, wholes = (_beginnings(column, row, message + more) for more in (0, 1))
        paths = [Walk(*each, controls=False) for each in ((self._prompting, prompts), (self._program, wholes))]
        one, other = (_path_of_row(walk, len(row)) for walk in paths)
        whole = other[last][np.cumsum(last) - last]
        triples, which = np.unique(np.stack([one, other, whole], axis=1), axis=0, return_inverse=True)
        which = which.ravel()
        decisions = [
            None if min(p, r, w) < 0 else self._decide(paths[0].paths[p][0], paths[1].paths[r][0], paths[1].paths[w][0])
            for p, r, w in triples.tolist()
        ]
        known = np.array([each is not None for each in decisions])[which]
        reasons = np.array([each is not None and each.reasons for each in decisions])[which]
        known &= reasons | ~_with_reasoning(column, first + message)
        kept = np.logical_and.reduceat(known, np.flatnonzero(np.append(True, np.diff(row) > 0)))
        if not kept.any():
            return None
        answers = kept[np.cumsum(last) - last]
        row, message, which, last = (each[answers] for each in (row, message, which, last))
        some = [each or _NOTHING for each in decisions]
        rows = row[last]
        groups = [(some[k].path, np.flatnonzero(which[last] == k)) for k in np.unique(which[last]).tolist()]
        walk: Any = SimpleNamespace(
            printed=[], prompts=column.take(rows), paths=groups, texts={}, rejected={}, column=paths[1].column
        )
        text, bounds, offsets = write(walk)
        of = np.cumsum(last) - last
        places = np.array([(*each.begin, *each.end) for each in some], np.int64)[which]
        base = offsets[bounds[of]]
        begin, end = (offsets[bounds[of] + places[:, k]] - base + places[:, k + 1] for k in (0, 2))
        ends = list(dict.fromkeys(each.prompt_end for each in some))
        prompt_end = np.array([ends.index(each.prompt_end) for each in some])[which]
        counts = np.bincount(of, minlength=len(rows))
        return ColumnTurns(rows, text, message[last], offsets_of(counts), begin, end, message, prompt_end, ends)

    def _learned(self, column: Conversations) -> tuple[RowNumbers, RowNumbers]:
        """Row and number of each message with an answer, of rows that may be made here; ascending."""
        nothing = np.zeros(0, np.int64)
        role = next((one for one in column.fields if one.name == "role" and one.texts is not None), None)
        sampled = any(one.name in (TOKEN_IDS, PROMPT_IDS) for one in column.fields)
        if role is None or role.texts is None or not len(column) or sampled:
            return nothing, nothing
        found = group(column)
        usable = np.ones(len(column), bool)
        usable[list({*found.rejected, *found.by_reference})] = False
        if len(found.groups) > FREE_LEAVES:
            for _, rows in found.groups:
                usable[rows] &= len(rows) >= FEWEST_ROWS
        row = np.repeat(np.arange(len(column)), column.count)
        at = ranges(column.first, column.count, offsets_of(column.count))
        example, number, _ = column.ops.distinct(role.texts)
        names = column.ops.bytes_at(role.texts, example.tolist())
        ours, asks = (np.array([each == name for each in names], bool)[number] for name in (b"assistant", b"user"))
        wanted, user = ours[at], asks[at]
        message = at - column.first[row]
        stops = np.zeros(len(column.present), bool)
        for each in column.fields:
            if each.texts is not None:
                stops |= column.ops.contains_any(each.texts, self._apart)
        usable[row[stops[at]]] = False
        if self._loss_on == "last_turn":
            asked = np.full(len(column), -1)
            np.maximum.at(asked, row[user], message[user])
            wanted = wanted & (message > asked[row])
        usable[row[wanted & (message == 0)]] = False
        wanted = wanted & usable[row]
        row, message = row[wanted], message[wanted]
        if self._loss_on == "last" and len(row):
            last = np.append(np.diff(row) > 0, True)
            row, message = row[last], message[last]
        return row, message

    def _decide(self, prompt: Path, rendered: Path, whole: Path) -> Decision | None:
        key = (id(prompt), id(rendered), id(whole))
        if key not in self._decisions:
            self._paths += [prompt, rendered, whole]
            self._decisions[key] = self._decided(*map(self._units_of, (prompt, rendered, whole)))
        return self._decisions[key]

    def _units_of(self, path: Path) -> Units:
        if id(path) not in self._units:
            self._units[id(path)] = _merged(path)
        return self._units[id(path)]

    def _decided(self, prompt: Units, rendered: Units, whole: Units) -> Decision | None:
        begin = _end_of(prompt, rendered)
        if begin is None or not isinstance(prompt[-1], str):
            return None
        unit = rendered[begin[0]] if begin[0] < len(rendered) else ""
        rest = unit[begin[1] :].lstrip() if isinstance(unit, str) else ""
        opened = prompt[-1].rstrip()
        if any(opened.endswith(each) or each.startswith(rest[: len(each)] or "\0") for each in self._thinking):
            return None
        end = self._stop_behind(rendered, begin)
        if end is None:
            return None
        literal = rendered[end[0]]
        assert isinstance(literal, str)
        answered = (*rendered[: end[0]], literal[: end[1]])
        if _end_of(answered, whole) is None:
            return None
        reasons = any(
            isinstance(each, Ref)
            and each.field in REASONING
            and all(operation.name in ("strip", "lstrip", "rstrip") for operation in each.operations)
            for each in rendered[begin[0] : end[0]]
        )
        first, last = ((number, _bytes_before(rendered[number : number + 1], at)) for number, at in (begin, end))
        return Decision(first, last, prompt[-1], reasons, Path(answered))

    def _stop_behind(self, units: Units, begin: Place) -> Place | None:
        """The end of the first stop token in the literals behind a place."""
        unit, at = begin
        for number in range(unit, len(units)):
            literal = units[number]
            if isinstance(literal, str) and (found := self._stops.search(literal, at if number == unit else 0)):
                return number, found.end()
        return None


_NOTHING = Decision((0, 0), (0, 0), "", False, Path(()))


def _bytes_before(units: Units, at: int) -> int:
    """The bytes of the first characters of a literal; 0 for a text."""
    return sum(len(unit[:at].encode()) for unit in units if isinstance(unit, str))


def _merged(path: Path) -> Units:
    units: list[str | Ref] = []
    for segment in path.segments:
        if isinstance(segment, str) and units and isinstance(units[-1], str):
            units[-1] += segment
        elif segment != "":
            units.append(segment)
    return tuple(units)


def _end_of(head: Units, units: Units) -> Place | None:
    """Where some units end in others that begin with them, whatever the texts are; None if that is not known."""
    count = len(head) - 1
    if count < 0 or len(units) <= count or units[:count] != head[:count]:
        return None
    last, other = head[count], units[count]
    if isinstance(last, str):
        return (count, len(last)) if isinstance(other, str) and other.startswith(last) else None
    return (count + 1, 0) if last == other else None


def _beginnings(column: Conversations, row: RowNumbers, count: RowNumbers) -> Conversations:
    """The first messages of rows, over the same messages; rows may occur several times."""
    return Conversations(
        column.ops,
        np.ones(len(row), bool),
        column.first[row],
        count,
        column.present,
        column.fields,
        column.fetch,
        column.keys,
        column.keyed,
        objects=_Beginnings(column, row, count),
    )


class _Beginnings(Sequence[Any]):
    """The first messages of rows as Python objects, made when they are needed."""

    def __init__(self, column: Conversations, row: RowNumbers, count: RowNumbers):
        self._column, self._row, self._count = column, row, count
        self._known: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, number: Any) -> Any:
        row = int(self._row[number])
        if self._known[0] != row:
            objects = self._column.objects
            value = to_python(self._column.to_arrow(np.array([row])))[0] if objects is None else objects[row]
            self._known = row, value
        return self._known[1][: int(self._count[number])]


def _path_of_row(walk: Walk, rows: int) -> RowNumbers:
    """(n,) the number of the path that each row takes, -1 if it takes none."""
    found = np.full(rows, -1)
    for number, (_, some) in enumerate(walk.paths):
        found[some] = number
    return found


def _with_reasoning(column: Conversations, messages: RowNumbers) -> np.ndarray[Any, Any]:
    """Whether messages have text in a field with reasoning."""
    found = np.zeros(len(messages), bool)
    for one in column.fields:
        if one.name in REASONING and one.texts is not None:
            found |= one.texts.length[messages] > 0
    return found
