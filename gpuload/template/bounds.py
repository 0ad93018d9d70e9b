"""How large the result of an operation will be, before it is executed.

Python executes `'x' * 10**10`, `'%1000000000s' % x` or `x | center(10**10)` in C: nothing can stop them, and they take
all memory. So while a template is executed with limits, the size of each such result is computed first. Sizes are upper
bounds, in characters or items. Filters and methods that are not listed here return at most a few times the size of
their arguments: for these it is enough to look at the result.
"""

import re
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpuload.template.rope import Rope

MOST_BITS = 1 << 20
"""Largest integer that a template may compute, in bits: products of larger ones take seconds."""

_WIDTHS = re.compile(r"%[^a-zA-Z%]*")
_DIGITS = re.compile(r"\d+")


def size(value: object) -> int:
    """The size of a value itself: its characters or items."""
    if isinstance(value, Rope):
        return value._size
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def deep_size(value: object) -> int:
    """The size of a value with everything inside it, as it is printed. What is contained twice counts twice."""
    return _deep_size(value, {})


def _deep_size(value: object, known: dict[int, int]) -> int:
    if not isinstance(value, (list, tuple, dict)):
        return size(value) if isinstance(value, (str, bytes, Rope)) else 8
    # By identity: a list that contains another one twice, and so on 40 times, has 40 distinct lists.
    if id(value) not in known:
        known[id(value)] = 0  # a list inside itself
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 2 + sum(_deep_size(item, known) + 2 for item in items)
    return known[id(value)]


def operator_size(name: str, left: Any, right: Any) -> int:
    """The size of `left name right`, for the operators `+`, `*`, `**` and `%`."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if name == "**" else left.bit_length() + right.bit_length()
        return _of_bits(bits)
    if name == "*" and isinstance(left, int) != isinstance(right, int):
        return size(left) * int(right) if isinstance(right, int) else size(right) * int(left)
    if name == "%" and isinstance(left, (str, bytes)):
        return _percent_size(left if isinstance(left, str) else left.decode("latin-1"), right)
    return size(left) + size(right)


def call_size(function: object, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """The size of the result of a call, if it is a method of a string or number; else 0."""
    method: Any = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    given = (*arguments, *named.values())
    if isinstance(owner, int):
        return _largest(given) if name == "to_bytes" else 0
    return _METHODS[name](owner, given) if isinstance(owner, (str, bytes)) and name in _METHODS else 0


def filter_size(name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """The size of the result of a filter, whose arguments begin with the value it is applied to."""
    given = (*arguments[1:], *named.values())
    return _FILTERS[name](arguments[0], given) if arguments and name in _FILTERS else 0


def _largest(given: Iterable[Any]) -> int:
    return max((int(item) for item in given if isinstance(item, (int, float)) and abs(item) < float("inf")), default=0)


def _of_bits(bits: int) -> int:
    return bits // 8 if bits <= MOST_BITS else 1 << 62


def _widest(value: Any, given: tuple[Any, ...]) -> int:
    return size(value) + _largest(given)


def _per_line(value: Any, given: tuple[Any, ...]) -> int:
    width = max(_largest(given), max(map(size, given), default=0))
    return size(value) + (str(value).count("\n") + 1) * width


def _replaced(value: Any, given: tuple[Any, ...]) -> int:
    if len(given) < 2 or not all(isinstance(item, type(value)) for item in given[:2]):
        return 0
    return size(value) + int(value.count(given[0])) * size(given[1])


def _joined(value: Any, given: tuple[Any, ...]) -> int:
    parts = given[0] if given else ()
    return deep_size(parts) + size(parts) * size(value)


def _formatted(value: Any, given: tuple[Any, ...]) -> int:
    """The size of `value.format(...)`: its fields' widths, and integers as widths inside fields (`{:{width}}`)."""
    widths, nested = 0, False
    try:
        for _, _, specification, _ in string.Formatter().parse(value):
            widths += sum(map(int, _DIGITS.findall(specification or "")))
            nested = nested or "{" in (specification or "")
    except (TypeError, ValueError):
        return 0
    return size(value) + widths + (1 + int(value.count("{"))) * (deep_size(given) + (_largest(given) if nested else 0))


def _percent_size(template: str, values: Any) -> int:
    widths = "".join(_WIDTHS.findall(template))
    numbers = values if isinstance(values, tuple) else (values,)
    stars = widths.count("*") * _largest(numbers)
    printed = deep_size(values) * (1 + (template.count("%(") if isinstance(values, dict) else 0))
    return size(template) + printed + sum(map(int, _DIGITS.findall(widths))) + stars


def _translated(value: Any, given: tuple[Any, ...]) -> int:
    table = given[0] if given else None
    return size(value) * max(map(size, table.values()), default=1) if isinstance(table, dict) else 0


def _indented(value: Any, given: tuple[Any, ...]) -> int:
    """The size of `tojson(indent=...)`: JSON, and the indentation of each line."""
    indent = max(_largest(given), max(map(size, given), default=0))
    return deep_size(value) + (indent * _indentations(value, 1, {}) if indent else 0)


def _indentations(value: Any, depth: int, known: dict[tuple[int, int], int]) -> int:
    if not isinstance(value, (list, tuple, dict)):
        return 0
    if (id(value), depth) not in known:
        known[id(value), depth] = 0
        items = value.values() if isinstance(value, dict) else value
        known[id(value), depth] = depth * (len(value) + 1) + sum(_indentations(i, depth + 1, known) for i in items)
    return known[id(value), depth]


_Size = Callable[[Any, tuple[Any, ...]], int]

_METHODS: dict[str, _Size] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _widest),
    "expandtabs": lambda value, given: size(value) * (1 + _largest(given or (8,))),
    "replace": _replaced,
    "join": _joined,
    "format": _formatted,
    "format_map": _formatted,
    "translate": _translated,
}

_FILTERS: dict[str, _Size] = {
    **dict.fromkeys(("center", "batch", "slice"), _widest),
    "indent": _per_line,
    "wordwrap": lambda value, given: size(value) * (1 + max(map(size, given), default=0)),
    "replace": _replaced,
    "join": lambda value, given: deep_size(value) + size(value) * max(map(size, given), default=0),
    "format": lambda value, given: _percent_size(str(value), given),
    "tojson": _indented,
    "round": lambda _, given: _of_bits(4 * abs(_largest(given))),  # computes 10 ** precision
    **dict.fromkeys(
        ("string", "pprint", "escape", "e", "forceescape", "urlencode", "safe"), lambda value, _: deep_size(value)
    ),
}
