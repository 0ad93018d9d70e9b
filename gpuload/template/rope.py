"""`Rope`: a symbolic string, passed to the template in place of a message's text.

A rope is a list of segments: literal strings and `Ref`s, which name the text of one message and the operations applied
to it. Concatenation gives a longer rope, `strip` and the like append an operation to a `Ref`, so the tracer sees
everything that the template does to joined text. After rendering, the segments of the output are the compiled path.

Where the template needs to know something about a text (`'</think>' in content`), the rope asks its oracle, which
answers for the traced row and records predicate and answer; see `trace.py`.

A rope is deliberately **not** a `str`. With a `str` subclass that holds a placeholder, `"".join`, `in`, `%` and every
filter written in C would read the placeholder's characters and silently give a wrong result. With a `Rope`, whatever is
not defined here raises `NotCompilableError` (or a TypeError, with the same effect), and rows on that path are rendered
by transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partialmethod
from typing import NoReturn, cast

from gpuload.template.program import Operation, Predicate, Ref, Segment, apply_operations
from gpuload.template.symbol import Oracle, Symbol, reject

TEXT_METHODS = frozenset(
    "strip lstrip rstrip startswith endswith split rsplit replace removeprefix removesuffix lower upper".split()
)
"""The methods of `str` that a template may call on a rope."""

MOST_PIECES = 1 << 16
"""Maximum number of segments of a rope. Conversations of a thousand messages have some thousand."""

MOST_PARTS = 8
"""Maximum number of parts of a `split` that a loop may visit. Each part costs one more predicate."""


def _overlaps_itself(mark: str) -> bool:
    """Whether two occurrences of `mark` can overlap.

    If so, occurrences counted from the left and from the right differ: "aaa" has "aa" at 0 from the left, at 1 from the
    right.
    """
    return any(mark.startswith(mark[i:]) for i in range(1, len(mark)))


class Rope(Symbol):
    """A concatenation of literal strings and texts of messages; an oracle answers predicates on the texts.

    Neighbouring literals are merged and empty ones removed, so literals and `Ref`s alternate except where two `Ref`s
    are neighbours.
    """

    __slots__ = ("_pieces", "_size")

    def __init__(self, oracle: Oracle, pieces: Iterable[Segment]) -> None:
        merged: list[Segment] = []
        for piece in pieces:
            if isinstance(piece, str) and merged and isinstance(merged[-1], str):
                merged[-1] += piece
            elif piece != "":
                merged.append(piece)
        if len(merged) > MOST_PIECES:
            reject(f"joins more than {MOST_PIECES:,} texts")
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
        # Exactly str: Jinja's Markup, a subclass, would HTML-escape the text it is added to.
        return self._make((*self._pieces, other)) if type(other) is str else NotImplemented

    def __radd__(self, other: object) -> Rope:
        return self._make((other, *self._pieces)) if type(other) is str else NotImplemented

    # Predicates. Known literals decide as much as they can; what is left is asked of the oracle.

    def __len__(self) -> NoReturn:
        reject("uses the length of a message's text")

    def __bool__(self) -> bool:
        if any(isinstance(piece, str) for piece in self._pieces):
            return True
        return any(not self._ask(cast(Ref, piece), "empty") for piece in self._pieces)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Rope):
            if self._pieces == other._pieces:
                return True
            reject("compares one message's text with another message's")
        if other is None or type(other) in (bool, int, float, list, dict, tuple):
            return False
        if type(other) is not str:
            reject(f"compares a message's text with a value of type {type(other).__name__}")
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
            reject("compares the joined texts of several messages with a string")
        ref = cast(Ref, pieces[0])
        return self._ask(ref, "equals", other) if other else self._ask(ref, "empty")

    def __contains__(self, needle: object) -> bool:
        if type(needle) is not str:
            reject("searches a message's text for something that is not a plain string")
        if not needle:
            return True
        if any(isinstance(piece, str) and needle in piece for piece in self._pieces):
            return True
        self._reject_straddling(needle)
        return any(isinstance(piece, Ref) and self._ask(piece, "contains", needle) for piece in self._pieces)

    def _reject_straddling(self, needle: str) -> None:
        """Raise unless every occurrence of `needle` lies inside one segment.

        An occurrence across segments would cross at least one border between two of them. Where one side of the border
        is a literal, check every way to cut the needle in two: if no cut agrees with the end (or start) of the literal,
        no occurrence crosses this border. A literal shorter than the needle's part agrees if it is contained at that
        place. Between two messages' texts anything is possible, except for needles of one character.
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
                reject(f"searches joined texts for {needle!r}, which could match across their border")

    def _at_end(self, test: str, affix: object, *range_: object) -> bool:
        if isinstance(affix, tuple) and not range_:
            return any(self._at_end(test, option) for option in affix)
        if type(affix) is not str or range_:
            reject(f"calls {test} with something other than plain strings")
        pieces = list(self._pieces if test == "startswith" else self._pieces[::-1])
        rest = affix
        while rest:
            if not pieces:
                return False
            piece = pieces.pop(0)
            if isinstance(piece, Ref):
                # The last segment must have all of the rest. Before further segments, the text could be shorter than
                # the rest and the match continue behind it.
                if not pieces:
                    return self._ask(piece, test, rest)
                reject(f"calls {test} on joined texts, where the match could cross their border")
            if getattr(piece, test)(rest):
                return True
            if not getattr(rest, test)(piece):
                return False
            rest = rest[len(piece) :] if test == "startswith" else rest[: len(rest) - len(piece)]
        return True

    startswith = partialmethod(_at_end, "startswith")
    endswith = partialmethod(_at_end, "endswith")

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
            reject("strips characters that are not given as a plain string")
        return () if chars is None else (chars,)

    def _strip(self, pieces: list[Segment], chars: object, name: str) -> list[Segment]:
        """Strip one side. `pieces` begins with that side, also for `rstrip`, which is called with them reversed."""
        arguments = self._characters(chars)
        while pieces:
            piece = pieces[0]
            if isinstance(piece, str):
                pieces[0] = getattr(piece, name)(*arguments)
                if pieces[0]:
                    break
            else:
                pieces[0] = stripped = piece.then(name, *arguments)
                # Stripping continues in the next segment only if this text is empty after it.
                if len(pieces) == 1 or not self._ask(stripped, "empty"):
                    break
            pieces.pop(0)
        return pieces

    def _remove(self, name: str, affix: object) -> Rope:
        if type(affix) is not str:
            reject(f"calls {name} with something other than a plain string")
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
            reject(f"calls {name} on joined texts, where the match could cross their border")
        return self._make(pieces)

    removeprefix = partialmethod(_remove, "removeprefix")
    removesuffix = partialmethod(_remove, "removesuffix")

    def replace(self, old: object, new: object, count: object = -1) -> Rope:
        if type(old) is not str or type(new) is not str or not old or count != -1:
            reject("calls replace with an empty or symbolic argument, or with a count")
        self._reject_straddling(old)
        return self._make(
            p.replace(old, new) if isinstance(p, str) else p.then("replace", old, new) for p in self._pieces
        )

    def _changed_case(self, name: str) -> Rope:
        # Segments cannot be converted one by one: the lower case of Σ depends on its neighbours (σ, or ς at the end of
        # a word).
        if len(self._pieces) > 1:
            reject(f"calls {name} on joined texts")
        return self._make(getattr(p, name)() if isinstance(p, str) else p.then(name) for p in self._pieces)

    lower = partialmethod(_changed_case, "lower")
    upper = partialmethod(_changed_case, "upper")

    def split(self, sep: object = None, maxsplit: object = -1) -> SplitText:
        return SplitText(self, sep, maxsplit, from_left=True)

    def rsplit(self, sep: object = None, maxsplit: object = -1) -> SplitText:
        return SplitText(self, sep, maxsplit, from_left=False)

    def _cut(self, mark: str, name: str) -> Rope:
        """Apply the operation `before`, `after`, `before_last` or `after_last` (see `program.Operation`)."""
        if name.endswith("_last") and _overlaps_itself(mark):
            reject(f"splits at {mark!r} from the right, whose occurrences can overlap")
        if len(self._pieces) == 1 and isinstance(self._pieces[0], Ref):
            return self._make((self._pieces[0].then(name, mark),))
        self._reject_straddling(mark)
        # Find the first (last) segment that contains the mark: one predicate per text until one says yes.
        order = range(len(self._pieces))
        for i in order[::-1] if name.endswith("_last") else order:
            piece = self._pieces[i]
            if mark in piece if isinstance(piece, str) else self._ask(piece, "contains", mark):
                cut = Operation(name, (mark,))
                inside = piece.then(name, mark) if isinstance(piece, Ref) else apply_operations(piece, [cut])
                if name.startswith("before"):
                    return self._make((*self._pieces[:i], inside))
                return self._make((inside, *self._pieces[i + 1 :]))
        return self

    def __getattr__(self, name: str) -> NoReturn:
        # Python and Jinja look for optional special methods (`__html__`, `__copy__`). An AttributeError means "no".
        if name.startswith("__"):
            raise AttributeError(name)
        reject(f"uses the attribute {name} of a message's text")


