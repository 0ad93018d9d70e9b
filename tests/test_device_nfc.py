"""Normal form C by kernels on the host, compared with the reference encoder and with the normalizer of `tokenizers`."""

from __future__ import annotations

import itertools
import random
import unicodedata
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pieces_cases import Case, case, compiled, read, run
from simulator.encoder import MOST_MARKS, to_nfc
from simulator.host_kernels import COMPILER
from test_device_pieces import EVERY, byte_level, check, check_real, texts_in
from tiers import examples, exhaustive, shared, shared_files
from tokenizers import AddedToken as Added
from tokenizers import normalizers

from gpuload.tokenizer.nfc import COMPOSES, DECOMPOSES, NEVER, nfc_tables
from gpuload.tokenizer.spec import BpeSpec

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

NFC = normalizers.NFC()
VALUES = dict(zip(EVERY, nfc_tables()[0].of(np.array([*map(ord, EVERY)], np.int64)).tolist(), strict=True))
KNOWN = [c for c, value in VALUES.items() if value != NEVER]
MARKS = [c for c in KNOWN if 0 < VALUES[c] < DECOMPOSES]
COMPOSING = [c for c in MARKS if VALUES[c] & COMPOSES]
COMPOSITES = [c for c in KNOWN if unicodedata.decomposition(c) and unicodedata.normalize("NFD", c) != c]
SYLLABLES = range(0xAC00, 0xD7A4)


@pytest.fixture(scope="module")
def whole() -> Case:
    """A tokenizer that only normalizes: each text becomes one pre-token."""
    return case(BpeSpec(True, (), False, {}, [], False, (), ""))


def normalized(whole: Case, texts: list[str], step: int = 64) -> list[str | None]:
    """Assert that kernels and the reference encoder agree with `tokenizers`, and return the texts in NFC."""
    whole.pretokenizer.step = step
    rows = read(run(whole.pretokenizer, texts))
    found = [None if row is None else "".join(map(str, row)) for row in rows]
    for text, one in zip(texts, found, strict=True):
        assert one == to_nfc(text), [hex(ord(c)) for c in text]
        assert one is None or one == NFC.normalize_str(text), [hex(ord(c)) for c in text]
    return found


@exhaustive
def test_every_code_point(whole: Case) -> None:
    """Alone and after a letter. Only code points that versions of Unicode may differ on fall back, and a few others."""
    alone = normalized(whole, EVERY)
    assert [c for c, one in zip(EVERY, alone, strict=True) if one is None] == [c for c in EVERY if VALUES[c] == NEVER]
    changed = [c for c in KNOWN if unicodedata.normalize("NFC", c) != c]
    assert len(changed) > 1000
    assert {*"\u0958\u095f\u09dc\u09dd\u09df\u0a33\u212b\u2126\ufb1d\U0002f800"} <= {*changed}
    normalized(whole, [f"e{c}" for c in [*changed, *MARKS, *random.Random(0).sample(KNOWN, 20_000)]])
    normalized(whole, [f"{c}\u0301a{c}\u0323\u0301" for c in changed])


@exhaustive
def test_every_pair_that_composes(whole: Case) -> None:
    """Of a letter and a mark, and the parts of every Korean syllable: none falls back."""
    pairs = [unicodedata.normalize("NFD", c) for c in COMPOSITES if ord(c) not in SYLLABLES and VALUES[c] == 0]
    pairs += [a + b for a in {c[0] for c in pairs} | {*COMPOSITES} for b in COMPOSING if len(_nfc(a + b)) == 1]
    pairs += [unicodedata.normalize("NFD", chr(c)) for c in SYLLABLES] + [chr(c) + "\u11a8" for c in SYLLABLES]
    assert len(pairs) > 24_000
    assert None not in normalized(whole, pairs)
    assert None not in normalized(whole, ["".join(pairs[i : i + 50]) for i in range(0, len(pairs), 50)], 7)


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@exhaustive
def test_letters_with_marks(whole: Case) -> None:
    """Every Latin letter with every mark that composes, a sample of anything else, and chains of several marks."""
    chance = random.Random(0)
    jamo = [chr(c) for span in ((0x1100, 0x1113), (0x1161, 0x1176), (0x11A7, 0x11C3)) for c in range(*span)]
    normalized(whole, [a + b for a in [*EVERY[0x41:0x250], *jamo] for b in COMPOSING])
    normalized(whole, [a + b for a in [*jamo, *EVERY[0xAC00 : 0xAC00 + 99]] for b in [*jamo, *EVERY[0xAC00:0xAC05]]])
    normalized(whole, [a + b for a in chance.sample(KNOWN, 30_000) for b in chance.sample(COMPOSING, 3)])
    letters = [*(c for c in COMPOSITES if c.isalpha()), *"aeouAEOUqяαનককதக"]
    for marks in (MARKS, [*"\u0300\u0301\u0302\u0306\u0307\u0308\u031b\u0323\u0327\u0328\u0345\u0316\u0338\u093c"]):
        texts = [
            "".join([chance.choice(letters), *chance.choices(marks, k=chance.randint(1, 5))]) for _ in range(40_000)
        ]
        assert sum(one is not None for one in normalized(whole, texts)) > 4000
        normalized(whole, [*map("".join, itertools.pairwise(texts[:10_000]))])
        normalized(whole, [unicodedata.normalize("NFD", text) for text in texts])


