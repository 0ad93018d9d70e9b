"""What everything unknown has in common: it rejects to become known.

Whatever would turn unknown text into a Python string, number or look-up is rejected here, once, so that a new kind of
symbol (`symbolic.py`) is safe before it can do anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from gpuload.template.program import Predicate

__all__ = ["NotCompilableError", "Oracle", "Symbol", "reject"]


class NotCompilableError(Exception):
    """The template did something to unknown text that no column operation does; the message says what."""


class Oracle(Protocol):
    """Answers questions about unknown text, the same question always the same way."""

    def ask(self, predicate: Predicate) -> bool: ...


def reject(what: str) -> NoReturn:
    raise NotCompilableError(what)


class Symbol:
    """Base of everything unknown. Whatever would turn it into a known value is rejected here, once."""

    __slots__ = ("_oracle",)
    _oracle: Oracle

    def __str__(self) -> NoReturn:
        reject("turns text of a message into a string out of sight")

    def __repr__(self) -> NoReturn:
        reject("prints a list or mapping that holds text of a message")

    def __format__(self, specification: str) -> NoReturn:
        reject("format of text of a message")

    def __hash__(self) -> NoReturn:
        reject("looks text of a message up in a mapping")

    def __iter__(self) -> Iterator[Any]:
        reject("loops over the characters of a message")

    def __getitem__(self, key: object) -> Any:
        reject("slice of text of a message" if isinstance(key, slice) else "index into text of a message")

    def __eq__(self, other: object) -> bool:
        reject("comparison of text of a message")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: object) -> bool:
        reject("ordering of text of a message")

    __gt__ = __le__ = __ge__ = __lt__

    def __mul__(self, other: object) -> NoReturn:
        reject("repetition of text of a message")

    __rmul__ = __mul__
