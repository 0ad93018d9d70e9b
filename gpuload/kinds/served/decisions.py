"""Where answers are, and which rows a conversation needs, decided on paths through the template: once for all texts.

A path is a list of literals and of texts of messages (`template/program.py`). Where its literals do not decide, nothing
is said here about the turn, and its conversation is made by itself.
"""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from gpuload.core.arrays import common_prefix
from gpuload.kinds.served.turns import REASONING
from gpuload.template.program import Path, Ref

Units = tuple[str | Ref, ...]
"""The segments of a path, without literals next to each other."""

Place = tuple[int, int]
"""A unit, and a character in it if it is a literal."""

_STRIPS = ("strip", "lstrip", "rstrip")


class Decision(NamedTuple):
    """A turn, for all conversations that take some paths."""

    units: Units  # P + A
    begin: Place  # of A, a unit and bytes in it
    prompt_end: str  # the literal at the end of P
    reasons: bool  # whether a field with reasoning is in A
    quiet: bool  # whether P is the prompt without thinking


class TextFork(NamedTuple):
    """What distinguishes a turn from a row that it is not in, if the texts do."""

    turn: int
    row: int
    place: Place  # the first unit, and the bytes in it, from which on texts decide


class Family(NamedTuple):
    """The rows of all conversations with some turns."""

    rows: tuple[int, ...]  # the turn that each ends with, ascending
    row_of: tuple[int, ...]  # the row in which each turn is learned
    forks: tuple[TextFork, ...]  # what has to be looked up in texts
    # Of each row, the last place in what it has in common with the row before where texts may be cut, as a unit and
    # bytes in it
    shared: tuple[Place, ...]


def units_of(path: Path, empty: Ref | None = None) -> Units:
    """The segments of a path without a text that is known to be empty."""
    units: list[str | Ref] = []
    for segment in path.segments:
        if isinstance(segment, str) and units and isinstance(units[-1], str):
            units[-1] += segment
        elif segment not in ("", empty):
            units.append(segment)
    return tuple(units)


def compared(head: Units, units: Units) -> tuple[bool | None, Place]:
    """Whether some units begin with others, and where these end or where both differ first. None: texts decide."""
    for number, (one, other) in enumerate(zip(head, units, strict=False)):
        if one is other or one == other:  # texts of messages that are equal are mostly the same
            continue
        if not isinstance(one, str) or not isinstance(other, str):
            return None, (number, 0)
        size = common_prefix(one, other)
        if size == len(one) and number == len(head) - 1:
            return True, (number, size)
        ends = size == len(other) and number == len(units) - 1
        return (False if ends or size < min(len(one), len(other)) else None), (number, size)
    if len(head) > len(units):
        longer = any(isinstance(unit, str) for unit in head[len(units) :])
        return (False if longer else None), (len(units), 0)
    last = head[-1] if head else None
    return True, ((len(head) - 1, len(last)) if isinstance(last, str) else (len(head), 0))


def thinks_nothing(prompt: Units, rendered: Units, pairs: Sequence[tuple[str, str]]) -> bool | tuple[Ref, str] | None:
    """Whether an answer has, or closes, a thinking block with nothing in it, as `TurnWriter` sees it; by P, R and pairs
    of literals that open and close reasoning.

    Returns:
        A text and a literal if that is so where the text is empty, and not so where it has more than white space and
        does not begin with the literal. None: unknown.
    """
    begins, (unit, at) = compared(prompt, rendered)
    end = prompt[-1].rstrip() if prompt and isinstance(prompt[-1], str) else ""
    if not begins or not end or unit >= len(rendered):
        return None
    first = rendered[unit]
    rest = _stripped((first[at:] if isinstance(first, str) else first, *rendered[unit + 1 :]))
    for literal, close in pairs:
        inside = rest if end.endswith(literal) else None
        if inside is None and literal.endswith(end):
            return None
        if inside is None and rest and isinstance(rest[0], str):
            if rest[0].startswith(literal):
                inside = _stripped((rest[0][len(literal) :], *rest[1:]))
            elif literal.startswith(rest[0]):
                return None
        match inside:
            case None:
                continue
            case (str() as text, *_):
                return True if text.startswith(close) else None if close.startswith(text) else False
            case (Ref() as ref, str() as text, *_) if text[0].isspace():
                return ref, close
        return None
    return False


def _stripped(units: Units) -> Units:
    """Units without white space at the beginning."""
    if not isinstance(units[0], str):
        return units
    first = units[0].lstrip()
    return (first, *units[1:]) if first else units[1:]


def decide(prompt: Units, rendered: Units, stops: re.Pattern[str], quiet: bool = False) -> Decision | None:
    """A turn, by P and R."""
    begins, begin = compared(prompt, rendered)
    if not begins or not isinstance(prompt[-1], str):
        return None
    for number in range(begin[0], len(rendered)):
        literal = rendered[number]
        if isinstance(literal, str) and (found := stops.search(literal, begin[1] if number == begin[0] else 0)):
            units = (*rendered[:number], literal[: found.end()])
            reasons = any(
                isinstance(each, Ref)
                and each.field in REASONING
                and all(done.name in _STRIPS and not "".join(done.arguments).strip() for done in each.operations)
                for each in rendered[begin[0] : number]
            )
            return Decision(units, (begin[0], bytes_before(rendered, begin)), prompt[-1], reasons, quiet)
    return None


def family_of(turns: Sequence[Units], cuts: Sequence[str] = ()) -> Family:
    """The rows of some turns, each of which ends with a literal: those that no other one begins with, of equal ones the
    first. Texts may be cut in front of `cuts`, which are special tokens."""
    rows: list[int] = []
    for turn in reversed(range(len(turns))):
        begun = [row for row in rows if compared(turns[turn], turns[row])[0]]
        if all(compared(turns[row], turns[turn])[0] for row in begun):
            rows = [turn, *(row for row in rows if not compared(turns[row], turns[turn])[0])]
    rows.sort()
    row_of, forks = [], []
    for turn, units in enumerate(turns):
        found = [(True, (0, 0)) if row == turn else compared(units, turns[row]) for row in rows]
        row_of.append([begins for begins, _ in found].index(True))
        forks += [
            TextFork(turn, number, (place[0], bytes_before(units, place)))
            for number, (begins, place) in enumerate(found)
            if begins is None and not (turn in rows and rows[number] < turn)  # looked up for the other one
        ]
    shared = [shared_place(turns[one], turns[other], cuts) for one, other in itertools.pairwise(rows)]
    return Family(tuple(rows), tuple(row_of), tuple(forks), ((0, 0), *shared))


def shared_place(one: Units, other: Units, cuts: Sequence[str]) -> Place:
    """The last place in what two rows begin with that is in front of one of some tokens, as a unit and bytes in it."""
    _, (last, size) = compared(one, other)
    for number in reversed(range(min(last + 1, len(one)))):
        literal = one[number]
        if isinstance(literal, str):
            end = size if number == last else len(literal)
            at = max((literal.rfind(token, 0, end) for token in cuts), default=-1)
            if at >= 0:
                return number, bytes_before(one, (number, at))
    return 0, 0


def bytes_before(units: Units, place: Place) -> int:
    """The bytes of a literal before a place in it; 0 for a text."""
    unit = units[place[0]] if place[0] < len(units) else ""
    return len(unit[: place[1]].encode()) if isinstance(unit, str) else 0