class SplitText(Symbol):
    """The result of `split` or `rsplit` on a rope.

    Supported are the first and the last part, which are single operations, and further parts through a loop, which asks
    before each part whether another separator follows, up to `MOST_PARTS` parts.
    """

    __slots__ = ("_from_left", "_most", "_rope", "_separator")

    def __init__(self, rope: Rope, separator: object, most: object, *, from_left: bool) -> None:
        if type(separator) is not str or not separator:
            reject(
                "splits a message's text at white space"
                if separator is None
                else "splits a message's text at something other than a plain string"
            )
        if most not in (-1, 1):
            reject("splits a message's text with a limit other than 1")
        self._oracle = rope._oracle
        self._rope, self._separator, self._most, self._from_left = rope, separator, most, from_left
        if not from_left and most == -1 and _overlaps_itself(separator):
            reject(f"splits at {separator!r} from the right, whose occurrences can overlap")

    def __bool__(self) -> bool:
        return True  # a split at a separator has at least one part

    def __getitem__(self, index: object) -> Rope:
        if index == 0:
            return self._rope._cut(
                self._separator, "before_last" if self._most == 1 and not self._from_left else "before"
            )
        if index == -1:
            return self._rope._cut(self._separator, "after" if self._most == 1 and self._from_left else "after_last")
        if not isinstance(index, int) or index < 0:
            reject("takes a part of a split text by a negative index other than -1, or by a slice")
        for i, part in enumerate(self):
            if i == index:
                return part
        reject("takes a part of a split text that does not exist in every row")

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
        reject(f"loops over more than {MOST_PARTS} parts of a split text")

    def __reversed__(self) -> Iterator[Rope]:
        yield self[-1]
        reject("loops over a split text from its end")


def join(parts: Sequence[object]) -> str | Rope:
    """Return `"".join(parts)` of strings and ropes, as a rope if any part is one; a `TypeError` if a part is neither a
    string nor a rope."""
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
    return first._make(pieces)
