"""A pre-tokenizer compiled to tables: text → pieces, by a DFA over classes of code points.

1. The regex becomes a program of a few instructions (Thompson's construction): take a class, try this before that, look
   ahead at a class, match.
2. A backtracking engine takes the first way through the program that leads to a match. The same is had by following all
   ways at once as an *ordered* list of threads, where a match cuts off every thread behind it (Pike's virtual machine;
   Russ Cox, "Regular Expression Matching: the Virtual Machine Approach", 2009).
3. Those lists are finite in number, so they become the states of a DFA. A list is kept as it is *before* the empty
   steps of its threads are followed; they are followed when the next class is known, which makes look-ahead at one
   class exact: whether a match ends before a code point is decided as that code point is read.

A table is a kilobyte or so and the map of code points to classes some tens of them: both fit into a GPU's shared
memory. `pieces` below runs the tables in plain Python and is the definition that kernels are tested against.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer import classes as code_classes
from gpuload.tokenizer.classes import ClassMap
from gpuload.tokenizer.regex import (
    Ahead,
    Alternate,
    Atom,
    Concat,
    Node,
    Repeat,
    UnsupportedRegexError,
    atoms,
    parse,
)
from gpuload.tokenizer.spec import Digits, Keep, Split

_MOST_STATES = 1024
_MOST_INSTRUCTIONS = 2000

DEAD = 0
START = 1
MATCH_BEFORE = 0x8000  # the match ends before the code point whose class was just read
STATE = 0x7FFF


@dataclass(frozen=True)
class Stage:
    """One split.

    Attributes:
        table: (states, classes + 1) uint16; `table[state, class]` is the next state, plus MATCH_BEFORE. The last
            column is the end of the text. State 0 is dead, 1 the start.
        keep: which pieces stay.
    """

    table: npt.NDArray[np.uint16]
    keep: Keep


@dataclass(frozen=True)
class Splitter:
    """A pre-tokenizer: stages over one map of classes, each within the pieces of the stage before."""

    classes: ClassMap
    stages: tuple[Stage, ...]

    @property
    def nbytes(self) -> int:
        return self.classes.nbytes + sum(stage.table.nbytes for stage in self.stages)


def compile_splitter(stages: Sequence[Split | Digits]) -> Splitter:
    """The tables of a pre-tokenizer.

    Raises:
        UnsupportedRegexError: a pattern uses a construct that is not taken; the message names it.
    """
    trees: list[Node] = []
    for stage in stages:
        if isinstance(stage, Digits):
            trees.append(code_classes.NUMERIC if stage.individual else Repeat(code_classes.NUMERIC, 1, None, False))
        else:
            trees.append(parse(stage.pattern))
            code_classes.check_folding(trees[-1])
    used = list(dict.fromkeys(atom for tree in trees for atom in atoms(tree)))
    numbers, inside = code_classes.partition(used)
    tables = [_determinize(_program(tree, used), inside) for tree in trees]
    # Classes that no table tells apart are one.
    columns = np.concatenate([table[:, :-1] for table in tables]) if tables else np.zeros((1, 1), np.uint16)
    _, first, merged = np.unique(columns, axis=1, return_index=True, return_inverse=True)
    tables = [np.concatenate([table[:, first], table[:, -1:]], axis=1) for table in tables]
    return Splitter(
        ClassMap.from_classes(merged.reshape(-1).astype(np.uint8)[numbers]),
        tuple(
            Stage(np.ascontiguousarray(table), stage.keep if isinstance(stage, Split) else "all")
            for table, stage in zip(tables, stages, strict=True)
        ),
    )


@dataclass(frozen=True)
class _Take:
    atom: int


@dataclass(frozen=True)
class _Look:
    atom: int
    negative: bool


@dataclass(frozen=True)
class _Fork:
    """Tries `first`, then `second`."""

    first: int
    second: int


@dataclass(frozen=True)
class _Match:
    pass


_Program = list[_Take | _Look | _Fork | _Match | None]


def _program(tree: Node, used: Sequence[Atom]) -> _Program:
    """Instructions; each goes on to the next, and a fork to where it says."""
    program: _Program = []

    def emit(node: Node) -> None:
        if len(program) > _MOST_INSTRUCTIONS:
            raise UnsupportedRegexError(f"a pattern of more than {_MOST_INSTRUCTIONS:,} instructions")
        match node:
            case Atom():
                program.append(_Take(used.index(node)))
            case Ahead(atom, negative):
                program.append(_Look(used.index(atom), negative))
            case Concat(parts):
                for part in parts:
                    emit(part)
            case Alternate(options):
                exits = []
                for option in options[:-1]:
                    fork = len(program)
                    program.append(None)
                    emit(option)
                    exits.append(len(program))
                    program.append(None)
                    program[fork] = _Fork(fork + 1, len(program))
                emit(options[-1])
                for place in exits:
                    program[place] = _Fork(len(program), len(program))
            case Repeat(body, least, most, lazy):
                for _ in range(least):
                    emit(body)
                if most is None:
                    fork = len(program)
                    program.append(None)
                    emit(body)
                    program.append(_Fork(fork, fork))
                    program[fork] = _fork(fork + 1, len(program), lazy)
                else:
                    forks = []
                    for _ in range(most - least):
                        forks.append(len(program))
                        program.append(None)
                        emit(body)
                    for fork in forks:
                        program[fork] = _fork(fork + 1, len(program), lazy)

    emit(tree)
    program.append(_Match())
    return program


def _fork(inside: int, after: int, lazy: bool) -> _Fork:
    return _Fork(after, inside) if lazy else _Fork(inside, after)


def _determinize(program: _Program, inside: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint16]:
    """(states, classes + 1) uint16, see `Stage`."""
    member = inside.tolist()
    end = len(member)
    states: dict[tuple[int, ...], int] = {(): DEAD, (0,): START}
    order = list(states)
    rows: list[list[int]] = []
    while len(rows) < len(order):
        row = []
        for number in range(end + 1):
            following, matched = _step(program, order[len(rows)], member[number] if number < end else None)
            if following not in states:
                states[following] = len(order)
                order.append(following)
            row.append(states[following] | (MATCH_BEFORE if matched else 0))
        rows.append(row)
        if len(order) > _MOST_STATES:
            raise UnsupportedRegexError(f"a pattern of more than {_MOST_STATES:,} states")
    return np.array(rows, np.uint16)


def _step(program: _Program, threads: tuple[int, ...], member: list[bool] | None) -> tuple[tuple[int, ...], bool]:
    """Reads one class (None is the end of the text): the threads that go on, and whether a match ends before it.

    Every thread behind the match has lower priority than it and is cut; those before it go on and may yet win.
    """
    following: dict[int, None] = {}
    seen: set[int] = set()
    stack = list(reversed(threads))
    while stack:
        place = stack.pop()
        if place in seen:
            continue
        seen.add(place)
        match program[place]:
            case _Match():
                return tuple(following), True
            case _Fork(first, second):
                stack += [second, first]
            case _Look(atom, negative):
                if (member is not None and member[atom]) != negative:
                    stack.append(place + 1)
            case _Take(atom):
                if member is not None and member[atom]:
                    following[place + 1] = None
    return tuple(following), False


def pieces(splitter: Splitter, text: str) -> list[tuple[int, int]]:
    """The pieces of a text as (start, end) in code points, in order; the definition of what a kernel must find."""
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    classes = splitter.classes.of(code_points).tolist()
    found = [(0, len(text))] if text else []
    for stage in splitter.stages:
        table = stage.table.tolist()
        found = [piece for start, end in found for piece in _split(table, stage.keep, classes, start, end)]
    return found


def _split(table: list[list[int]], keep: Keep, classes: list[int], start: int, end: int) -> list[tuple[int, int]]:
    """One stage within one piece. A code point at which no match begins belongs to a gap."""
    found = []
    gap = place = start
    after_last = len(table[0]) - 1
    while place < end:
        state, at, matched = START, place, -1
        while state != DEAD:
            step = table[state][classes[at] if at < end else after_last]
            if step & MATCH_BEFORE:
                matched = at
            state = step & STATE
            at += 1
        if matched < 0:
            place += 1
            continue
        if gap < place and keep != "matches":
            found.append((gap, place))
        if keep != "gaps":
            found.append((place, matched))
        gap = place = matched
    if gap < end and keep != "matches":
        found.append((gap, end))
    return found
