"""Which span a token has a byte of, compared with the tokenizer's own offsets."""

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from encoder_variants import VARIANTS
from hypothesis import given
from test_spans import FAST, ROWS, Spans, any_of, made_up, real, rows_of
from tiers import shared_tokenizers, with_shared
from tokenizers import Tokenizer

from gpuload.core.arrays import Ragged
from gpuload.engines.host.spans import TokenSpans
from gpuload.reference.reference import Reference


@cache
def untrimmed(model_json: str) -> Tokenizer:
    """The same tokenizer, without a post-processor that trims white space from offsets."""
    return Tokenizer.from_str(json.dumps(json.loads(model_json) | {"post_processor": None}))


def as_defined(offsets: Sequence[tuple[int, int]], spans: Spans, first: int) -> list[int]:
    """For each token with these offsets the first span that has one of its characters, counted from `first`."""
    return [
        next((k for k, (a, b) in enumerate(spans, first) if a < b and a < end and start < b and start < end), -1)
        for start, end in offsets
    ]


def found(reference: Reference, spans: TokenSpans, rows: Sequence[tuple[str, Spans]]) -> tuple[list[int], list[bool]]:
    ids = Ragged.from_lists(reference.encode_many([text for text, _ in rows]))
    edges = [
        (row, len(text[:start].encode()), len(text[:end].encode()))
        for row, (text, of_row) in enumerate(rows)
        for start, end in of_row
    ]
    text = pa.array(["before \u4f60", *(text for text, _ in rows), "after"], pa.large_string())[1:-1]
    owner, known = spans.owners(text, ids, *np.array(edges, np.int64).reshape(-1, 3).T)
    return owner.tolist(), known.tolist()


def check(reference: Reference, spans: TokenSpans, rows: Sequence[tuple[str, Spans]]) -> None:
    expected, first = [], 0
    search = spans._search is not None
    for text, of_row in rows:
        # Tokens that lie end to end have all their bytes; otherwise they have those of the tokenizer's offsets.
        backend: Any = untrimmed(reference.model_json) if search else reference.backend
        expected += as_defined(backend.encode(text, add_special_tokens=False).offsets, of_row, first)
        first += len(of_row)
    assert found(reference, spans, rows) == (expected, [True] * len(rows))


@pytest.mark.parametrize("name", with_shared(shared_tokenizers, "shipped"))
def test_owners_with_real_tokenizers(name: str) -> None:
    reference, spans = real(name)
    check(reference, spans, rows_of(reference, 3, 300))


@pytest.mark.parametrize("name", sorted(FAST))
def test_owners_with_variants(name: str) -> None:
    reference, spans = made_up(VARIANTS[name]())
    check(reference, spans, rows_of(reference, 4, 60))


@pytest.mark.parametrize("name", ["shipped", "Gemma"])
@given(data=ROWS)
def test_owners_of_any_text(name: str, data: list[tuple[str, list[int]]]) -> None:
    reference, spans = any_of(name)
    rows = []
    for text, places in data:
        edges = sorted(place % (len(text) + 1) for place in places)
        rows.append((text, list(zip(edges[::2], edges[1::2], strict=False))))
    if rows:
        check(reference, spans, rows)


def test_a_token_on_the_edge_of_two_spans_belongs_to_the_first() -> None:
    reference, spans = real("shipped")
    assert [len(ids) for ids in reference.encode_many(["hello"])] == [1]
    assert found(reference, spans, [("hello", [(0, 0), (1, 2), (2, 5)])]) == ([1], [True])


def test_owners_of_ids_that_are_not_those_of_the_text_are_unknown() -> None:
    reference, spans = real("shipped")
    text = pa.array(["one two", "three"], pa.large_string())
    ids = Ragged.from_lists([reference.encode("one"), reference.encode("three")])
    owner, known = spans.owners(text, ids, *np.array([[0, 0, 3], [1, 0, 5]]).T)
    assert known.tolist() == [False, True]
    assert owner.tolist() == [-1, *[1] * (len(owner) - 1)]


def test_rows_in_random_order_are_not_mixed() -> None:
    """Texts that are encoded again among those that are not."""
    reference, spans = real("shipped")
    rows = [("e\u0301 cafe\u0301", [(0, 2)]), ("plain text", [(0, 5), (5, 10)]), ("", []), ("e\u0301", [(0, 1)])]
    for seed in range(8):
        check(reference, spans, random.Random(seed).sample(rows, len(rows)))
