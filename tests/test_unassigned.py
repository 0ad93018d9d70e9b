"""Texts with code points that are unassigned in Unicode 14, found in one pass over their bytes."""

import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuload.tokenizer import unassigned
from gpuload.tokenizer.unassigned import UNASSIGNED, texts_with_unassigned


def spans() -> list[tuple[int, int]]:
    pairs = (span.partition("-") for span in UNASSIGNED.split())
    return [(int(first, 16), int(last or first, 16)) for first, _, last in pairs]


CLASS = re.compile("[" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in spans()) + "]")


def found(texts: list[str], first: int = 0) -> list[int]:
    """Search for texts, of which the ones before the first are only in the buffers."""
    array = pa.array(texts, pa.large_string())
    offsets = np.frombuffer(array.buffers()[1], np.int64)[first : len(texts) + 1]
    return texts_with_unassigned(np.frombuffer(array.buffers()[2] or b"", np.uint8), offsets).tolist()


def test_every_code_point() -> None:
    """Each alone; and the numbers are those of the standard's ranges."""
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    expected = {point for first, last in spans() for point in range(first, last + 1)}
    assert [points[row] for row in found([chr(point) for point in points])] == sorted(expected)


EDGES = sorted({point + step for span in spans() for point in span for step in (-1, 0, 1)})
NEAR = [chr(point) for point in EDGES if not 0xD800 <= point < 0xE000 and point < 0x110000]
CHARACTERS = st.one_of(st.characters(codec="utf-8"), st.sampled_from(NEAR), st.sampled_from("a \u00e9\u4f60"))


@given(texts=st.lists(st.text(CHARACTERS, max_size=12), min_size=1, max_size=20), data=st.data())
@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_any_texts_in_blocks_of_any_size(block: int, texts: list[str], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(texts) - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unassigned, "_BLOCK", block)
        assert found(texts, first) == [row for row, text in enumerate(texts[first:]) if CLASS.search(text)]


@given(data=st.binary(min_size=1, max_size=40))
def test_invalid_text_is_no_error(data: bytes) -> None:
    texts_with_unassigned(np.frombuffer(data, np.uint8), np.array([0, len(data)]))


def test_no_texts_and_empty_ones() -> None:
    assert found([""]) == found(["", ""]) == []
    assert found(["", "\u0378", "", "\U0010ffff", ""]) == [1, 3]
