"""Conversations by columns: where their answers are, and which rows they need.

Prompts and conversations up to each answer take paths through the compiled template (`engines/walk.py`): lists of
literals and of texts of messages. Whether P is the beginning of R, where the answer ends, and which turns begin with
which, is decided once for these paths, whatever the texts are (`decisions.py`). Only rows are written. Where texts
decide whether one is the beginning of another, they are compared then.

Everything else is made row by row (`engine.py`): texts with stop tokens or with empty thinking blocks, and paths about
which the literals do not decide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from gpuload.core.arrays import RowNumbers, offsets_of, ranges
from gpuload.engines.conversations import Conversations
from gpuload.engines.shapes import group
from gpuload.engines.walk import Walk
from gpuload.kinds.served.column_rows import Bools, ColumnTurns, beginnings, written
from gpuload.kinds.served.decisions import Decision, Family, Units, decide, family_of, thinks_nothing, units_of
from gpuload.kinds.served.reference import ServedReference
from gpuload.kinds.served.sampled import PROMPT_IDS, TOKEN_IDS
from gpuload.kinds.served.turns import NO_SWITCH, REASONING, SKIPPED, TurnWriter
from gpuload.template.compiler import FEWEST_ROWS, FREE_LEAVES, ChatProgram
from gpuload.template.program import Operation, Path, Predicate, Ref


@dataclass(eq=False)
class ColumnFinder:
    """Finds such conversations in columns. Several threads may do so at once."""

    reference: ServedReference
    writer: TurnWriter  # of the reference
    program: ChatProgram  # the template of conversations
    prompting: ChatProgram  # that of prompts
    without: ChatProgram | None  # that of prompts without thinking
    apart: Sequence[str]  # texts with one of these are looked at row by row
    cuts: Sequence[str]  # special tokens in front of which texts may be cut
    # What was decided about some paths or decisions, by their ids; and what has these ids.
    _known: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)
    _segments: dict[str | Ref, str | Ref] = field(default_factory=dict)  # each as the first one that is equal

    def find(self, column: Conversations) -> ColumnTurns | None:
        """Those of some conversations; None if there are none."""
        row, message = self._wanted(column)
        if not len(row):
            return None
        walks = [
            Walk(program, beginnings(column, row, message + more), paths_only=True)
            for program, more in ((self.prompting, 0), (self.program, 1))
        ]
        paths = [_path_of_row(walk, len(row)) for walk in walks]
        reasoned = _with_text(column, REASONING)[column.first[row] + message]
        usable, quiet, empty = self._thoughtless(column, walks, paths, row, message)
        usable &= ~(quiet & reasoned)
        skips = self.reference.missing_reasoning == "skip"
        learned = ~quiet if self.without is None or skips else np.ones(len(row), bool)
        if (some := np.flatnonzero(quiet & learned)).size and self.without is not None:
            walks.append(Walk(self.without, beginnings(column, row[some], message[some]), paths_only=True))
            paths.append(np.full(len(row), -1))
            paths[2][some] = _path_of_row(walks[2], len(some))
        kinds, of = _distinct(*paths, quiet, empty)
        decisions = [self._decided(walks, each) for each in kinds]
        usable &= ~learned | np.array([each is not None for each in decisions])[of]
        begins = np.flatnonzero(np.append(True, np.diff(row) > 0))
        counts = np.diff(begins, append=len(row))
        kept = np.logical_and.reduceat(usable, begins) & np.logical_or.reduceat(learned, begins)
        if not kept.any():
            return None
        some = np.flatnonzero(np.repeat(kept, counts) & learned)
        unlearned = np.add.reduceat(~learned, begins, dtype=np.int64)[kept]
        reasons = np.stack([np.full(len(unlearned), SKIPPED if skips else NO_SWITCH), unlearned], axis=1)
        families = partial(self._once, self._family)
        return written(column, walks[1], row[some], message[some], decisions, of[some], families, reasons)

    def _wanted(self, column: Conversations) -> tuple[RowNumbers, RowNumbers]:
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
                stops |= column.ops.contains_any(each.texts, self.apart)
        usable[row[stops[at]]] = False
        if self.reference.loss_on == "last_turn":
            asked = np.full(len(column), -1)
            np.maximum.at(asked, row[user], message[user])
            wanted = wanted & (message > asked[row])
        usable[row[wanted & (message == 0)]] = False
        wanted = wanted & usable[row]
        row, message = row[wanted], message[wanted]
        if self.reference.loss_on == "last" and len(row):
            last = np.append(np.diff(row) > 0, True)
            row, message = row[last], message[last]
        return row, message

    def _thoughtless(
        self,
        column: Conversations,
        walks: Sequence[Walk],
        paths: Sequence[RowNumbers],
        row: RowNumbers,
        message: RowNumbers,
    ) -> tuple[Bools, Bools, Bools]:
        """Answers that can be made here as far as thinking is concerned; those that are behind the prompt without; and
        those in whose thinking block is a text that is empty."""
        usable, quiet, empty = np.ones((3, len(row)), bool) & [[True], [False], [False]]
        if self.reference.missing_reasoning == "learn":
            return usable, quiet, empty
        kinds, of = _distinct(*paths)
        for number, (prompt, rendered) in enumerate(kinds):
            some = np.flatnonzero(of == number)
            found: Any = None
            if min(prompt, rendered) >= 0:
                found = self._once(self._thinks_nothing, walks[0].paths[prompt][0], walks[1].paths[rendered][0])
            if isinstance(found, tuple):
                ref, close = found
                more = (*ref.operations, Operation("lstrip"))
                at = column.first[row[some]] + ref.message
                blank, empty[some] = (
                    walks[1].column(ref.field, each).length[at] == 0 for each in (more, ref.operations)
                )
                closes = walks[1].answer(Predicate(Ref(0, ref.field, more), "startswith", close))[at]
                usable[some], quiet[some] = ~closes & (empty[some] | ~blank), empty[some]
            else:
                usable[some], quiet[some] = found is not None, bool(found)
        if quiet.any():
            mentions = np.zeros(len(column.present), bool)
            for each in column.fields:
                if each.name == "content" and each.texts is not None:
                    mentions = column.ops.contains_any(
                        each.texts, [literal for pair in self.writer.pairs for literal in pair]
                    )
            usable &= ~(quiet & mentions[column.first[row] + message])
        return usable, quiet, empty

    def _once(self, function: Callable[..., Any], *given: Any) -> Any:
        """What a function returns for some objects, which live as long as this one from now on."""
        key = (function.__name__, *map(id, given))
        if key not in self._known:
            self._kept.append(given)
            self._known[key] = function(*given)
        return self._known[key]

    def _units(self, path: Path, empty: Ref | None = None) -> Units:
        """As `units_of`; those that are equal are the same."""
        return tuple(self._segments.setdefault(unit, unit) for unit in units_of(path, empty))

    def _thinks_nothing(self, prompt: Path, rendered: Path) -> bool | tuple[Ref, str] | None:
        return thinks_nothing(self._units(prompt), self._units(rendered), self.writer.pairs)

    def _decided(self, walks: Sequence[Walk], kind: Sequence[int]) -> Decision | None:
        """A turn, by the numbers of its paths, whether it has a prompt without thinking, and an empty text there."""
        *paths, quiet, empty = kind
        if min(paths[:2]) < 0 or (quiet and (len(paths) < 3 or paths[2] < 0)):
            return None
        found = [walk.paths[number][0] for walk, number in zip(walks, paths, strict=True) if number >= 0]
        decision: Decision | None = self._once(self._decide_quiet if quiet else self._decide, *found, bool(empty))
        return decision

    def _decide(self, prompt: Path, rendered: Path, _: bool) -> Decision | None:
        return decide(self._units(prompt), self._units(rendered), self.writer.stops)

    def _decide_quiet(self, prompt: Path, rendered: Path, without: Path, empty: bool) -> Decision | None:
        found = self._once(self._thinks_nothing, prompt, rendered)
        units, quiet = self._units(rendered, found[0] if empty else None), self._units(without)
        if thinks_nothing(self._units(prompt), units, self.writer.pairs) is not True:
            return None
        return (
            decide(quiet, units, self.writer.stops, True)
            if thinks_nothing(quiet, units, self.writer.pairs) is False
            else None
        )

    def _family(self, *turns: Decision) -> Family:
        return family_of([turn.units for turn in turns], self.cuts)


def _distinct(*columns: np.ndarray[Any, Any]) -> tuple[list[tuple[int, ...]], RowNumbers]:
    """The different rows of some columns of small numbers from -1 on, and which of them each row is."""
    code = np.zeros(len(columns[0]), np.int64)
    for each in columns:
        code = code * (int(each.max()) + 2) + each + 1
    _, example, of = np.unique(code, return_index=True, return_inverse=True)
    return [tuple(int(each[at]) for each in columns) for at in example.tolist()], of


def _path_of_row(walk: Walk, rows: int) -> RowNumbers:
    """(n,) the number of the path that each row takes, -1 if it takes none."""
    found = np.full(rows, -1)
    for number, (_, some) in enumerate(walk.paths):
        found[some] = number
    return found


def _with_text(column: Conversations, names: Sequence[str]) -> Bools:
    """(m,) whether messages have text in one of some fields."""
    found = np.zeros(len(column.present), bool)
    for one in column.fields:
        if one.name in names and one.texts is not None:
            found |= one.texts.length > 0
    return found