def test_decomposed_text_does_not_fall_back(whole: Case) -> None:
    """In canonical order, as `unicodedata` decomposes it."""
    texts = [
        "مُحَمَّدٌ رَسُولُ اللَّهِ",
        "Việt Nam đất nước, tiếng Việt",
        "한국어 문장입니다.",
        "क़लम ज़रूर फ़िल्म ड़ ढ़",
        "আমড়া গাঢ় হয় কৌ",
        "がぎぐパピ",
        "ọ̃ ǘ Å Ω ệ",
    ]
    decomposed = [unicodedata.normalize("NFD", text) for text in texts]
    for step in (1, 2, 3, 5, 64):
        assert normalized(whole, [*texts, *decomposed] * 3, step) == [*map(_nfc, texts)] * 6
    assert normalized(whole, ["\u0651\u064e".join("مممم")]) == ["\u064e\u0651".join("مممم")]  # reordered


@shared
def test_real_text_rarely_falls_back(whole: Case) -> None:
    for file in shared_files("*.parquet"):
        table = pq.ParquetFile(file).read_row_group(0)
        texts = [text for row in table["prompt"].to_pylist()[:2000] for text in texts_in(row)]
        found = normalized(whole, texts)
        kept = sum(len(text.encode()) for text, one in zip(texts, found, strict=True) if one is not None)
        assert kept > 0.999 * sum(len(text.encode()) for text in texts), file


COMBINING = "aeoéếṩ\u0301\u0302\u0323\u0327\u0316\u0345\u0334\u0338αन\u093c\u094d\u09c7\u09be\u09bc\u3099か \n"
COMBINING += "\u0958\u09dc\u09df\u212b\u1100\u1161\u11a8가\ufb1d\u0344\u0378\u1f71ệ\u031b"


@examples(300)
@given(st.lists(st.text(COMBINING, max_size=8), max_size=30), st.integers(1, 20))
def test_marks_in_any_order(whole: Case, texts: list[str], step: int) -> None:
    normalized(whole, texts, step)


@examples(200)
@given(st.lists(st.text(st.sampled_from(KNOWN) | st.sampled_from(MARKS), max_size=20), max_size=10), st.integers(1, 70))
def test_any_text(whole: Case, texts: list[str], step: int) -> None:
    normalized(whole, texts, step)


@pytest.mark.parametrize("step", [1, 3, 64])
def test_many_marks_in_a_row(whole: Case, step: int) -> None:
    """Unicode's limit is 30. Texts around the one that falls back are not affected."""
    for mark in ("\u0316", "\u0301", "\u1161", "\u093c"):
        texts = [letter + mark * count + "x" for count in (30, MOST_MARKS, MOST_MARKS + 1, 5000) for letter in "eq"]
        found = normalized(whole, ["e\u0301", "", *texts, "e\u0301"], step)
        assert [one is None for one in found] == [False] * 6 + [True] * 4 + [False]


TOKENS = ["<n>", "e\u0301", "é", "\u0301>", " é ", "é\u0323", "\u0958", "क"]
PARTS = [*TOKENS, *"e \u0301\u0323<n>\n", "ặ", "\u093c", "\u3000"]


@examples(300)
@given(
    st.dictionaries(st.sampled_from(TOKENS), st.tuples(*[st.booleans()] * 3), max_size=5),
    st.lists(st.lists(st.sampled_from(PARTS), max_size=9).map("".join), max_size=6),
    st.integers(1, 9),
    st.booleans(),
)
@example({"é": (False, False, False)}, ["é\u0323"], 1, False)  # ẹ and an acute accent
@example({"\u0301>": (False, False, False)}, ["e\u0301>", "e", "\u0301>"], 1, False)  # é and >
def test_added_tokens(flags: dict[str, Any], texts: list[str], step: int, prefix_space: bool) -> None:
    """Those that are not normalized are found in the text as it is, and text between them is normalized by itself.
    Those that are normalized are found in the result."""
    backend = byte_level(prefix_space)
    backend.normalizer = NFC
    for content, (raw, lstrip, rstrip) in flags.items():
        is_nfc = unicodedata.is_normalized("NFC", content)
        backend.add_tokens([Added(content, normalized=is_nfc and not raw, lstrip=lstrip, rstrip=rstrip)])
    try:
        one = compiled(backend)
    except AssertionError:  # unsupported: one strips white space with which another begins
        return
    check(one, texts, step, 64)
    check_real(one, [*texts, "a"], step)


def test_a_mark_after_an_added_token_composes_with_nothing() -> None:
    backend = byte_level(False)
    backend.normalizer = NFC
    backend.add_tokens([Added("e", normalized=False), Added("ó", normalized=True)])
    one = compiled(backend)
    tokens = [backend.token_to_id(token) for token in ("e", "ó")]
    assert read(run(one.pretokenizer, ["e\u0301o\u0301a\u0301"])) == [[tokens[0], "\u0301", tokens[1], "á"]]
    check_real(one, ["e\u0301o\u0301a\u0301", "\u0301", "oe\u0301", "o\u0301e"], 1, 2, 64)
