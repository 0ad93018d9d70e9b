"""Text that is not known yet: what a template is traced with.

A `Rope` stands where the template expects the text of a message. It is a list of pieces, literal text and references to
messages, and it stays one through every concatenation, so nothing the template does to joined text goes unseen.

It is deliberately **not** a `str`. A symbolic `str` subclass fails open: `"".join`, `in`, `%` and every filter written
in C would read its stand-in characters and quietly be wrong. A `Rope` fails closed: whatever is not defined here raises
`NotCompilableError` (or a TypeError, which the tracer treats alike), and rows that would do it take the reference.

Questions about unknown text (`'</think>' in content`) are put to an oracle, which answers and writes them down; see
`trace.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn, cast

from gpuload.template.program import Predicate, Ref, Segment
from gpuload.template.symbol import NotCompilableError, Oracle, Symbol, reject

__all__ = ["TEXT_METHODS", "Length", "NotCompilableError", "Oracle", "Rope", "Split", "Symbol", "join"]

TEXT_METHODS = frozenset(
    "strip lstrip rstrip startswith endswith split rsplit replace removeprefix removesuffix lower upper".split()
)
"""The methods of `str` that a template may call on unknown text."""

MOST_PARTS = 8
"""A loop over `split` is followed for so many parts; each is one more question."""


def _borders(mark: str) -> bool:
    """True where `mark` can overlap itself, so that the last occurrence depends on the side one counts from."""
    return any(mark.startswith(mark[i:]) for i in range(1, len(mark)))


class Rope(Symbol):
    """Pieces of text, some of them unknown, in order."""

    __slots__ = ("_pieces", "_size")

    def __init__(self, oracle: Oracle, pieces: Iterable[Segment]) -> None:
        merged: list[Segment] = []
        for piece in pieces:
            if isinstance(piece, str) and merged and isinstance(merged[-1], str):
                merged[-1] += piece
            elif piece != "":
                merged.append(piece)
        self._oracle = oracle
        self._pieces = tuple(merged)
        self._size = sum(len(piece) if isinstance(piece, str) else 1 for piece in merged)

    def _ask(self, ref: Ref, test: str, value: str = "") -> bool:
        return self._oracle.ask(Predicate(ref, test, value))

    def _make(self, pieces: Iterable[Segment]) -> Rope:
        return Rope(self._oracle, pieces)

    # Concatenation.

    def __add__(self, other: object) -> Rope:
        if isinstance(other, Rope):
            return self._make((*self._pieces, *other._pieces))
        # Exactly str: a Markup would escape what it is added to.
        return self._make((*self._pieces, other)) if type(other) is str else NotImplemented

    def __radd__(self, other: object) -> Rope:
        return self._make((other, *self._pieces)) if type(other) is str else NotImplemented

    # Questions.

    def __len__(self) -> NoReturn:
        reject("length of text of a message")

    def __bool__(self) -> bool:
        if any(isinstance(piece, str) for piece in self._pieces):
            return True
        return any(not self._ask(cast(Ref, piece), "empty") for piece in self._pieces)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Rope):
            if self._pieces == other._pieces:
                return True
            reject("comparison of one message's text with another's")
        if other is None or type(other) in (bool, int, float, list, dict, tuple):
            return False
        if type(other) is not str:
            reject(f"comparison of text of a message with a {type(other).__name__}")
        return self._equals(other)

    __hash__ = Symbol.__hash__

    def _equals(self, other: str) -> bool:
        pieces = list(self._pieces)
        if pieces and isinstance(pieces[0], str):
            head = cast(str, pieces.pop(0))
            if not other.startswith(head):
                return False
            other = other[len(head) :]
        if pieces and isinstance(pieces[-1], str):
            tail = cast(str, pieces.pop())
            if not other.endswith(tail):
                return False
            other = other[: len(other) - len(tail)]
        if not pieces:
            return not other
        if len(pieces) > 1:
            reject("comparison of several messages' text, joined, with a string")
        ref = cast(Ref, pieces[0])
        return self._ask(ref, "equals", other) if other else self._ask(ref, "empty")

    def __contains__(self, needle: object) -> bool:
        if type(needle) is not str:
            reject("search for something that is not a plain string in text of a message")
        if not needle:
            return True
        if any(isinstance(piece, str) and needle in piece for piece in self._pieces):
            return True
        self._reject_straddling(needle)
        return any(isinstance(piece, Ref) and self._ask(piece, "contains", needle) for piece in self._pieces)

    def _reject_straddling(self, needle: str) -> None:
        """Raise unless `needle` can only occur inside one piece.

        An occurrence across pieces crosses a first border of two pieces. Pieces alternate between literals and messages
        (or are two messages, which says nothing), so at each border a literal ends or begins: the needle, cut anywhere,
        must disagree with it.
        """
        cuts = range(1, len(needle))
        for left, right in zip(self._pieces, self._pieces[1:], strict=False):
            if isinstance(left, str):
                fits = any(left.endswith(needle[:i]) or needle[:i].endswith(left) for i in cuts)
            elif isinstance(right, str):
                fits = any(right.startswith(needle[i:]) or needle[i:].startswith(right) for i in cuts)
            else:
                fits = len(needle) > 1
            if fits:
                reject(f"search for {needle!r} that could match across joined texts")

    def startswith(self, prefix: object, *range_: object) -> bool:
        return self._at_end(prefix, range_, "startswith")

    def endswith(self, suffix: object, *range_: object) -> bool:
        return self._at_end(suffix, range_, "endswith")

    def _at_end(self, affix: object, range_: tuple[object, ...], test: str) -> bool:
        if isinstance(affix, tuple) and not range_:
            return any(self._at_end(one, (), test) for one in affix)
        if type(affix) is not str or range_:
            reject(f"{test} with something else than a plain string")
        pieces = list(self._pieces if test == "startswith" else self._pieces[::-1])
        rest = affix
        while rest:
            if not pieces:
                return False
            piece = pieces.pop(0)
            if isinstance(piece, Ref):
                if not pieces:
                    return self._ask(piece, test, rest)
                reject(f"{test} that could match across joined texts")
            if getattr(piece, test)(rest):
                return True
            if not getattr(rest, test)(piece):
                return False
            rest = rest[len(piece) :] if test == "startswith" else rest[: len(rest) - len(piece)]
        return True

    # Operations.

    def strip(self, chars: object = None) -> Rope:
        if len(self._pieces) == 1 and isinstance(self._pieces[0], Ref):
            return self._make((self._pieces[0].then("strip", *self._characters(chars)),))
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: object = None) -> Rope:
        return self._make(self._strip(list(self._pieces), chars, "lstrip"))

    def rstrip(self, chars: object = None) -> Rope:
        return self._make(self._strip(list(self._pieces[::-1]), chars, "rstrip")[::-1])

    @staticmethod
    def _characters(chars: object) -> tuple[str, ...]:
        if chars is not None and type(chars) is not str:
            reject("strip of characters that are not a plain string")
        return () if chars is None else (chars,)

    def _strip(self, pieces: list[Segment], chars: object, name: str) -> list[Segment]:
        """`pieces` (the side to strip first) without what `name` removes."""
        arguments = self._characters(chars)
        while pieces:
            piece = pieces[0]
            if isinstance(piece, str):
                pieces[0] = getattr(piece, name)(*arguments)
                if pieces[0]:
                    break
            else:
                pieces[0] = stripped = piece.then(name, *arguments)
                # Only where nothing is left of this text does stripping go on into the next.
                if len(pieces) == 1 or not self._ask(stripped, "empty"):
                    break
            pieces.pop(0)
        return pieces

    def removeprefix(self, prefix: object) -> Rope:
        return self._remove(prefix, "removeprefix")

    def removesuffix(self, suffix: object) -> Rope:
        return self._remove(suffix, "removesuffix")

    def _remove(self, affix: object, name: str) -> Rope:
        if type(affix) is not str:
            reject(f"{name} of something else than a plain string")
        end = 0 if name == "removeprefix" else -1
        pieces = list(self._pieces)
        if not pieces or not affix:
            return self
        piece = pieces[end]
        if isinstance(piece, str) and len(piece) >= len(affix):
            pieces[end] = getattr(piece, name)(affix)
        elif isinstance(piece, Ref) and len(pieces) == 1:
            pieces[end] = piece.then(name, affix)
        else:
            reject(f"{name} that could match across joined texts")
        return self._make(pieces)

    def replace(self, old: object, new: object, count: object = -1) -> Rope:
        if type(old) is not str or type(new) is not str or not old or count != -1:
            reject("replace with something else than plain strings")
        self._reject_straddling(old)
        return self._make(
            p.replace(old, new) if isinstance(p, str) else p.then("replace", old, new) for p in self._pieces
        )

    def lower(self) -> Rope:
        return self._changed_case("lower")

    def upper(self) -> Rope:
        return self._changed_case("upper")

    def _changed_case(self, name: str) -> Rope:
        # A capital sigma becomes one of two letters by what stands beside it, so joined text cannot be done piece by
        # piece.
        if len(self._pieces) > 1:
            reject(f"{name} of joined texts")
        return self._make(getattr(p, name)() if isinstance(p, str) else p.then(name) for p in self._pieces)

    def split(self, sep: object = None, maxsplit: object = -1) -> Split:
        return Split(self, sep, maxsplit, from_left=True)

    def rsplit(self, sep: object = None, maxsplit: object = -1) -> Split:
        return Split(self, sep, maxsplit, from_left=False)

    def _cut(self, mark: str, name: str) -> Rope:
        """The operations `before`, `after`, `before_last`, `after_last` of `program.py`, on joined text."""
        if name.endswith("_last") and _borders(mark):
            reject(f"split at {mark!r} from the right, which can overlap itself")
        if len(self._pieces) == 1 and isinstance(self._pieces[0], Ref):
            return self._make((self._pieces[0].then(name, mark),))
        self._reject_straddling(mark)
        order = range(len(self._pieces))
        for i in order[::-1] if name.endswith("_last") else order:
            piece = self._pieces[i]
            if mark in piece if isinstance(piece, str) else self._ask(piece, "contains", mark):
                inside: Rope = (
                    self._make((piece.then(name, mark),))
                    if isinstance(piece, Ref)
                    else _literal_cut(self, piece, mark, name)
                )
                if name.startswith("before"):
                    return self._make((*self._pieces[:i], *inside._pieces))
                return self._make((*inside._pieces, *self._pieces[i + 1 :]))
        return self

    def __getattr__(self, name: str) -> NoReturn:
        # Python itself asks for special names (`__html__`, `__copy__`), and takes this for "no".
        if name.startswith("__"):
            raise AttributeError(name)
        reject(f"{name} of text of a message")


def _literal_cut(rope: Rope, text: str, mark: str, name: str) -> Rope:
    parts = text.rsplit(mark, 1) if name.endswith("_last") else text.split(mark, 1)
    return rope._make((parts[0] if name.startswith("before") else parts[-1],))


class Split(Symbol):
    """`text.split(separator)` of unknown text: the parts at its ends, and a bounded walk over all of them."""

    __slots__ = ("_from_left", "_most", "_rope", "_separator")

    def __init__(self, rope: Rope, separator: object, most: object, *, from_left: bool) -> None:
        if type(separator) is not str or not separator:
            reject("split at white space" if separator is None else "split at something else than a plain string")
        if most not in (-1, 1):
            reject("split with a limit")
        self._oracle = rope._oracle
        self._rope, self._separator, self._most, self._from_left = rope, separator, most, from_left
        if not from_left and most == -1 and _borders(separator):
            reject(f"rsplit at {separator!r}, which can overlap itself")

    def __bool__(self) -> bool:
        return True  # `split` with a separator gives at least one part

    def __getitem__(self, index: object) -> Rope:
        if index == 0:
            return self._rope._cut(
                self._separator, "before_last" if self._most == 1 and not self._from_left else "before"
            )
        if index == -1:
            return self._rope._cut(self._separator, "after" if self._most == 1 and self._from_left else "after_last")
        if not isinstance(index, int) or index < 0:
            reject("a part of split text that is neither counted from its start nor the last")
        for i, part in enumerate(self):
            if i == index:
                return part
        reject("a part of split text that is not always there")

    def __iter__(self) -> Iterator[Rope]:
        rest = self._rope
        for _ in range(MOST_PARTS):
            if self._separator not in rest:
                yield rest
                return
            if self._most == 1:
                yield self[0]
                yield self[-1]
                return
            yield rest._cut(self._separator, "before")
            rest = rest._cut(self._separator, "after")
        reject(f"a loop over more than {MOST_PARTS} parts of split text")

    def __reversed__(self) -> Iterator[Rope]:
        yield self[-1]
        reject("a loop over split text from its end")


class Length(Symbol):
    """`text | length`: only whether it is zero can be asked."""

    __slots__ = ("_rope",)

    def __init__(self, rope: Rope) -> None:
        self._oracle, self._rope = rope._oracle, rope

    def __bool__(self) -> bool:
        return bool(self._rope)

    def __eq__(self, other: object) -> bool:
        return not self._rope if type(other) is int and other == 0 else reject("length of text of a message")

    __hash__ = Symbol.__hash__

    def __gt__(self, other: object) -> bool:
        return bool(self._rope) if type(other) is int and other == 0 else reject("length of text of a message")

    def __ge__(self, other: object) -> bool:
        return bool(self._rope) if type(other) is int and other == 1 else reject("length of text of a message")

    def __lt__(self, other: object) -> bool:
        return not self._rope if type(other) is int and other == 1 else reject("length of text of a message")

    def __le__(self, other: object) -> bool:
        return not self._rope if type(other) is int and other == 0 else reject("length of text of a message")

    def __sub__(self, other: object) -> NoReturn:
        reject("arithmetic with the length of text of a message")

    __rsub__ = __add__ = __radd__ = __floordiv__ = __truediv__ = __mod__ = __mul__ = __rmul__ = __sub__


def join(parts: Sequence[object]) -> str | Rope:
    """`"".join(parts)` where some parts may be ropes.

    Raises:
        TypeError: a part is neither a string nor a rope.
    """
    first = next((part for part in parts if isinstance(part, Rope)), None)
    if first is None:
        return "".join(cast(Sequence[str], parts))
    pieces: list[Segment] = []
    for part in parts:
        if isinstance(part, Rope):
            pieces += part._pieces
        elif isinstance(part, str):
            pieces.append(str(part))
        else:
            raise TypeError(f"cannot join a {type(part).__name__}")
    return Rope(first._oracle, pieces)
