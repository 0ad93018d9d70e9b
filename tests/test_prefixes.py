"""Texts that are cut at the same place (kinds/prefixes.py), compared with a search row by row."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gpuload.kinds import prefixes

TOKENS = [b"<|x|>", b"<", b"<|", b"a", b"<|xx", "é".encode()]
TEXT = st.lists(st.sampled_from(["a", "b", "<", "<|", "<|x|>", "é", "<|xx", "|>"]), max_size=6).map("".join)


@st.composite
def columns(draw: Any) -> list[list[str]]:
    """Some columns of texts, most of which begin like those of the same row."""
    beginnings = draw(st.lists(TEXT, max_size=6))
    count = draw(st.integers(1, 4))
    return [[one[: draw(st.integers(0, 30))] + draw(TEXT) for one in beginnings] for _ in range(count)]


def common(row: list[bytes]) -> bytes:
    """What some texts begin with."""
    size = next((k for k, each in enumerate(zip(*row, strict=False)) if len({*each}) > 1), min(map(len, row)))
    return row[0][:size]


@pytest.mark.parametrize("block", [1, 7, 1 << 21])
@examples(200)
@given(given=columns(), tokens=st.lists(st.sampled_from(TOKENS), unique=True, max_size=3), before=st.integers(0, 2))
def test_texts_are_cut_in_front_of_the_last_token_that_all_begin_with(
    block: int, given: list[list[str]], tokens: list[bytes], before: int
) -> None:
    around = ["<|x|>a"] * before, ["<|x|>"]
    arrays = [pa.array([*around[0], *one, *around[1]], pa.large_string()).slice(before, len(one)) for one in given]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_BLOCK_BYTES", block)
        found = prefixes.cut(arrays, tokens)
    rows = [[text.encode() for text in row] for row in zip(*given, strict=True)]
    sizes = [max(0, *(common(row).rfind(token) for token in [b"\0", *tokens])) for row in rows]
    expected = [row[0][:size] for row, size in zip(rows, sizes, strict=True)]
    expected += [row[k][size:] for k in range(len(given)) for row, size in zip(rows, sizes, strict=True)]
    raw, bounds = found.buffers()[2], np.frombuffer(found.buffers()[1], np.int64)
    pieces = [(raw.to_pybytes() if raw else b"")[low:high] for low, high in itertools.pairwise(bounds)]
    assert pieces[: len(found)] == expected
