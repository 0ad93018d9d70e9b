"""Loss as a bit of each id."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from simulator.strict_arrays import StrictModule

from gpuload.core.arrays import Ragged
from gpuload.core.marks import LOSS, loss_tokens, split, with_loss

ROWS = st.lists(st.lists(st.tuples(st.integers(0, 300_000), st.booleans()), max_size=5), max_size=8)


@given(ROWS)
def test_bits_are_those_of_the_mask(rows: list[list[tuple[int, bool]]]) -> None:
    bare = Ragged.from_lists([[token for token, _ in row] for row in rows])
    mask = np.array([bit for row in rows for _, bit in row], bool)
    marked = with_loss(bare, mask)
    assert marked.values.dtype == np.int32
    assert marked.values.tolist() == [token | int(LOSS) * bit for row in rows for token, bit in row]
    ids, loss = split(marked)
    assert ids.to_lists() == bare.to_lists()
    assert loss.values.tolist() == mask.tolist()
    assert loss_tokens(marked).tolist() == [sum(bit for _, bit in row) for row in rows]


@given(ROWS, st.sampled_from([None, 1, 2, 3, 9]), st.sampled_from(["left", "right"]))
def test_tokens_with_loss_wherever_they_are(rows: list[list[tuple[int, bool]]], limit: Any, side: Any) -> None:
    marked = Ragged.from_lists([[token | int(LOSS) * bit for token, bit in row] for row in rows])
    kept = [row if limit is None else row[-limit:] if side == "left" else row[:limit] for row in rows]
    expected = [sum(bit for _, bit in row) for row in kept]
    assert loss_tokens(marked, limit, side).tolist() == expected
    there = StrictModule()
    found = loss_tokens(Ragged(*map(there.asarray, (marked.values, marked.offsets))), limit, side)
    assert found.get().tolist() == expected
