"""Rows of mapped columns, gathered from their buffers: what Arrow's own `take` makes of them."""

import datetime
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpuload.cache import column_file
from gpuload.cache.column_file import ColumnFile, ColumnWriter, columns_of
from gpuload.sources.columns import Columns
from gpuload.sources.types import as_json

_TEXTS = ("", "a", "длинный текст, longer than a view", "x" * 300)


def _values(kind: pa.DataType, draw: random.Random, nulls: bool) -> Any:
    """A random value of a type."""
    if pa.types.is_null(kind) or (nulls and draw.random() < 0.2):
        return None
    if pa.types.is_struct(kind):
        return {field.name: _values(field.type, draw, nulls) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_values(kind.value_type, draw, nulls) for _ in range(draw.randrange(4))]
    if pa.types.is_boolean(kind):
        return draw.random() < 0.5
    if pa.types.is_floating(kind):
        return draw.choice([0.5, -2.0, float("inf")])
    if pa.types.is_integer(kind):
        return draw.randrange(100)
    text = draw.choice(_TEXTS)
    return text.encode() if kind in (pa.binary(), pa.large_binary()) else text


_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.large_string()), ("none", pa.null())])
_KINDS = {
    "texts": pa.string(),
    "long": pa.large_string(),
    "bytes": pa.binary(),
    "small": pa.int8(),
    "unsigned": pa.uint16(),
    "whole": pa.int64(),
    "single": pa.float32(),
    "truth": pa.bool_(),
    "messages": pa.list_(_MESSAGE),
    "nested": pa.struct([("answers", pa.large_list(pa.list_(pa.string()))), ("inner", _MESSAGE), ("n", pa.int32())]),
}


def _table(rows: int, draw: random.Random) -> pa.Table:
    columns = {}
    for name, kind in _KINDS.items():
        nulls = draw.random() < 0.5  # then a table has a bitmap, and another has none
        columns[name] = pa.array([_values(kind, draw, nulls) for _ in range(rows)], kind)
    json = as_json([draw.choice([None, {"a": [1]}, "b", 2.5]) for _ in range(rows)])
    return pa.table({**columns, "json": json})


def _written(path: Path, tables: list[pa.Table]) -> ColumnFile:
    writer = ColumnWriter(path, path.name, "a file")
    for table in tables:
        writer.add(table, table.num_rows, {})
    writer.close()
    return ColumnFile.again(path, path.name)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_file, "PART_BYTES", 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_many_tables(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tables = [_table(draw.choice([1, 7, 40]), draw) for _ in range(24)]
    files = [_written(tmp_path / str(number), tables[8 * number :][:8]) for number in range(3)]
    total = sum(table.num_rows for table in tables)
    rng = np.random.default_rng(seed)
    index = rng.permutation(total)  # as of a shuffled load
    mapped, plain = columns_of(files, index), Columns(tables, index)
    for rows in (rng.integers(0, total, 100), np.arange(total), np.argsort(index)):
        for names in ([*mapped.names], *([name] for name in mapped.names)):
            assert mapped._buffers.take(index[rows], names) is not None  # it is what is tested
            assert repr(mapped.take(rows, names)) == repr(plain.take(rows, names))
        schema = plain.promoted_schema(plain.names)
        table = mapped.take_table(rows, schema)
        table.validate(full=True)
        assert table.equals(plain.take_table(rows, schema))
    assert mapped.select(np.arange(50)).take(np.arange(50)) == plain.take(np.arange(50))


@pytest.mark.usefixtures("small_parts")
def test_rows_that_are_taken_table_by_table(tmp_path: Path) -> None:
    days = [datetime.date(2026, 1, 1 + number) for number in range(30)]
    tables = [pa.table({"day": [day], "text": ["a"], "number": [1 if day.day % 2 else 1.5]}) for day in days]
    mapped = columns_of([_written(tmp_path / "file", tables)], np.arange(30))
    rows = np.arange(30)[::-1]
    for name in ("day", "number"):  # a type that is not known, and one that differs
        assert mapped._buffers.take(rows, [name]) is None
    assert mapped._buffers.take(rows, ["text"]) is not None
    assert mapped._buffers.take(rows[:5], ["text"]) is None  # in few tables
    assert mapped.take(rows) == Columns(tables).take(rows)


@pytest.mark.usefixtures("small_parts")
def test_a_damaged_table_is_found(tmp_path: Path) -> None:
    from gpuload.core.errors import StoreError

    path = tmp_path / "file"
    file = _written(path, [pa.table({"text": [f"text {number}"]}) for number in range(30)])
    at = int(file.starts[7]) + 200
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    columns = columns_of([ColumnFile.again(path, "file")], np.arange(30))
    with pytest.raises(StoreError):
        columns.take(np.arange(30))
