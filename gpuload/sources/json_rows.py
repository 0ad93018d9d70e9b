"""JSON arrays and JSON lines, as columns.

JSON has no schema, so reading it must not invent one: Arrow would give every struct the union of all rows' keys, and a
template that prints `tool_calls` would print the nulls too. A column whose values change on a round trip through
Arrow's types is kept as JSON text (`arrow.json`) and decoded on access.
"""

import codecs
import json
from typing import Any

import pyarrow as pa

from gpuload.core.arrow import as_arrow
from gpuload.core.errors import SourceError
from gpuload.sources.batches import BATCH_ROWS
from gpuload.sources.types import as_json, json_type


def json_table(name: str, content: bytes) -> tuple[pa.Table, int]:
    """The columns of a file, and the number of its rows.

    Args:
        name: of the file, for messages.

    Raises:
        SourceError: it is not JSON, or a row is not an object.
        RecursionError: it is nested too deeply.
    """
    rows = _parse(name, content)
    names = list(dict.fromkeys(key for row in rows for key in row))
    return pa.table({name: _json_column([row.get(name) for row in rows]) for name in names}), len(rows)


def _parse(name: str, content: bytes) -> list[dict[str, Any]]:
    """The objects of a JSON array, or of JSON lines."""
    content = content.removeprefix(codecs.BOM_UTF8)
    if content.lstrip()[:1] == b"[":
        try:
            rows: list[Any] = json.loads(content)
        except ValueError as error:
            raise SourceError(f"{name}: not valid JSON: {error}") from error
        where = [f"item {i}" for i in range(len(rows))]
    else:
        rows, where = [], []
        for number, line in enumerate(content.split(b"\n"), 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise SourceError(f"{name}, line {number}: not valid JSON: {error}") from error
                where.append(f"line {number}")
    for row, place in zip(rows, where, strict=True):
        if not isinstance(row, dict):
            raise SourceError(f"{name}, {place}: expected an object with the row's columns, not {row!r:.60}")
    return rows


def _json_column(values: list[Any]) -> pa.Array:
    """An Arrow type where that changes nothing: no missing key, no 1 to 1.0, no order of keys. Else JSON text."""
    try:
        if (kind := json_type(values)) is None:  # no type has all of them, or one that turns 1 into 1.0
            return as_json(values)
        column = as_arrow(values, kind)
        slices = range(0, len(values), BATCH_ROWS)  # the text of all values would be as large as the file
        if all(
            json.dumps(column.slice(at, BATCH_ROWS).to_pylist()) == json.dumps(values[at : at + BATCH_ROWS])
            for at in slices
        ):
            return column
    except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError):
        pass
    return as_json(values)
