"""Conversion of Arrow columns to Python objects, compared with `to_pylist` over nested types, nulls and slices."""

import datetime
import itertools
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gpuload.sources.columns import Columns
from gpuload.sources.python import by_columns, to_objects
from gpuload.sources.types import as_json

_DAYS = st.dates(datetime.date(1700, 1, 1), datetime.date(2200, 1, 1))
_TIMES = st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1))

_LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    pa.large_string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    pa.binary(): st.binary(max_size=5),
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.decimal128(12, 3): st.decimals(-1000, 1000, places=3),
    pa.date32(): _DAYS,
    pa.timestamp("us"): _TIMES,
    pa.timestamp("us", "UTC"): _TIMES.map(lambda time: time.replace(tzinfo=datetime.UTC)),
    pa.duration("ms"): st.integers(-(10**9), 10**9).map(lambda count: datetime.timedelta(milliseconds=count)),
    pa.null(): st.none(),
}


def _lists_of(inner: tuple[pa.DataType, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    kind, values = inner
    lists = st.lists(st.none() | values, max_size=3)
    return st.sampled_from([(pa.list_(kind), lists), (pa.large_list(kind), lists)])


def _structs_of(
    children: list[tuple[pa.DataType, st.SearchStrategy[Any]]],
) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    fields = {f"key {number}": kind for number, (kind, _) in enumerate(children)}
    values = {f"key {number}": st.none() | values for number, (_, values) in enumerate(children)}
    return pa.struct(list(fields.items())), st.fixed_dictionaries(values)


def _map_of(inner: tuple[pa.DataType, st.SearchStrategy[Any]]) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    return pa.map_(pa.string(), inner[0]), st.dictionaries(st.text("ab", max_size=3), inner[1], max_size=3)


_TYPES = st.recursive(
    st.sampled_from(list(_LEAVES.items())),
    lambda inner: st.one_of(
        inner.flatmap(_lists_of), st.lists(inner, min_size=1, max_size=3).map(_structs_of), inner.map(_map_of)
    ),
    max_leaves=5,
)


@st.composite
def columns(draw: st.DrawFn) -> pa.Array | pa.ChunkedArray:
    """A column of any type: sliced, taken, with nulls, in chunks."""
    kind, values = draw(_TYPES)
    some = st.none() | values if draw(st.booleans()) else values
    array = pa.array(draw(st.lists(some, max_size=8)), kind)
    if draw(st.booleans()):
        start = draw(st.integers(0, len(array)))
        array = array.slice(start, draw(st.integers(0, len(array) - start)))
    if len(array) and draw(st.booleans()):
        array = array.take(pa.array(draw(st.lists(st.integers(0, len(array) - 1), max_size=10)), pa.int64()))
    if draw(st.booleans()):
        middle = draw(st.integers(0, len(array)))
        return pa.chunked_array([array.slice(0, middle), array.slice(middle)], array.type)
    return array


def same(one: Any, other: Any) -> bool:
    """Equality that tells types apart, and in which NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)


def containers(value: Any) -> list[int]:
    """The identities of all lists and dicts in a value."""
    if isinstance(value, dict):
        return [id(value), *(each for inner in value.values() for each in containers(inner))]
    if isinstance(value, list | tuple):
        return [id(value)] * isinstance(value, list) + [each for inner in value for each in containers(inner)]
    return []


@examples(300)
@given(columns())
def test_objects_are_those_of_to_pylist(column: pa.Array | pa.ChunkedArray) -> None:
    expected = column.to_pylist()
    assert same(by_columns(column), expected)
    assert same(to_objects(column), expected)


@examples(100)
@given(columns())
def test_no_list_or_dict_is_in_two_rows(column: pa.Array | pa.ChunkedArray) -> None:
    values = by_columns(column)
    found = containers(values)
    assert len(found) == len(set(found))


def hidden() -> pa.Array:
    """Lists and structs whose nulls hide values."""
    lists = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 6], pa.int32()), pa.array(list("abcdef")), mask=pa.array([False, True, False])
    )
    mask = pa.array([True, False, False])
    return pa.StructArray.from_arrays([lists, pa.array([1, 2, 3])], ["letters", "number"], mask=mask)


@pytest.mark.parametrize(
    "column",
    [
        hidden(),
        hidden().slice(1),
        pa.array(["a", "b", None, "a"]).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array([None, "b"])),
        pa.DictionaryArray.from_arrays(pa.array([1, 1, 0]), pa.array([{"key": [1]}, {"key": [2]}])),
        pa.StructArray.from_arrays([pa.array(["a", "b"]).dictionary_encode()], ["key"], mask=pa.array([True, False])),
        pa.array([{}, None, {}], pa.struct([])),
        pa.array([[1.0, 2.0], None], pa.list_(pa.float64(), 2)),
        pa.array([np.float16(1.5), None], pa.float16()),
        pa.array([1, None], pa.int64()),
        pa.array(["long enough for a view of a string", None], pa.string_view()),
        pa.array([[1], None], pa.list_view(pa.int64())),
        pa.StructArray.from_arrays([as_json([{"a": 1}, None])], ["json"]),
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16], pa.binary(16))),
        pa.array([datetime.time(1, 2), None], pa.time64("us")),
        pa.array([3, 4], pa.timestamp("us", "Europe/Berlin")),
        pa.chunked_array([], pa.list_(pa.string())),
    ],
    ids=lambda column: str(column.type).replace(" ", ""),
)
def test_types_with_their_own_rules(column: Any) -> None:
    assert same(by_columns(column), column.to_pylist())


def test_rows_of_a_dictionary_do_not_share_values() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array([{"key": [1]}]))
    first, second = by_columns(column)
    first["key"].append(2)
    assert second == {"key": [1]}


@pytest.mark.parametrize(
    "column",
    [
        pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["key", "key"]),
        pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff")]),
        pa.array([[2**62]], pa.list_(pa.timestamp("s"))),
    ],
    ids=["a name twice", "not UTF-8", "after the year 9999"],
)
def test_errors_are_those_of_to_pylist(column: pa.Array) -> None:
    with pytest.raises((ValueError, ArithmeticError)) as expected:
        column.to_pylist()
    with pytest.raises(type(expected.value)) as raised:
        by_columns(column)
    assert str(raised.value) == str(expected.value)


def test_zeros_and_missing_numbers_keep_their_signs() -> None:
    values = by_columns(pa.array([-0.0, math.inf, math.nan]))
    assert [math.copysign(1, value) for value in values[:2]] == [-1, 1]
    assert math.isnan(values[2])


@examples(60)
@given(st.lists(st.integers(0, 40), max_size=12), st.data())
def test_rows_of_many_parts(sizes: list[int], data: st.DataObject) -> None:
    """Any rows of parts with two schemas, in any order and any number of times, also none."""
    starts = np.cumsum([0, *sizes]).tolist()
    parts = [
        pa.table(
            {"a": [f"{row}" for row in range(start, end)], **({"b": list(range(start, end))} if start % 2 else {})}
        )
        for start, end in itertools.pairwise(starts)
    ]
    columns = Columns.of_parts(sizes, parts, [part.schema for part in parts], np.arange(starts[-1])[::-1].copy())
    rows = data.draw(st.lists(st.integers(0, starts[-1] - 1), max_size=90)) if starts[-1] else []
    found = columns.take(np.array(rows, np.int64))
    there = [starts[-1] - 1 - row for row in rows]
    of_part = [next(start for start, end in itertools.pairwise(starts) if start <= row < end) for row in there]
    assert found.get("a", []) == [f"{row}" for row in there]
    if "b" in found:
        assert found["b"] == [row if start % 2 else None for row, start in zip(there, of_part, strict=True)]
