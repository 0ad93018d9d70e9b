"""Texts that are encoded by their distinct words have the ids of the whole texts, whatever they are cut into."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from encoder_variants import FRAGMENTS, byte_level
from hypothesis import given
from hypothesis import strategies as st
from tiers import PART, examples, exhaustive
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

import gpuload
from gpuload.core.arrays import Ragged
from gpuload.engines.host import encode as host
from gpuload.engines.host import words
from gpuload.reference.reference import Reference
from gpuload.tokenizer.cuts import cut_places, cut_table

Encode = Callable[[pa.LargeStringArray], Ragged]

KNOWN = {
    "shipped",
    "gpt-oss",
    "gpt2",
    "llama3.1-instruct",
    "mistral-nemo",
    "olmo2-dolma2",
    "qwen2.5-instruct",
    "qwen3",
    "smollm",
}
PAIRS = ["x ", ". ", "' ", "1\t", "x\n", "1\r", "x.", "1<", "x1", ".1", "'1", "1x", "\nx", "\n.", "\n1", "\n'"]
"""Two characters between which a text can be cut, of every kind."""

HOSTILE = [
    "It's 5x 5X 3.14\n\n\n  def f(x):\n    return x//y\n\n/* a */\r\n\r\n'LL 'll '1s 'S' don't1 can't. x's",
    "a\u0338 <\u0338 x<\u0338 1=\u0338 \n<\u0338 .<\u0338 x\u0301 \u00e9 \u00e9\u0301 \u2003 x \u00a0 x\u3000 x",
    "x\u200b y \ufeff z\u180e w \u0085 v \u2028 u \u1680 t \u00a0\t",
    "!//\n/x\n//y ?/\n/ /a\n/\n/b",
    "...\n...\n\nx\n \ny \n z\t\n\tw\t x\t\ty",
]


def encoder_of(reference: Reference) -> Encode:
    return host._words(reference).encode


def same(encode: Encode, reference: Reference, texts: list[str]) -> None:
    found = encode(pa.array(texts, pa.large_string())).to_lists()
    backend: Any = reference.backend
    expected = [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=False)]
    wrong = [(t, a, b) for t, a, b in zip(texts, found, expected, strict=True) if a != b]
    assert not wrong, (len(wrong), min(wrong, key=lambda one: len(one[0])))


@pytest.fixture(scope="module")
def by_word(encoders: dict[str, Any]) -> dict[str, tuple[Encode, Reference]]:
    """name → what encodes by words, and the reference, for each tokenizer of which it is known how to cut."""
    found = {}
    for name, (_, reference) in encoders.items():
        digits = "Digits" in repr(reference.backend.pre_tokenizer)  # of SmolLM's, which only transformers 4 keeps
        if name in KNOWN and not digits:
            found[name] = (encoder_of(reference), reference)
        else:
            with pytest.raises(Exception, match=r"not known|supported|depends|normalized text|no attribute"):
                encoder_of(reference)
    return found


def test_hostile_texts(by_word: dict[str, Any]) -> None:
    for encode, reference in by_word.values():
        same(encode, reference, [*HOSTILE, "".join(HOSTILE), "", " ", *PAIRS])
        same(encode, reference, [f"{text}{other}" for text in FRAGMENTS for other in FRAGMENTS])


@examples(2000)
@given(st.lists(st.lists(st.sampled_from([*FRAGMENTS, *PAIRS, "'", "/", "\r", "\n", "s", "<|im_end|>"])), max_size=4))
def test_random_fragments(by_word: dict[str, Any], texts: list[list[str]]) -> None:
    for encode, reference in by_word.values():
        same(encode, reference, ["".join(text) for text in texts])


@examples(2000)
@given(st.lists(st.text() | st.text(st.characters(max_codepoint=0x7F)), max_size=6))
def test_random_texts(by_word: dict[str, Any], texts: list[str]) -> None:
    for encode, reference in by_word.values():
        same(encode, reference, texts)


def around_cuts(points: Iterable[int]) -> list[str]:
    """For each code point a text with it on both sides of cuts of every kind."""
    return [
        "".join(f"{chr(point)}{pair}{chr(point)}" for pair in PAIRS) for point in points if not 0xD800 <= point < 0xE000
    ]


def test_code_points_around_cuts(by_word: dict[str, Any]) -> None:
    for encode, reference in by_word.values():
        same(encode, reference, around_cuts([*range(0x400), *range(0x400, 0x3100, 7), *range(0x3100, 0x110000, 1009)]))


@exhaustive
@pytest.mark.parametrize("low", range(0, 0x110000, 0x11000))
def test_all_code_points_around_cuts(by_word: dict[str, Any], low: int) -> None:
    points = around_cuts(range(low, low + 0x11000))
    for encode, reference in by_word.values():
        same(encode, reference, points if PART == "all" else points[::5])


def test_where_texts_are_cut(qwen: Any) -> None:
    table = cut_table(qwen.backend_tokenizer)

    def pieces(*texts: str) -> list[str]:
        whole = pa.array(["skipped", *texts], pa.large_string())[1:]
        offsets, data = words.text_buffers(whole)
        places = cut_places(table, data, offsets)
        return [data[low:high].tobytes().decode() for low, high in itertools.pairwise(places)]

    assert pieces("Natalia sold 48 clips,", "", " and\nthen 3x.\u00e9 \u3000 y") == [
        "Natalia", " sold", " 48", " clips", ",", " and", "\n", "then", " 3", "x", ".\u00e9", " \u3000 y",
    ]  # fmt: skip
    assert pieces("<|im_start|>user\nHi<|im_end|>\n") == ["<|im_start|>user", "\n", "Hi", "<|im_end|>\n"]
    assert pieces("\u4f60 x", "x\u2003 x", "x\u00a0 x") == ["\u4f60", " x", "x\u2003 x", "x\u00a0 x"]


def test_texts_in_slices(monkeypatch: pytest.MonkeyPatch, qwen: Any) -> None:
    monkeypatch.setattr(words, "_SLICE_BYTES", 50)
    reference = Reference(qwen)
    same(encoder_of(reference), reference, [*HOSTILE, "", "", *PAIRS, "word " * 40, ""])
    assert encoder_of(reference)(pa.array([], pa.large_string())).to_lists() == []
    same(encoder_of(reference), reference, ["", "x" * 60, "", "", "y" * 60])
    same(encoder_of(reference), reference, ["", ""])


def tokenizer_with(*added: AddedToken, **parts: Any) -> Tokenizer:
    return byte_level(added=added, **parts)


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("x y", normalized=False),
        AddedToken("a.1b\nc", normalized=False),
        AddedToken("n o", normalized=True),
        AddedToken("\u00e9 x", normalized=False),
        AddedToken(" x", normalized=False),
        AddedToken("x ", normalized=False),
        AddedToken("\n", normalized=False),
    ],
    ids=lambda token: repr(token.content),
)
def test_added_tokens_are_never_cut(token: AddedToken) -> None:
    backend = tokenizer_with(token, AddedToken("<t>", normalized=False))
    reference = Reference(PreTrainedTokenizerFast(tokenizer_object=backend), chat_template=None)
    text = token.content
    texts = [
        text,
        f"a{text}b",
        f" {text} ",
        f"x y{text}{text[:-1]}{text}",
        f"{text}<t>{text[1:]}<t> {text}\n",
        f"1{text}1",
    ]
    same(encoder_of(reference), reference, texts)


def test_words_whose_separators_are_changed_are_encoded_one_by_one() -> None:
    asked = []

    def encode(texts: pa.LargeStringArray) -> Ragged:
        asked.append(texts.to_pylist())
        return Ragged.from_lists([[len(text)] for text in texts.to_pylist()])

    found = words.encode_joined(pa.array(["a", "bcd"], pa.large_string()), (0, "|"), encode)
    assert found.to_lists() == [[1], [3]]
    assert asked == [["a|bcd|"], ["a", "bcd"]]


def test_separators() -> None:
    """A token that is in a word, or that another token can reach into, separates nothing."""
    raw = [AddedToken(text, normalized=False) for text in ("ab", "abc", "b<", "<c>", "x<", "<d>", "<e")]
    added = dict(enumerate([AddedToken("<n>"), *raw]))

    def found(*texts: str) -> Any:
        return words.separator_of(added, pa.array(texts, pa.large_string()))

    assert found("x") == (2, "abc")
    assert found("x", "yabc") == (5, "x<")
    assert found("x<yabc") is None
    backend = byte_level(normalizer=None, added=tuple(raw))
    reference = Reference(PreTrainedTokenizerFast(tokenizer_object=backend), chat_template=None)
    texts = ["a", "x a", "xab ab a", "b <c> x<d> <e", "b< x< <"]
    same(encoder_of(reference), reference, texts)
    same(encoder_of(reference), reference, [*texts, "abc", "1abc"])


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (AddedToken("<t>", lstrip=True), "depends on what is around it"),
        (AddedToken("<t>", rstrip=True), "depends on what is around it"),
        (AddedToken("t", single_word=True), "depends on what is around it"),
        (AddedToken("\u00e9", normalized=True), "is found in normalized text"),
    ],
)
def test_added_tokens_of_which_it_is_not_known(token: AddedToken, why: str) -> None:
    with pytest.raises(Exception, match=why):
        cut_table(tokenizer_with(token))


def test_small_loads_encode_words(write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write({"prompt": HOSTILE * 9})
    small = gpuload.load(file, qwen, verify="full", strict=True, token_cache=False)
    assert "each different word once" in small.report.engine
    monkeypatch.setattr(host, "MOST_BY_WORDS", 100)
    large = gpuload.load(file, qwen, token_cache=False)
    assert "encoded by gigatoken" in large.report.engine
    assert np.array_equal(small.tokens.values, large.tokens.values)
    some = gpuload.load(file, qwen, token_cache=False, max_samples=1)
    assert "each different word once" in some.report.engine


def test_texts_that_do_not_repeat_themselves_are_for_gigatoken(
    write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the different words of all batches are many, and then for all that follow; the report says so."""
    monkeypatch.setattr(host, "MOST_WORDS", 1 << 16)
    encoder, reference = host.host_encoder(Reference(qwen), 0), Reference(qwen)
    assert encoder.live
    assert encoder.name.endswith("each different word once")
    texts = [f"{number} " + "word " * 9 + "\u4f60" * number for number in range(400)]
    same(encoder.encode, reference, texts[:4] * 9)
    assert encoder.live
    assert encoder.name.endswith("each different word once")
    same(encoder.encode, reference, texts)
    assert not encoder.live
    assert "each different word once, then gigatoken" in encoder.name
    same(encoder.encode, reference, [*HOSTILE, *texts[:2]])

    file = write({"prompt": texts})
    found = gpuload.load(file, qwen, verify="full", strict=True, token_cache=False)
    assert "each different word once, then gigatoken" in found.report.engine


def test_words_stay_where_gigatoken_is_not_exact(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: Any) -> None:
        raise ValueError("never")

    never.__name__ = "_gigatoken"
    monkeypatch.setattr(host, "_gigatoken", never)
    monkeypatch.setattr(host, "MOST_WORDS", 1 << 16)
    reference = Reference(qwen)
    encoder = host.host_encoder(reference, 0)
    same(encoder.encode, reference, [*HOSTILE, *("\u4f60" * number for number in range(400))])
    assert encoder.live
    assert encoder.name.endswith("each different word once")
    assert "then" not in encoder.name
    assert "gigatoken: never" in encoder.unused
