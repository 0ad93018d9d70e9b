"""JSON arrays and JSON lines, as columns.

JSON has no schema, so reading it must not invent one: Arrow would give every struct the union of all rows' keys, and a
template that prints `tool_calls` would print the nulls too. A column whose values change on a round trip through
Arrow's types is kept as JSON text (`arrow.json`) and decoded on access.
"""

import codecs
import json
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from gpuload.core.arrow import as_arrow
from gpuload.core.errors import SourceError
from gpuload.core.memory import garbage_collection_paused
from gpuload.sources.batches import BATCH_ROWS
from gpuload.sources.types import JSON_TYPE, as_json, json_text, json_type


@garbage_collection_paused()
def json_table(name: str, content: bytes) -> tuple[pa.Table, int]:
    """The columns of a file, and the number of its rows.

    Args:
        name: of the file, for messages.

    Raises:
        SourceError: it is not JSON, or a row is not an object.
        RecursionError: it is nested too deeply.
    """
    rows = _parse(name, content)
    names = list(dict.fromkeys(key for row, _ in rows for key in row))
    return pa.table({each: _column_of(each, rows) for each in names}), len(rows)


_AS_TEXT = frozenset(("tools",))
"""Columns that nothing reads but templates, row by row, as Python objects: a type of Arrow would only take time."""

_Row = tuple[dict[str, Any], dict[str, str] | None]
"""An object, and the JSON texts of its values, if they are known."""


def _parse(name: str, content: bytes) -> list[_Row]:
    """The objects of a JSON array, or of JSON lines."""
    content = content.removeprefix(codecs.BOM_UTF8)
    if content.lstrip()[:1] == b"[":
        try:
            rows: list[Any] = [(row, None) for row in json.loads(content)]
        except ValueError as error:
            raise SourceError(f"{name}: not valid JSON: {error}") from error
        where = [f"item {i}" for i in range(len(rows))]
    else:
        rows, where = [], []
        for number, line in enumerate(content.split(b"\n"), 1):
            if line.strip():
                try:
                    rows.append(_members(line) or (json.loads(line), None))
                except ValueError as error:
                    raise SourceError(f"{name}, line {number}: not valid JSON: {error}") from error
                except RecursionError as error:
                    raise SourceError(f"{name}, line {number}: JSON that is nested too deeply: flatten it") from error
                where.append(f"line {number}")
    for (row, _), place in zip(rows, where, strict=True):
        if not isinstance(row, dict):
            raise SourceError(f"{name}, {place}: expected an object with the row's columns, not {row!r:.60}")
    return rows


# As `json.loads` is built of them: text and the place of a value → the value, and the place behind it.
_scan: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]
_scan_string: Callable[[str, int, bool], tuple[str, int]] = vars(json.decoder)["scanstring"]
_space = re.compile(r"[ \t\n\r]*").match


def _members(line: bytes) -> _Row | None:
    """An object with the texts of its values, which need not be written again then; None if `json.loads` must say what
    the line is."""
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    try:
        text = line.decode(json.detect_encoding(line), "surrogatepass")
        at = _behind(text, 0)
        if text[at] != "{":
            return None
        at = _behind(text, at + 1)
        while text[at] != "}":
            key, at = _scan_string(text, at + 1, True) if text[at] == '"' else (None, at)
            at = _behind(text, at)
            if key is None or text[at] != ":":
                return None
            begin = _behind(text, at + 1)
            values[key], at = _scan(text, begin)
            texts[key] = text[begin:at]
            at = _behind(text, at)
            if text[at] == "}":
                break
            following = _behind(text, at + 1)
            if text[at] != "," or text[following] == "}":
                return None
            at = following
    except (ValueError, IndexError, StopIteration):
        return None
    return (values, texts) if _behind(text, at + 1) == len(text) else None


def _behind(text: str, at: int) -> int:
    """The next place without white space."""
    if text[at : at + 1] > " ":
        return at
    found = _space(text, at)
    assert found is not None
    return found.end()


def _column_of(name: str, rows: list[_Row]) -> pa.Array:
    """The values of all rows, null where a row has none."""
    values = [row.get(name) for row, _ in rows]
    if name not in _AS_TEXT and (column := _arrow_column(values)) is not None:
        return column
    texts = [
        value if value is None else json_text(value) if of_row is None else of_row[name]
        for value, (_, of_row) in zip(values, rows, strict=True)
    ]
    try:
        encoded = as_arrow(texts, pa.large_string())
    except UnicodeEncodeError:  # lone surrogates, which JSON text can escape
        return as_json(values)
    return pa.ExtensionArray.from_storage(JSON_TYPE, encoded)


def _arrow_column(values: list[Any]) -> pa.Array | None:
    """Values with a type of Arrow, if that changes nothing: no missing key, no 1 to 1.0, no order of keys.

    Where there are numbers, all values are compared."""
    try:
        if (kind := json_type(values)) is None:
            return None
        column = as_arrow(values, kind)
        if _is_kept(kind):
            return column
        slices = range(0, len(values), BATCH_ROWS)  # the text of all values would be as large as the file
        if all(
            json.dumps(column.slice(at, BATCH_ROWS).to_pylist()) == json.dumps(values[at : at + BATCH_ROWS])
            for at in slices
        ):
            return column
    except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError):
        pass
    return None


def _is_kept(kind: pa.DataType) -> bool:
    """Whether Arrow has just the values that JSON has, in objects with the same keys."""
    if pa.types.is_list(kind):
        return _is_kept(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_kept(field.type) for field in kind)
    return bool(pa.types.is_string(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind))
