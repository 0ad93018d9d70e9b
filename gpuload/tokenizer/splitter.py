"""A pre-tokenizer compiled to tables: it splits a text into pre-tokens with DFAs over classes of code points.

The compiler, step by step:

1. Each split regex is parsed, and Unicode is partitioned into the classes that the regexes distinguish (`classes.py`).
2. A regex becomes a program for a virtual machine (Thompson's construction). Its instructions: take a code point of a
   class, try one branch and then the other, look ahead at a class, match.
3. A backtracking engine returns the match of the first branch that leads to one. The same match is found by running all
   branches at once, as a list of threads *ordered* by priority: a match removes all threads of lower priority, and
   those of higher priority may still replace it (Pike's virtual machine; Russ Cox, "Regular Expression Matching: the
   Virtual Machine Approach", 2009). This is called leftmost-first.
4. There are finitely many such lists, so each becomes a state of a DFA (determinization).

Look-ahead needs one change. A thread list is stored as it is *before* its instructions that take no code point (forks,
look-aheads, matches) are executed. They are executed when the class of the next code point is known. So whether a match
ends before a code point is decided one class late, while reading that code point, and look-ahead at one class
(`\\s+(?!\\S)`) is exact. The end of the text counts as one more class.

A table has about a kilobyte and the class map some tens of kilobytes, so they stay in a GPU's caches.

`restarts` finds the boundaries in a text at which a search for matches can begin without knowing the text before, so
that many threads can split one text. `tests/simulator/encoder.py` runs the tables in plain Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer import classes as code_classes
from gpuload.tokenizer.classes import ClassMap
from gpuload.tokenizer.regex import Ahead, Alternate, Atom, Concat, Node, Repeat, UnsupportedRegexError, atoms, parse
from gpuload.tokenizer.spec import Digits, Keep, Split

_MOST_STATES = 1024
_MOST_INSTRUCTIONS = 2000

DEAD = 0  # no thread is left
START = 1
MATCH_BEFORE = 0x8000  # flag of a transition: a match ends before the code point whose class was just read
STATE = 0x7FFF  # the other bits: the next state

NOWHERE, CLOSED, OPEN = range(3)  # the kinds of boundaries, see `restarts`


@dataclass(frozen=True)
class Stage:
    """One split of a pre-tokenizer.

    Attributes:
        table: (states, classes + 1) uint16; `table[state, class]` is the next state, with the flag `MATCH_BEFORE`. The
            last column is the end of the text.
        keep: which pre-tokens are kept: all, the matches, or the gaps between them.
    """

    table: npt.NDArray[np.uint16]
    keep: Keep


@dataclass(frozen=True)
class Splitter:
    """A pre-tokenizer."""

    classes: ClassMap  # maps code points to classes, for all stages
    stages: tuple[Stage, ...]  # applied in order, each within the pre-tokens of the one before


def compile_splitter(stages: Sequence[Split | Digits]) -> Splitter:
    """Compile a pre-tokenizer.

    Raises:
        UnsupportedRegexError: a pattern contains an unsupported construct; the message names it.
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
    # Merge classes whose columns are equal in all tables.
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


# Instructions. Except for forks and matches, execution continues at the next instruction.


@dataclass(frozen=True)
class _Take:
    """Takes one code point of a class."""

    atom: int


@dataclass(frozen=True)
class _Look:
    """Continues if the next code point is (`negative`: is not) of a class."""

    atom: int
    negative: bool


@dataclass(frozen=True)
class _Fork:
    """Continues at instruction `first`, and with lower priority at `second`."""

    first: int
    second: int


@dataclass(frozen=True)
class _Match:
    """Ends a match."""


_Program = list[_Take | _Look | _Fork | _Match | None]


def _program(tree: Node, used: Sequence[Atom]) -> _Program:
    """Compile a pattern to instructions (Thompson's construction). None is a place for a fork that is filled in later,
    when its targets are known."""
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
    """Determinize a program.

    Args:
        program: the instructions.
        inside: (classes, atoms) bool, whether a class is contained in an atom.

    Returns:
        (states, classes + 1) uint16, see `Stage`.
    """
    # A state is a tuple of instruction numbers, the threads in order of priority. New states are appended to `order`
    # as they are found, and each gets one row of the table.
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
    """Read one class.

    Args:
        program: the instructions.
        threads: where the threads are, highest priority first.
        member: whether each atom contains the class; None at the end of the text.

    Returns:
        The threads that continue after the class, and whether a match ends before it.
    """
    # Depth first in order of priority. An instruction that was reached before, with higher priority, is skipped.
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
                # All threads still on the stack have lower priority than this match and are dropped. Those already in
                # `following` have higher priority: they continue, and may find a match that replaces this one.
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


def leaves_gaps(stage: Stage, classes: ClassMap) -> bool:
    """Return whether some text has code points that are in no match.

    Args:
        stage: one of a splitter.
        classes: the splitter's.
    """
    pages = np.delete(classes.pages, np.s_[0xD8:0xE0])  # no text contains surrogates
    used = np.unique(classes.blocks[np.unique(pages)]).tolist()
    # All states that can be reached before a match is found. If none of them fails, every search finds a match.
    states, waiting = {START}, [START]
    while waiting:
        state = waiting.pop()
        for column in used if state == START else [*used, -1]:  # a search reads at least one code point
            step = int(stage.table[state, column])
            following = step & STATE
            if step & MATCH_BEFORE:
                continue
            if following == DEAD:
                return True
            if following not in states:
                states.add(following)
                waiting.append(following)
    return False


def restarts(stage: Stage) -> npt.NDArray[np.uint8]:
    """Find the boundaries at which the search for a match begins again, whatever text came before.

    A splitter goes through a text match by match, so in general a thread cannot begin in the middle. But between some
    classes no match can continue: no match of Qwen2.5's regex has a space after a letter. A thread that begins there
    finds exactly the matches that a thread from the start of the text would find.

    Let a and b be the classes of two neighbouring code points. After a, a match in progress is in one of the states
    that some reachable state enters on a. The boundary between a and b is

    - CLOSED: from each of these states, b leads to a match before b, and no thread continues. The start state is one of
      those that continue on a, so there always is a match in progress after a, and it ends here.
    - OPEN: there are no such states. So a is in no match at all but in a gap, and the gap continues at b unless a match
      begins there.
    - NOWHERE: neither holds; no thread may begin here.

    Returns:
        (classes, classes) uint8, the kind of boundary, indexed by a and b.
    """
    following, ends = stage.table[:, :-1] & STATE, stage.table[:, :-1] & MATCH_BEFORE != 0
    states, count = following.shape
    # All states that a text can lead to, as a fixed point.
    reachable = np.zeros(states, np.bool_)
    reachable[START] = True
    while True:
        wider = reachable.copy()
        wider[following[reachable]] = True
        wider[DEAD] = False
        if (wider == reachable).all():
            break
        reachable = wider
    over = (following == DEAD) & ends  # [state, b]: the match ends before b, and no thread continues
    found = np.full((count, count), NOWHERE, np.uint8)
    for a in range(count):
        after = np.unique(following[reachable, a])
        after = after[after != DEAD]
        if not len(after):
            found[a] = OPEN
        elif following[START, a] != DEAD:
            found[a, over[after].all(axis=0)] = CLOSED
    return found
