"""Spans of texts that are not in NFC, found in their normal form, against transformers' loops over all tokens."""

import unicodedata
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from encoder_variants import byte_level
from hypothesis import given
from hypothesis import strategies as st
from test_spans import again, check, made_up, real  # noqa: F401
from tokenizers import AddedToken, normalizers

from gpuload.engines.host.normal_form import in_normal_form, is_calm
from gpuload.tokenizer.nfc import NEVER, nfc_tables

PIECES = (
    *("a", "e", "q", "q\u0323", "1", " ", "\n", ">", "\u00a0", "caf\u00e9", "\u1ea5"),
    *("<end>", "<|im_end|>", "<|im_start|>assistant\n"),
    *("\u4f60\u597d", "\u3002", "\u0964", "\U0001f600", "\ud55c\uae00"),
    *("e\u0301", "\u0301", "\u0323", "\u0338", "a\u0323\u0302", "\u212b", "\u0958", "\u0b47\u0b3e", "\u0344"),
    *("\u1100\u1161", "\u11a8", "\uac00", "\u3099", "\u304b\u3099", "\U0001d15e", "\U00011099\U000110ba"),
)


EVERY = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]


def test_calm_characters_are_those_that_no_normal_form_changes() -> None:
    """All but a few hundred of the basic plane that the tables of kernels say so of."""
    values = nfc_tables()[0].of(np.array([*map(ord, EVERY)]))
    calm = np.array([*map(is_calm, EVERY)])
    assert set(values[calm].tolist()) <= {0, NEVER}
    assigned = np.array([unicodedata.category(one)[0] in "LNPSZ" for one in EVERY])
    assert (assigned & (values == 0) & ~calm)[:0xF000].sum() < 300


@pytest.mark.parametrize("before", ["e", "\u0915", "\u1100", "\uac00", "\u0b47", "\U00011099", "A"])
def test_calm_characters_are_left_alone(before: str) -> None:
    """By Python's normalizer and by that of `tokenizers`, which is built for another version of Unicode."""
    text = "".join(before + one for one in EVERY if is_calm(one))
    assert unicodedata.normalize("NFC", text) == text
    assert normalizers.NFC().normalize_str(text) == text


def test_no_calm_character_is_composed_with_one_before_it() -> None:
    decompositions = [unicodedata.decomposition(one).split() for one in EVERY]
    compositions = {parts[1] for parts in decompositions if len(parts) == 2 and not parts[0].startswith("<")}
    assert not [part for part in compositions if is_calm(chr(int(part, 16)))]
    assert not [code for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)) if is_calm(chr(code))]


@given(data=st.data())
@pytest.mark.parametrize("name", ["shipped", "normalized tokens"])
def test_spans_of_any_text(name: str, data: Any) -> None:
    if name == "shipped":
        reference, spans = real("shipped")
    else:
        backend = byte_level()
        backend.add_tokens([AddedToken("<end>", normalized=True), AddedToken("q\u0323", normalized=False)])
        backend.normalizer = normalizers.NFC()
        reference, spans = made_up(backend)
    assert spans.slow is None
    rows = []
    for _ in range(data.draw(st.integers(1, 3))):
        pieces = data.draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12))
        text = "".join(pieces)
        places = np.cumsum([0, *map(len, pieces)]).tolist()
        edges = sorted(data.draw(st.lists(st.sampled_from(places) | st.integers(0, len(text)), max_size=6)))
        rows.append((text, list(zip(edges[::2], edges[1::2], strict=False))))
    check(reference, spans, rows)


def test_places_in_normal_forms() -> None:
    text = pa.array(["ab e\u0301e\u0301 cd", "e\u0301", "plain"], pa.large_string())
    rows, start, end = np.array([0, 0, 1, 2]), np.array([0, 10, 0, 1]), np.array([2, 12, 1, 3])
    numbers, normal, first, last = in_normal_form(
        text, rows, start, end, lambda part: unicodedata.normalize("NFC", part)
    )
    assert numbers.tolist() == [0, 2]
    assert normal.to_pylist() == ["ab \u00e9\u00e9 cd", "plain"]
    assert first.tolist() == [0, 8, 0, 1]
    assert last.tolist() == [2, 10, 0, 3]


def test_long_texts_are_not_encoded_again(again: list[str]) -> None:  # noqa: F811
    reference, spans = real("shipped")
    del again[:]
    text = "<|im_start|>assistant\n" + "Vie\u0302\u0323t Nam e\u0301 \u0958. " * 50 + "Yes.<|im_end|>\n"
    check(reference, spans, [(text, [(22, len(text) - 11)])])
    assert again == []
