"""Digests of columns: equal if and only if the values are equal, in whatever parts and encodings they are stored."""

from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuload.sources.columns import Columns
from gpuload.sources.digest import ColumnDigest
from gpuload.sources.types import JSON_TYPE

_TEXT = st.text("ab\u00e9\u4f60", max_size=3)
VALUES: dict[pa.DataType, Any] = {
    pa.string(): _TEXT,
    pa.large_string(): _TEXT,
    pa.binary(): st.binary(max_size=2),
    pa.binary(2): st.binary(min_size=2, max_size=2),
    pa.int8(): st.integers(-2, 2),
    pa.float64(): st.sampled_from([0.0, 1.0, 0.5]),
    pa.bool_(): st.booleans(),
    pa.timestamp("us"): st.sampled_from([datetime(2026, 1, 1), datetime(2026, 1, 2)]),
    pa.decimal128(5, 2): st.sampled_from([Decimal("1.00"), Decimal("2.50")]),
    pa.null(): st.none(),
}


@st.composite
def typed(draw: Any, depth: int = 2) -> tuple[pa.DataType, Any]:
    """A type, and values of it."""
    form = draw(st.sampled_from(["plain", "struct", "list", "large_list", "map"] if depth else ["plain"]))
    if form == "plain":
        kind = draw(st.sampled_from(list(VALUES)))
        return kind, st.none() | VALUES[kind]
    if form == "struct":
        (first, of_first), (second, of_second) = draw(typed(depth - 1)), draw(typed(depth - 1))
        values = st.fixed_dictionaries({"a": of_first, "b": of_second})
        return pa.struct([("a", first), ("b", second)]), st.none() | values
    kind, values = draw(typed(depth - 1))
    if form == "map":
        return pa.map_(pa.string(), kind), st.none() | st.lists(st.tuples(_TEXT, values), max_size=2)
    return (pa.list_ if form == "list" else pa.large_list)(kind), st.none() | st.lists(values, max_size=3)


def digest(*parts: pa.Array) -> bytes:
    column, row = ColumnDigest(), 0
    for part in parts:
        column.add(part, row)
        row += len(part)
    return column.digest()


@given(st.data())
def test_equal_digests_mean_equal_values(data: Any) -> None:
    kind, values = data.draw(typed())
    rows = st.lists(values, max_size=8)
    first, second = pa.array(data.draw(rows), kind), pa.array(data.draw(rows), kind)
    cut = data.draw(st.integers(0, len(first)))
    whole = digest(first)
    assert digest(first[:cut], first[cut:]) == whole
    padded = pa.concat_arrays([second, first, second])
    assert digest(padded.slice(len(second), len(first))) == whole
    assert (digest(second) == whole) == (second.to_pylist() == first.to_pylist())


@pytest.mark.parametrize("kind", [pa.string_view(), pa.dictionary(pa.int8(), pa.string()), pa.large_string()])
def test_encodings_of_text_are_equal(kind: pa.DataType) -> None:
    values = ["a", None, "", "a long text that a view does not store inline", "a"]
    assert digest(pa.array(values, kind).slice(1)) == digest(pa.array(values[1:], pa.string()))


def test_values_under_a_null_do_not_count() -> None:
    def hidden(number: int) -> pa.Array:
        return pa.Array.from_buffers(
            pa.int64(), 2, [pa.py_buffer(b"\1"), pa.py_buffer(np.array([5, number], np.int64))]
        )

    assert hidden(1).to_pylist() == [5, None]
    assert digest(hidden(1)) == digest(hidden(2)) == digest(pa.array([5, None]))


def test_types_and_places_count() -> None:
    one = pa.array([1, 2])
    assert digest(one) != digest(one.cast(pa.int8()))
    assert digest(pa.ExtensionArray.from_storage(JSON_TYPE, pa.array(["1"], pa.large_string()))) != digest(
        pa.array(["1"], pa.large_string())
    )
    orders = [[pa.table({"a": one}), pa.table({"a": ["x", "y"]})], [pa.table({"a": ["x", "y"]}), pa.table({"a": one})]]
    first, second = (Columns(tables).digests() for tables in orders)
    assert first.keys() == second.keys() == {"a"}
    assert first != second
    assert (
        Columns([pa.table({"a": [1, 2]})], np.array([1, 0])).digests() != Columns([pa.table({"a": [1, 2]})]).digests()
    )


def test_tables_without_rows_do_not_count() -> None:
    rows, more = pa.table({"a": [1, 2]}), pa.table({"a": [["x"]], "b": [{"c": 1}]})
    whole = Columns([rows, more], np.array([0, 1])).digests()
    assert whole.keys() == {"a", "b"}
    no_chunks = pa.table({"a": pa.chunked_array([], more["a"].type), "b": pa.chunked_array([], more["b"].type)})
    assert Columns([rows, more.slice(1)]).digests() == Columns([rows, no_chunks]).digests() == whole
    assert Columns([more.slice(1), rows]).digests() == whole
