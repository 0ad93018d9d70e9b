"""JSON arrays and JSON lines, as columns.

JSON has no schema, so reading it must not invent one: Arrow would give every struct the union of all rows' keys, and a
template that prints `tool_calls` would print the nulls too. A column whose values change on a round trip through
Arrow's types is kept as JSON text (`arrow.json`) and decoded on access.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable
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
        SourceError: it is not JSON, not UTF-8, or a row is not an object.
        RecursionError: it is nested too deeply.
    """
    rows = _parse(name, content)
    names = list(dict.fromkeys(key for row, _ in rows for key in row))
    return pa.table({each: _column_of(each, rows) for each in names}), len(rows)


_Row = tuple[dict[str, Any], dict[str, str] | None]
"""An object, and the JSON texts of its values, if they are known."""


def _parse(name: str, content: bytes) -> list[_Row]:
    """The objects of a JSON array, or of JSON lines."""
    content = content.removeprefix(codecs.BOM_UTF8)
    if (encoding := json.detect_encoding(content[:4])) != "utf-8":
        found = encoding[:6].upper()
        raise SourceError(
            f"{name}: the file is {found} text, and JSON is read as UTF-8: convert it with iconv -f {found} -t UTF-8"
        )
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
    column = _arrow_column(values)
    if column is not None:
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


def _same_keys(values: Iterable[Any], known: dict[Any, Any]) -> bool:
    """Whether objects in the same place of all values have the same keys, in the same order. If not, no type of Arrow
    keeps them, and none is tried: that takes ten times as long as to look.

    Args:
        known: what was seen so far: under None the keys of objects, under each key what is there, and under () what is
            in lists.
    """
    for value in values:
        if type(value) is dict:
            if list(value) != known.setdefault(None, list(value)):
                return False
            for key, each in value.items():
                if type(each) in (dict, list) and not _same_keys((each,), known.setdefault(key, {})):
                    return False
        elif type(value) is list and not _same_keys(value, known.setdefault((), {})):
            return False
    return True


def _arrow_column(values: list[Any]) -> pa.Array | None:
    """Values with a type of Arrow, if that changes nothing: no missing key, no 1 to 1.0, no order of keys."""
    try:
        # None: no type has all of them, or one that turns 1 into 1.0.
        if not _same_keys(values, {}) or (kind := json_type(values)) is None:
            return None
        column = as_arrow(values, kind)
        slices = range(0, len(values), BATCH_ROWS)  # the text of all values would be as large as the file
        if all(
            json.dumps(column.slice(at, BATCH_ROWS).to_pylist()) == json.dumps(values[at : at + BATCH_ROWS])
            for at in slices
        ):
            return column
    except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError):
        pass
    return None
