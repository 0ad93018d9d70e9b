"""`Symbol`: the base class of symbolic values, which are used in place of the texts of a conversation during a trace.

A symbolic value must never become an ordinary string, number or dictionary key, because everything the template did
with it afterwards would be invisible to the tracer. `Symbol` rejects every such conversion to a known value. A
subclass then allows exactly the operations that it can record (see `rope.py`).
"""

from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from gpuload.template.program import Predicate


class NotCompilableError(Exception):
    """The template does something with a text that cannot be compiled. The message says what."""


class Oracle(Protocol):
    """Answers predicates on symbolic texts; the same predicate always has the same answer."""

    def ask(self, predicate: Predicate) -> bool: ...


def reject(verb_phrase: str) -> NoReturn:
    """Raise `NotCompilableError` with the message "the template `verb_phrase`"."""
    raise NotCompilableError(f"the template {verb_phrase}")


class Symbol:
    """A value that depends on the text of a message. Every conversion to a known value raises `NotCompilableError`."""

    __slots__ = ("_oracle",)
    _oracle: Oracle

    def __str__(self) -> NoReturn:
        reject("converts a message's text to a string in a way that cannot be traced")

    def __repr__(self) -> NoReturn:
        reject("prints a list or mapping that contains a message's text")

    def __format__(self, specification: str) -> NoReturn:
        reject("formats a message's text")

    def __hash__(self) -> NoReturn:
        reject("uses a message's text as a key of a mapping")

    def __iter__(self) -> Iterator[Any]:
        reject("loops over the characters of a message's text")

    def __getitem__(self, key: object) -> Any:
        reject("slices a message's text" if isinstance(key, slice) else "indexes into a message's text")

    def __eq__(self, other: object) -> bool:
        reject("compares a message's text with another value")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: object) -> bool:
        reject("orders a message's text with <, <=, > or >=")

    __gt__ = __le__ = __ge__ = __lt__

    def __mul__(self, other: object) -> NoReturn:
        reject("repeats a message's text")

    __rmul__ = __mul__


class Length(Symbol):
    """The result of `text | length`. Only comparisons that mean "is empty" or "is not empty" are supported."""

    __slots__ = ("_rope",)

    def __init__(self, rope: Symbol) -> None:
        self._oracle, self._rope = rope._oracle, rope

    def __bool__(self) -> bool:
        return bool(self._rope)

    def _is_empty(self, other: object, number: int) -> bool:
        """The answer to a comparison that means this only if the other value is a certain number."""
        if type(other) is not int or other != number:
            reject("uses the length of a message's text")
        return not self._rope

    def __eq__(self, other: object) -> bool:
        return self._is_empty(other, 0)

    __hash__ = Symbol.__hash__
    __le__ = __eq__

    def __lt__(self, other: object) -> bool:
        return self._is_empty(other, 1)

    def __gt__(self, other: object) -> bool:
        return not self._is_empty(other, 0)

    def __ge__(self, other: object) -> bool:
        return not self._is_empty(other, 1)

    def __sub__(self, other: object) -> NoReturn:
        reject("does arithmetic with the length of a message's text")

    __rsub__ = __add__ = __radd__ = __floordiv__ = __truediv__ = __mod__ = __mul__ = __rmul__ = __sub__
