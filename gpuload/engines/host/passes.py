"""Conversations of any shape by columns: all rows walk through the automaton of a template together.

Rows of one shape share a tree (`walk.py`). Where nearly every row has another shape, what they share is the automaton
(`template/automaton/nodes.py`): the pass of a loop for one message is mostly a pass that other rows take, too.

    1. all rows begin at node 0
    2. rows at one node answer its question together, and part where the answers differ: a question about texts is
       asked of all messages of the column at once, and its answers are looked up
    3. rows meet again where passes begin, so that a column takes as many steps as its longest row has passes, times
       what a pass asks; for few rows they do not pay

Rows come out with what they print, segment by segment. Those that reach a node where no row has been, take two passes
that were not compared one after the other, or need more than numbers and texts of messages, are for `RowRenderer`,
which goes through the same automaton row by row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuload.engines.conversations import EMPTY, NULL, OTHER, TEXTS
from gpuload.engines.host.learned import learned_in_blocks, learned_in_texts
from gpuload.engines.host.texts import Bools, Ints, characters
from gpuload.engines.walk import Printed, PrintedSegments, Source, Walk
from gpuload.template.automaton.nodes import Affine, Automaton, Place, TextSource
from gpuload.template.automaton.rows import BEGIN, END, REASONING
from gpuload.template.program import Operation, Predicate, Ref, holds
from gpuload.template.turns import Turns

Answer = str | npt.NDArray[Any]

FEWEST_TOGETHER = 16
"""A step takes about as long for so many rows as for one, and as one row takes by itself."""


class _AloneError(Exception):
    """A node needs something that is no number, and no text of a message."""


@dataclass(eq=False)
class _Texts:
    """A register that has a text of each row: of which message, -1 for the empty text, and which of the sources."""

    messages: Ints
    sources: Ints


class TogetherWalk:
    """A column of conversations on its way through an automaton.

    Args:
        automaton: of the template; another thread may add to it meanwhile.
        seen: pairs of nodes at which passes end, one after the other, in rows that were compared with transformers.
        walk: of n conversations.
    """

    def __init__(self, automaton: Automaton, seen: set[tuple[int, int]], walk: Walk) -> None:
        # Nodes that come later are as if no row had been there: rows do not wait for each other at their heads, and
        # would part again and again.
        self._nodes, self._known = automaton.nodes, len(automaton.nodes)
        self._heads, self._seen = set(automaton.heads.values()), seen
        self._walk, self._column = walk, walk.prompts
        self._answers = walk.program.answers
        self._blocks = self._answers is not None and self._answers.turns is None
        self._kinds: dict[str, Ints] = {one.name: one.kind for one in self._column.fields}
        self._numbers: dict[Any, Ints] = {}
        self._texts: dict[Any, _Texts] = {}
        self._sources: dict[Source, int] = {}
        self._characters: dict[Source, Ints] = {}
        self._fresh = np.zeros(len(self._column), bool)  # rows with two passes that were not seen one after the other
        self._last = np.full(len(self._column), BEGIN)
        self._count = np.zeros(len(self._column), np.int64)
        self._parts: list[PrintedSegments] = []
        self._done: list[Ints] = []
        self._rejected: dict[int, str] = {}
        self._unknown: list[Ints] = []
        self._others: list[Ints] = []

    def of(self, rows: Ints) -> Printed:
        """What some rows print, all of whose messages have texts as contents.

        Args:
            rows: (k,) their numbers, ascending.
        """
        renamed = self._with_reasoning(rows)
        self._others.append(rows[renamed])
        waiting = {0: [rows[~renamed]]}
        while waiting:
            head = next(iter(waiting))  # the one at which rows have been for longest
            together = np.concatenate(waiting.pop(head))
            if len(together) < FEWEST_TOGETHER:
                self._others.append(together)
                continue
            steps = self._step(head, together)
            while steps:
                number, some = steps.pop()
                if not len(some):
                    continue
                if number in self._heads:
                    waiting.setdefault(number, []).append(some)
                else:
                    steps += self._step(number, some)
        whole = np.zeros(len(self._count), bool)
        whole[_all(self._done)] = True
        parts = [each.of(whole[each.rows]) for each in self._parts]
        printed = Printed(
            np.where(whole, self._count, 0), parts, self._rejected, _all(self._unknown), _all(self._others)
        )
        return printed if self._answers is None else self._with_answers(printed, self._answers.turns)

    def _with_answers(self, printed: Printed, turns: Turns | None) -> Printed:
        """The same with what has loss, without the rows of which that is not known."""
        if turns is None:
            learned, others = learned_in_blocks(printed.parts, printed.count)
        else:
            learned, others = learned_in_texts(turns, self._walk, printed.parts, printed.count)
        printed.count[others] = 0
        parts = [each.of(printed.count[each.rows] > 0) for each in printed.parts]
        return replace(printed, parts=parts, others=_all([printed.others, others]), learned=learned)

    def _with_reasoning(self, rows: Ints) -> Bools:
        """(k,) bool: rows with reasoning, which the template sees under several names."""
        found = np.zeros(len(self._column.present) + 1, np.int64)
        for name in REASONING & self._kinds.keys():
            found[1:] += self._kinds[name] != NULL
        before, first = np.cumsum(found), self._column.first[rows]
        return np.asarray(before[first + self._column.count[rows]] > before[first])

    def _step(self, number: int, rows: Ints) -> list[tuple[int, Ints]]:
        """Does what a node says for some rows; returns where they go on."""
        node = self._nodes[number]
        if node.instruction is None or number >= self._known:
            self._unknown.append(rows)
            return []
        name, *parts = node.instruction
        try:
            match name:
                case "emit":
                    source, operations, loss = parts
                    loss = loss if self._blocks else ""
                    while (
                        isinstance(source, str)
                        and not loss
                        and (more := self._literal(node.next.get(None))) is not None
                    ):
                        source, node = source + more, self._nodes[node.next[None]]
                    rows = self._emit(source, operations, loss, rows)
                case "enter":
                    self._register(parts[0])[rows] = -1
                case "save":
                    self._save(parts[0], rows)
                    self._pass_to(number, rows)
                case "end":
                    self._pass_to(END, rows)
                    self._unknown.append(rows[self._fresh[rows]])
                    self._done.append(rows[~self._fresh[rows]])
                    return []
                case "raise":
                    self._rejected.update(dict.fromkeys(rows.tolist(), parts[0]))
                    return []
                case _:
                    return self._parted(node.next, *self._answered(name, parts, rows))
        except _AloneError:
            self._others.append(rows)
            return []
        if None not in node.next:  # another thread is about to add it
            self._unknown.append(rows)
            return []
        return [(node.next[None], rows)]

    def _literal(self, number: int | None) -> str | None:
        """What a node prints, if it is a literal outside of generation blocks, and no pass begins there."""
        if number is None or number >= self._known or number in self._heads:
            return None
        match self._nodes[number].instruction:
            case ("emit", str() as literal, _, loss) if not (loss and self._blocks):
                return literal
        return None

    def _parted(self, following: Mapping[Any, int], rows: Ints, answers: Answer) -> list[tuple[int, Ints]]:
        """Where rows go on by their answers."""
        steps = []
        for answer, number in list(following.items()):
            if isinstance(answers, str):
                if answers == answer:
                    return [(number, rows)]
                continue
            here = answers == answer
            steps.append((number, rows[here]))
            rows, answers = rows[~here], answers[~here]
        self._unknown.append(rows)
        return steps

    def _answered(self, name: str, parts: Sequence[Any], rows: Ints) -> tuple[Ints, Answer]:
        """Rows that can answer a question, and their answers, or the one of all; the others are put aside."""
        if name == "kind":
            return self._kind(parts[0], rows)
        if name == "ask":
            return self._question(parts[0], rows)
        if name == "compare":
            number = self._number(parts[1], rows)
            return rows, number < 0 if parts[0] == "<" else number == 0
        if name == "next":
            counter = self._register(parts[0])
            more = counter[rows] + 1 < self._number(parts[1], rows)
            counter[rows[more]] += 1
            return rows, more
        raise _AloneError

    def _kind(self, place: Place, rows: Ints) -> tuple[Ints, Answer]:
        if place == ("messages",):
            return rows, "list"
        rows, messages = self._messages(place, rows)
        if len(place) == 2:
            return rows, "mapping"
        if len(place) > 3 or not isinstance(place[2], str):
            raise _AloneError
        if (kinds := self._kinds.get(place[2])) is None or not len(rows):
            return rows, "missing"
        found = kinds[messages]
        if (found == found[0]).all() and found[0] in _KINDS:
            return rows, _KINDS[int(found[0])]
        plain = found != OTHER
        self._others.append(rows[~plain])
        return rows[plain], _WORDS[found[plain]]

    def _question(self, predicate: Predicate, rows: Ints) -> tuple[Ints, Answer]:
        source, operations = predicate.ref.message, predicate.ref.operations
        assert isinstance(source, TextSource)
        if source.kind == "register" and not operations:
            answers = np.full(len(rows), holds(Predicate(Ref(0), predicate.test, predicate.value), ""))
            for (field, done), here, messages in self._registered(source.value, rows):
                found = self._walk.answer(Predicate(Ref(0, field, done), predicate.test, predicate.value))
                answers[here] = found[messages]
            return rows, answers
        rows, messages, (field, operations) = self._text(source, operations, rows)
        return rows, self._walk.answer(Predicate(Ref(0, field, operations), predicate.test, predicate.value))[messages]

    def _emit(self, source: Any, operations: tuple[Operation, ...], loss: str, rows: Ints) -> Ints:
        """Prints a text; returns the rows that could."""
        if isinstance(source, str):
            self._print(rows, source, np.empty(0, np.int64), loss)
            return rows
        if source.kind != "register":
            rows, messages, found = self._text(source, operations, rows)
            self._print(rows, found, messages, loss)
            return rows
        if operations or loss:
            raise _AloneError
        for found, here, messages in self._registered(source.value, rows):
            self._print(rows[here], found, messages, loss)
        return rows

    def _print(self, rows: Ints, source: str | Source, messages: Ints, loss: str) -> None:
        place = self._count[rows]
        self._parts.append(PrintedSegments(rows, place, source, messages, loss))
        self._count[rows] = place + 1

    def _save(self, values: Sequence[tuple[Any, Any]], rows: Ints) -> None:
        """Sets registers, all at once."""
        made: list[tuple[Any, Any]] = []
        for name, value in values:
            if isinstance(value, Affine):
                made.append((self._register(name), self._number(value, rows)))
                continue
            texts = self._texts.setdefault(name, _Texts(*(np.zeros((2, len(self._count)), np.int64))))
            if not isinstance(value, tuple) or len(value) > 1:
                raise _AloneError
            if not value:
                made.append((texts.messages, -1))
                continue
            ((source, operations),) = value
            if not isinstance(source, TextSource):
                raise _AloneError
            if source.kind == "register" and not operations:
                other = self._texts_in(source.value)
                made += [(texts.messages, other.messages[rows]), (texts.sources, other.sources[rows])]
                continue
            kept, messages, found = self._text(source, operations, rows)
            if len(kept) < len(rows):
                raise _AloneError
            made += [(texts.messages, messages), (texts.sources, self._sources.setdefault(found, len(self._sources)))]
        for register, found_values in made:
            register[rows] = found_values

    def _pass_to(self, number: int, rows: Ints) -> None:
        """A pass of some rows ends at a node."""
        last = self._last[rows]
        for before in np.unique(last).tolist():
            if (before, number) not in self._seen:
                self._fresh[rows[last == before]] = True
        self._last[rows] = number

    # -- values of rows ----------------------------------------------------------------------------------------------

    def _register(self, name: Any) -> Ints:
        if name not in self._numbers:
            self._numbers[name] = np.zeros(len(self._count), np.int64)
        return self._numbers[name]

    def _registered(self, name: Any, rows: Ints) -> list[tuple[Source, Bools, Ints]]:
        """The texts that a register has of some rows, those that are not empty: by source, which rows, and of which
        messages."""
        texts = self._texts_in(name)
        messages, sources = texts.messages[rows], texts.sources[rows]
        found = [(source, (messages >= 0) & (sources == number)) for source, number in self._sources.items()]
        return [(source, here, messages[here]) for source, here in found if here.any()]

    def _texts_in(self, name: Any) -> _Texts:
        if name not in self._texts:
            raise _AloneError
        return self._texts[name]

    def _number(self, number: Affine, rows: Ints) -> Ints:
        """(k,) a number of each row."""
        total = np.full(len(rows), number.constant)
        for atom, times in number.terms:
            total += times * self._atom(atom, rows)
        return total

    def _atom(self, atom: Any, rows: Ints) -> Ints:
        match atom:
            case ("register", name) if name in self._numbers:
                return self._numbers[name][rows]
            case ("length", ("messages",)):
                return np.asarray(self._column.count[rows])
            case ("length", place) if 2 <= len(place) <= 3:
                return self._length(place, rows)
            case ("characters", source, operations):
                kept, messages, found = self._text(source, operations, rows)
                if len(kept) == len(rows):
                    return self._characters_of(found)[messages]
            case ("mod", number, divisor):
                return self._number(number, rows) % int(divisor)
            case ("div", number, divisor):
                return self._number(number, rows) // int(divisor)
        raise _AloneError

    def _length(self, place: Place, rows: Ints) -> Ints:
        """(k,) the length of what is at a place: the keys of a message, the characters of a text, or an empty list."""
        kept, messages = self._messages(place, rows)
        if len(kept) < len(rows):
            raise _AloneError
        if len(place) == 2:
            present = [kinds[messages] != NULL for kinds in self._kinds.values()]
            return np.asarray(np.sum(present, axis=0, dtype=np.int64))
        if (kinds := self._kinds.get(place[2])) is None:
            raise _AloneError
        if (kinds[messages] == EMPTY).all():
            return np.zeros(len(rows), np.int64)
        if (kinds[messages] == TEXTS).all():
            return self._characters_of((place[2], ()))[messages]
        raise _AloneError

    def _characters_of(self, source: Source) -> Ints:
        """(m,) how many characters the texts of all messages have."""
        if source not in self._characters:
            self._characters[source] = characters(self._walk.column(*source))
        return self._characters[source]

    def _messages(self, place: Place, rows: Ints) -> tuple[Ints, Ints]:
        """Rows that have a message at a place, and its number among all messages; the others are put aside."""
        if len(place) < 2 or place[0] != "messages" or not isinstance(place[1], Affine):
            raise _AloneError
        numbers = self._number(place[1], rows)
        there = (numbers >= 0) & (numbers < self._column.count[rows])
        if not there.all():
            self._others.append(rows[~there])
            rows, numbers = rows[there], numbers[there]
        return rows, self._column.first[rows] + numbers

    def _text(self, source: TextSource, operations: tuple[Operation, ...], rows: Ints) -> tuple[Ints, Ints, Source]:
        """Rows that have a text at a place, the number of its message, and which text of it."""
        if source.kind != "at" or len(source.value) != 3:
            raise _AloneError
        if (field := source.value[2]) not in self._kinds:
            raise _AloneError
        rows, messages = self._messages(source.value, rows)
        text = self._kinds[field][messages] == TEXTS
        if not text.all():
            self._others.append(rows[~text])
            rows, messages = rows[text], messages[text]
        return rows, messages, (field, operations)


_KINDS = {NULL: "missing", TEXTS: "text", EMPTY: "list"}  # what `kind_of` calls them
_WORDS = np.array([_KINDS[each] for each in (NULL, TEXTS, EMPTY)])


def _all(rows: Sequence[Ints]) -> Ints:
    return np.unique(np.concatenate([np.empty(0, np.int64), *rows]))
