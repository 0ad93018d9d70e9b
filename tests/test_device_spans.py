"""Loss masks by kernels: the tests of the host's masks once more, and which texts remain for the host."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import test_spans
from encoder_variants import VARIANTS
from hypothesis import given
from hypothesis import strategies as st
from simulator.host_kernels import COMPILER
from simulator.stream_checks import StreamKernels
from test_bpe_splitter import TEXT
from test_spans import (  # noqa: F401
    Spans,
    again,
    any_of,
    check,
    cut,
    made_up,
    real,
    rows_of,
    test_all_tokens_of_a_character_overlap,
    test_any_text_and_spans,
    test_byte_fallback,
    test_every_character_alone,
    test_marks_stay_in_their_rows,
    test_no_rows_and_no_spans,
    test_offsets_without_white_space,
    test_only_texts_that_change_at_spans_are_encoded_again,
    test_real_tokenizers,
    test_rules,
    test_rules_for_overlapping_tokens,
    test_rules_for_white_space_without_a_token,
    test_texts_without_spans_are_not_encoded_again,
    test_variants,
    test_white_space_that_added_tokens_strip,
)

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.marks import LOSS, split
from gpuload.engines.device.render import DeviceSpans, DeviceText
from gpuload.engines.device.spans import DeviceTokenSpans, spans_table
from gpuload.engines.device.store import to_device
from gpuload.engines.host.spans import TokenSpans
from gpuload.reference.reference import Reference

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

KERNELS = StreamKernels()
Rows = Sequence[tuple[str, Spans]]


def spans_on(kernels: StreamKernels, host: TokenSpans) -> DeviceTokenSpans:
    return DeviceTokenSpans(kernels, host, None if host.table is None else spans_table(kernels, host.table))


def on_device(kernels: StreamKernels, reference: Reference, rows: Rows) -> tuple[DeviceText, Ragged]:
    """Texts with their answers, between two others, and their ids."""
    rows = [("before \u4f60", [(0, 3)]), *rows, ("after", [(1, 2)])]
    raw = [text.encode() for text, _ in rows]
    edges = [(len(text[:a].encode()), len(text[:b].encode())) for text, spans in rows for a, b in spans]
    start, end = np.array(edges, np.int64).reshape(-1, 2).T
    first = offsets_of(np.array([len(spans) for _, spans in rows], np.int64))
    array = kernels.xp.asarray
    text = DeviceText(
        kernels=kernels,
        offsets=array(offsets_of(np.array([len(one) for one in raw], np.int64))),
        data=array(np.frombuffer(b"".join(raw), np.uint8)),
        answers=DeviceSpans(array(first), array(start.copy()), array(end.copy()), array(np.full(len(start), LOSS))),
    )
    return text, to_device(kernels, Ragged.from_lists(reference.encode_many([one for one, _ in rows])))


def masks_on_device(reference: Reference, spans: TokenSpans, rows: Rows, overlapping: bool = False) -> list[list[int]]:
    """As `test_spans.masks`. The texts around the rows are there, and not marked."""
    if not rows:
        return []
    spans.overlapping = overlapping
    text, marked = on_device(KERNELS, reference, rows)
    spans_on(KERNELS, spans).mark(text, marked, 1, len(rows) + 1)
    ids, loss = split(marked.to_host())
    assert ids.to_lists()[1:-1] == reference.encode_many([one for one, _ in rows])
    found = [part.astype(int).tolist() for part in np.split(loss.values, ids.offsets[1:-1])]
    assert not any(found[0] + found[-1])
    return found[1:-1]


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The imported tests check these masks."""
    monkeypatch.setattr(test_spans, "masks", masks_on_device)
    KERNELS.races.clear()
    yield
    assert KERNELS.races == []


@pytest.mark.parametrize(
    ("name", "kept", "left"),
    [
        ("shipped", ["", "plain <|im_end|> text", "caf\u00e9 \u4f60\u597d"], ["cafe\u0301", "\u212b and \u0958"]),
        (
            "Gemma",
            ["x \u65e5\u672c y", "x a b  y", " x  "],
            ["x \u2581c \u2581y"],
        ),  # the character that stands for spaces
        ("WordPiece", [], ["the", "word and"]),
    ],
)
def test_texts_that_are_left_to_the_host(
    name: str, kept: list[str], left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, spans = made_up(VARIANTS[name]()) if name == "WordPiece" else any_of(name)
    seen: list[str] = []
    mask = TokenSpans.bits
    monkeypatch.setattr(
        TokenSpans, "bits", lambda self, text, *more: (seen.extend(text.to_pylist()), mask(self, text, *more))[1]
    )
    check(reference, spans, [(text, [(2, 4)] if text else []) for text in [*kept, *left, *kept]])
    assert seen == 2 * left  # by both rules


@given(
    rows=st.lists(st.tuples(TEXT, st.lists(st.integers(0, 40), max_size=6)), max_size=6),
    name=st.sampled_from(["shipped", "ByteLevel, first", "Gemma"]),
)
def test_any_rows_of_a_column(rows: list[tuple[str, list[int]]], name: str) -> None:
    """All rows in one call, also those that the host does."""
    reference, spans = test_spans.trimming(test_spans.TRIMS[name]) if name in test_spans.TRIMS else any_of(name)
    made = []
    for text, numbers in rows:
        places = sorted(min(number, len(text)) for number in numbers)
        made.append((text, list(zip(places[::2], places[1::2], strict=False))))
    check(reference, spans, made)


COUNTS = [("plain", 1, 11), ("cafe\u0301 ", 11, 26)]


@pytest.mark.parametrize("rows", [2, 50, 700])
@pytest.mark.parametrize(("text", "waits", "launches"), COUNTS, ids=["by kernels", "by the host"])
def test_waits_and_launches_do_not_depend_on_the_rows(rows: int, text: str, waits: int, launches: int) -> None:
    kernels, (reference, spans) = StreamKernels(), real("shipped")
    made = spans_on(kernels, spans)
    rng = random.Random(rows)
    there, ids = on_device(kernels, reference, [(text * 9, cut(rng, text * 9)) for _ in range(rows)])
    kernels.xp.waits = kernels.xp.launches = 0
    made.mark(there, ids, 0, rows + 2)
    print(f"{rows} rows: {kernels.xp.waits} waits, {kernels.xp.launches} launches")
    assert kernels.xp.waits <= waits
    assert kernels.xp.launches <= launches


def test_marks_are_bits_of_the_same_ids() -> None:
    reference, spans = real("shipped")
    text, ids = on_device(KERNELS, reference, [("One two", [(4, 7)])])
    before = ids.to_host().to_lists()
    values = ids.values
    spans_on(KERNELS, spans).mark(text, ids, 0, 3)
    assert ids.values is values
    after = ids.to_host().to_lists()
    assert after[1] == [before[1][0], before[1][1] | int(LOSS)]


def test_texts_are_marked_part_by_part() -> None:
    """Any division of the texts gives the same bits."""
    reference, spans = real("shipped")
    rows = rows_of(reference, 3, 40)
    made, found = spans_on(KERNELS, spans), []
    for cuts in ([], [1], [7, 30], list(range(1, 47))):
        text, ids = on_device(KERNELS, reference, rows)
        bounds = [0, *(cut for cut in cuts if cut < len(text)), len(text)]
        for low, high in itertools.pairwise(bounds):
            made.mark(text, ids, low, high)
        found.append(ids.to_host().to_lists())
    assert found[0] == found[1] == found[2] == found[3]
