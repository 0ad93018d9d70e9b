"""Functions over ragged arrays, compared with loops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpuload.arrays import count_in_rows, offsets_of, ranges

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
