"""Sizes of the parts of pairs, compared with loops over their ids."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpuload.core.arrays import Ragged
from gpuload.kinds.pairs.parts import CHOSEN, COMPLETION, REJECTED, appended, completion_tokens, counts, equal_pairs

BITS = [0, CHOSEN, REJECTED, COMPLETION, CHOSEN | COMPLETION, REJECTED | COMPLETION]
IDS = st.builds(lambda token, bits: token | int(bits), st.integers(0, 9), st.sampled_from(BITS))
PARTS = st.tuples(*[st.lists(st.integers(0, 1), max_size=3)] * 3)


@given(st.lists(st.lists(IDS, max_size=9), max_size=6))
def test_counts_of_bits_in_any_order(rows: list[list[int]]) -> None:
    ids = Ragged.from_lists(rows)
    for found, bit in zip(counts(ids), (CHOSEN, REJECTED, COMPLETION), strict=True):
        assert found.dtype == np.int64
        assert found.tolist() == [sum(bool(token & int(bit)) for token in row) for row in rows]
    for other in (CHOSEN, REJECTED, np.int32(0)):
        expected = [sum(token & int(COMPLETION | other) == COMPLETION for token in row) for row in rows]
        assert completion_tokens(ids, other).tolist() == expected


@given(st.lists(PARTS, max_size=6))
def test_equal_pairs_are_counted(rows: list[tuple[list[int], ...]]) -> None:
    bits = (0, int(CHOSEN | COMPLETION), int(REJECTED | COMPLETION))
    ids = [[token | bit for part, bit in zip(row, bits, strict=True) for token in part] for row in rows]
    assert equal_pairs(Ragged.from_lists(ids)) == sum(chosen == rejected for _, chosen, rejected in rows)


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=4))))
def test_appended_rows(rows: list[tuple[list[int], list[int]]]) -> None:
    one, other = (Ragged.from_lists([row[k] for row in rows]) for k in (0, 1))
    assert appended(one, other).to_lists() == [first + second for first, second in rows]
