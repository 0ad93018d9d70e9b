"""Sizes of the parts of pairs, compared with loops over their ids."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from simulator.strict_arrays import StrictModule

from gpuload.core.arrays import Ragged, appended
from gpuload.core.marks import CHOSEN, LOSS, REJECTED
from gpuload.dataset.pieces import Sequences, in_store, tokens_of
from gpuload.kinds.pairs.sizes import PairSizes
from gpuload.packing import Plan
from gpuload.packing.plan import whole_rows

BITS = [0, CHOSEN, REJECTED, LOSS, CHOSEN | LOSS, REJECTED | LOSS]
IDS = st.builds(lambda token, bits: token | int(bits), st.integers(0, 9), st.sampled_from(BITS))
PARTS = st.tuples(*[st.lists(st.integers(0, 1), max_size=3)] * 3)


@given(st.lists(st.lists(IDS, max_size=9), max_size=6))
def test_counts_of_bits_in_any_order(rows: list[list[int]]) -> None:
    ids = Ragged.from_lists(rows)
    found = PairSizes.of(ids)
    for counted, bit in ((found.chosen, CHOSEN), (found.rejected, REJECTED)):
        assert counted.dtype == np.int64
        assert counted.tolist() == [sum(bool(token & int(bit)) for token in row) for row in rows]
    for counted, other in ((found.chosen_loss, REJECTED), (found.rejected_loss, CHOSEN)):
        expected = [sum(token & int(LOSS | other) == LOSS for token in row) for row in rows]
        assert counted.tolist() == expected


@given(st.lists(PARTS, max_size=6))
def test_equal_pairs_are_counted(rows: list[tuple[list[int], ...]]) -> None:
    bits = (0, int(CHOSEN | LOSS), int(REJECTED | LOSS))
    ids = [[token | bit for part, bit in zip(row, bits, strict=True) for token in part] for row in rows]
    expected = [chosen == rejected for _, chosen, rejected in rows]
    pairs, there = Ragged.from_lists(ids), StrictModule()
    assert PairSizes.of(pairs).equal.tolist() == expected
    on_device = PairSizes.of(Ragged(*map(there.asarray, (pairs.values, pairs.offsets)))).array().get()
    assert on_device.tolist() == PairSizes.of(pairs).array().tolist()


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=4))))
def test_appended_rows(rows: list[tuple[list[int], list[int]]]) -> None:
    one, other = (Ragged.from_lists([row[k] for row in rows]) for k in (0, 1))
    assert appended(one, other).to_lists() == [first + second for first, second in rows]


@given(st.lists(PARTS, min_size=1, max_size=6), st.data())
def test_sequences_are_pieces_of_pairs(rows: list[tuple[list[int], ...]], data: st.DataObject) -> None:
    bits = (0, int(CHOSEN | LOSS), int(REJECTED | LOSS))
    ids = [[token | bit for part, bit in zip(row, bits, strict=True) for token in part] for row in rows]
    pairs = Ragged.from_lists(ids)
    found = Sequences(pairs, Plan.concatenate(PairSizes.of(pairs).plans(np.arange(len(pairs)))))
    own = [[token | int(LOSS) for token in part] for row in rows for part in row[1:]]
    whole = [row[0] + rest for row, rest in zip([row for row in rows for _ in "12"], own, strict=True)]
    expected = whole[::2] + whole[1::2]
    assert found.lengths.tolist() == list(map(len, expected))
    assert found.to_host().to_lists() == expected
    some = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=5))
    first = [data.draw(st.integers(0, len(expected[row]))) for row in some]
    size = [data.draw(st.integers(0, len(expected[row]) - begin)) for row, begin in zip(some, first, strict=True)]
    plan = whole_rows(*(np.array(each, np.int64) for each in (some, size, first)))
    pieces = [expected[row][begin : begin + count] for row, begin, count in zip(some, first, size, strict=True)]
    assert tokens_of(found, plan).to_lists() == pieces
    inside = tokens_of(pairs, in_store(found, plan))
    assert (inside.values & ~(CHOSEN | REJECTED)).tolist() == [token for piece in pieces for token in piece]
    assert inside.lengths.tolist() == size
