"""Filters and tests of Jinja for the lists, mappings, texts and numbers of a conversation.

Each function takes the filter or test as it is, for known values, and then its arguments (`sandbox.wrapping`).
"""

from collections.abc import Callable
from typing import Any

from gpuload.template.automaton.nodes import DICTSORT, Wanted
from gpuload.template.automaton.symbols import SplitParts, SymbolicList, SymbolicMapping, characters_of
from gpuload.template.automaton.values import Scalar, SymbolicNumber, Text

Known = Callable[..., Any]

_TYPES = {
    SymbolicMapping: {"mapping", "iterable", "sequence", "defined"},
    SymbolicList: {"iterable", "sequence", "defined"},
    SymbolicNumber: {"number", "integer", "defined"},
}
TESTS = frozenset(
    "string iterable sequence mapping number integer float boolean callable none defined undefined true false".split()
)
_PRINTED = (SymbolicMapping, SymbolicList, SymbolicNumber, Scalar)
_EQUAL = frozenset(("eq", "equalto", "=="))


def selected(negated: bool, known: Known, context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """`selectattr`, or `rejectattr`."""
    key, *test = args or (None,)
    plain = type(key) is str and "." not in key and not kwargs
    value = listed(value)
    if isinstance(value, Text) and plain and not hasattr(str, key):
        value = characters_of(value.recorder, value)
    if not isinstance(value, SymbolicList):
        return known(context, value, *args, **kwargs)
    if plain and not test:
        return value.selected(Wanted(key, "true", None, negated))
    if plain and test in (["defined"], ["undefined"]):
        return value.selected(Wanted(key, test[0], None, negated))
    if plain and len(test) == 2 and test[0] in _EQUAL and type(test[1]) in (str, int, bool):
        return value.selected(Wanted(key, "equal", test[1], negated))
    if plain and len(test) == 2 and test[0] == "in" and all(type(each) is str for each in test[1]):
        return value.selected(Wanted(key, "in", tuple(test[1]), negated))
    return known(context, value, *args, **kwargs)


def length(known: Known, *args: Any) -> Any:
    value = listed(args[-1])
    if isinstance(value, SymbolicList):
        return SymbolicNumber(value.recorder, value.length)
    if isinstance(value, Text):
        return value.characters()
    return value.length if isinstance(value, SymbolicMapping) else known(*args)


def integer(known: Known, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Of symbolic texts, only a printed number."""
    pieces: Any = value._pieces if isinstance(value, Text) else ()
    if len(pieces) == 1 and not isinstance(pieces[0], str) and not pieces[0].operations:
        source = pieces[0].message
        if source.kind == "number" and not args and not kwargs:
            return SymbolicNumber(value.recorder, source.value)
    return value if isinstance(value, SymbolicNumber) else known(value, *args, **kwargs)


def on_text(known: Known, *args: Any, **kwargs: Any) -> Any:
    """A filter that handles other values as they are printed."""
    # `Safe` would escape what it is joined with.
    return known(*(each.text() if isinstance(each, _PRINTED) else each for each in args), **kwargs)


def reverse(known: Known, value: Any) -> Any:
    value = listed(value)
    return value[::-1] if isinstance(value, (SymbolicList, Text)) else known(value)


def dictsort(known: Known, value: Any, *args: Any, **kwargs: Any) -> Any:
    plain = isinstance(value, SymbolicMapping) and not args and not kwargs
    return value.items(DICTSORT) if plain else known(value, *args, **kwargs)


def calling(name: str, kind: type[Any], known: Known, value: Any) -> Any:
    """A filter that calls a method of values of some kind."""
    return getattr(value, name)() if isinstance(value, kind) else known(value)


def as_list(known: Known, *args: Any) -> Any:
    value = listed(args[-1])
    return value if isinstance(value, SymbolicList) else known(*args)


def typed(name: str, known: Known, *args: Any, **kwargs: Any) -> Any:
    """The test of a type, by its name."""
    value = args[0] if args else None
    if isinstance(value, Scalar):
        if name in ("integer", "float"):
            return value.kind == ("int" if name == "integer" else "float")
        return name in ("number", "defined")
    return name in _TYPES[type(value)] if type(value) in _TYPES else known(*args, **kwargs)


def listed(value: Any) -> Any:
    return value.listed() if isinstance(value, SplitParts) else value
