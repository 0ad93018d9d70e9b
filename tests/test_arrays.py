"""Functions over ragged arrays, compared with loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuload.core.arrays import Ragged, count_in_rows, offsets_of, ranges, stretches
from gpuload.core.options import Truncation

LENGTHS = st.lists(st.integers(0, 5), max_size=12)


@given(LENGTHS, st.data())
def test_ranges(lengths: list[int], data: st.DataObject) -> None:
    first = [data.draw(st.integers(-9, 99)) for _ in lengths]
    offsets = offsets_of(np.array(lengths, np.int64))
    found = ranges(np.array(first, np.int64), np.array(lengths, np.int64), offsets)
    assert found.dtype == np.int64
    assert found.tolist() == [begin + k for begin, size in zip(first, lengths, strict=True) for k in range(size)]


@given(LENGTHS, st.data())
def test_counts_in_rows(lengths: list[int], data: st.DataObject) -> None:
    rows = [[data.draw(st.booleans()) for _ in range(size)] for size in lengths]
    mask = np.array([value for row in rows for value in row], bool)
    found = count_in_rows(mask, offsets_of(np.array(lengths, np.int64)))
    assert found.dtype == np.int64
    assert found.tolist() == [sum(row) for row in rows]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=9), st.integers(1, 3))
def test_stretches(rows: list[tuple[int, int, int]], stretch_count: int) -> None:
    lengths = [np.array([row[k] for row in rows], np.int64) for k in range(stretch_count)]
    expected = [k % 2 == 1 for row in rows for k in range(stretch_count) for _ in range(row[k])]
    assert stretches(*lengths).tolist() == expected


@given(LENGTHS, st.integers(1, 6), st.sampled_from(["left", "right", "middle"]))
def test_truncated_rows(lengths: list[int], limit: int, side: Truncation) -> None:
    rows = [list(range(10 * k, 10 * k + size)) for k, size in enumerate(lengths)]
    head = {"left": 0, "right": limit, "middle": limit // 2}[side]
    expected = [row if len(row) <= limit else row[:head] + row[len(row) - limit + head :] for row in rows]
    found = Ragged.from_lists(rows).truncate(limit, side)
    assert found.values.dtype == np.int32
    assert found.to_lists() == expected


@pytest.mark.parametrize("highest", [5, 150_000, 1 << 21])
def test_lists_of_many_ids(highest: int) -> None:
    values = np.random.default_rng(0).integers(0, highest, 20_000).astype(np.int32)
    values[-1] = highest
    for negative in (False, True):  # as labels have
        values[5] = -100 if negative else 7
        rows = Ragged(values, np.array([0, 0, 11, 20_000])).to_lists()
        assert rows == [[], values[:11].tolist(), values[11:].tolist()]
        assert {type(value) for row in rows for value in row} == {int}
    assert Ragged(values > 3, np.array([0, 20_000])).to_lists() == [(values > 3).tolist()]
