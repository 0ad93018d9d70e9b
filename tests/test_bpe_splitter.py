"""The compiled splitter compared with the real pre-tokenizer: every code point, every short sequence of classes, random
texts, random patterns."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.encoder import pre_tokens
from tiers import examples
from tokenizers import Regex, pre_tokenizers

from gpuload.tokenizer import spec
from gpuload.tokenizer.classes import ClassMap
from gpuload.tokenizer.regex import UnsupportedRegexError
from gpuload.tokenizer.splitter import Splitter, compile_splitter

Pair = tuple[Splitter, Any]  # the compiled one, and the real one
SAMPLED = 20_000  # sequences of classes and code points per tokenizer, where there are more than that


@pytest.fixture(scope="module")
def pairs(bpe: dict[str, Any]) -> dict[str, Pair]:
    return {name: (compile_splitter(spec.stages), backend.pre_tokenizer) for name, (spec, backend) in bpe.items()}


def real(pre_tokenizer: Any, text: str) -> list[tuple[int, int]]:
    return [place for _, place in pre_tokenizer.pre_tokenize_str(text)]


def check(pair: Pair, texts: Iterator[str] | list[str]) -> None:
    splitter, pre_tokenizer = pair
    for text in texts:
        assert pre_tokens(splitter, text) == real(pre_tokenizer, text), repr(text)


def representatives(splitter: Splitter) -> list[str]:
    """Return one character of each class, the first."""
    code_points = np.array([c for c in range(0x110000) if not 0xD800 <= c < 0xE000])
    _, first = np.unique(splitter.classes.of(code_points), return_index=True)
    return [chr(code_points[place]) for place in first]


def test_every_sequence_of_classes(pairs: dict[str, Pair]) -> None:
    """Up to length 4, all of them for the shipped tokenizer's 16 classes, a sample where there are more."""
    for name, (splitter, pre_tokenizer) in pairs.items():
        letters = representatives(splitter)
        sequences = ["".join(s) for length in (1, 2, 3) for s in itertools.product(letters, repeat=length)]
        fours = ["".join(s) for s in itertools.product(letters, repeat=4)]
        if name != "shipped":
            sequences = random.Random(name).sample(sequences, min(len(sequences), SAMPLED // 8))
            fours = random.Random(name).sample(fours, min(len(fours), SAMPLED // 4))
        check((splitter, pre_tokenizer), sequences + fours)


def test_every_code_point(pairs: dict[str, Pair]) -> None:
    """Alone and between a letter, a digit, a space, a newline, an apostrophe: all in one text each, and a text of its
    own for a sample."""
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for name, pair in pairs.items():
        splitter, pre_tokenizer = pair
        step = 4 if name == "shipped" else 64
        some = random.Random(name).sample(every, len(every) // step)
        for frame in ("a{0}a", "1{0}1", " {0} ", "\n{0}\n", "'{0}'", "'{0}{0}", " {0}\n"):
            for start in range(0, len(some), 4000 * len(frame)):
                # Long texts are quicker per character, but the real pre-tokenizer is slow on very long ones.
                text = "".join(frame.format(c) for c in some[start : start + 2000])
                assert pre_tokens(splitter, text) == real(pre_tokenizer, text)
        check(pair, some[:: 16 if name == "shipped" else 8])


def test_every_code_point_has_the_class_that_the_engine_gives_it() -> None:
    """Tested in another way: all code points in sequence."""
    for pattern in (r"\p{L}+", r"[^\s\p{L}\p{N}]+", r"(?i:[a-z])", r"\p{N}{1,3}"):
        splitter = compile_splitter([spec.Split(pattern)])
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        for start in range(0, 0x110000, 0x800):
            if start != 0xD800:
                text = "".join(map(chr, range(start, start + 0x800)))
                assert pre_tokens(splitter, text) == real(split, text), hex(start)


FRAGMENTS = [
    "'s", "'S", "'ſ", "'ll", "'LL", "'re", "'Ve", "'d", "'M", "ſ", "\u212a", "K", "ß", "ŉ", "İ", "ı", "ǅ", "a",
    "B", "é", "e\u0301", "\u0301", "ʰ", "你好", "ひらカナ", "한", "א", "ا", "٣", "½", "Ⅷ", "1", "22", "333", "4444",
    " ", "  ", "   ",
    "\n", "\r\n", "\r", "\t", "\u00a0", "\u3000", "\u2028", "\x85", "\x1c", "\u200b", "\u180e", "\ufeff", ".", ",", "!",
    "$", "/", "//", "\\", "-", "_", "—", "€", "😀", "👍🏽", "\x00", "\U0010ffff",
]  # fmt: skip
TEXT = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=6)), max_size=16).map("".join)


@examples(400)
@given(TEXT)
def test_any_text(pairs: dict[str, Pair], text: str) -> None:
    for pair in pairs.values():
        check(pair, [text])


def test_case_folding() -> None:
    """ſ folds to s and K to k. Patterns in which ß would match ss are not supported."""
    for pattern in (
        r"(?i:'s|'k)",
        r"(?i)[a-z]+",
        r"(?i:[^k])",
        r"(?i:k(?-i:s))",
        r"(?i:\p{Lu}x)",
        r"(?i:é|Σ)",
        "(?i:[à-ÿ])",
    ):
        pair = compile_splitter([spec.Split(pattern)]), pre_tokenizers.Split(Regex(pattern), "isolated")
        check(
            pair, ["'s'S'ſ'k'K'\u212a", "ſtraße K\u212a ss SS ÀàÿŸß", "ks KS Ks \u212as Kſ", "éÉe\u0301 ΣςσS xX ÀX àx"]
        )
    for pattern in ("(?i:ss)", "(?i:(?:s|t)(?:s|t))", "(?i:ß)", "(?i:s+)", "(?i:ffx)"):
        with pytest.raises(UnsupportedRegexError, match="case-insensitive"):
            compile_splitter([spec.Split(pattern)])


def test_stages_that_drop_text_and_numerals() -> None:
    text = "ab12 ½٣Ⅷ x一二 \n\n9"
    for stages, pre_tokenizer in (
        ([spec.Split(r"\s+", "gaps")], pre_tokenizers.Split(Regex(r"\s+"), "removed")),
        ([spec.Split(r"\p{L}+", "matches")], pre_tokenizers.Split(Regex(r"\p{L}+"), "removed", invert=True)),
        ([spec.Digits(True)], pre_tokenizers.Digits(individual_digits=True)),
        ([spec.Digits(False)], pre_tokenizers.Digits(individual_digits=False)),
    ):
        check((compile_splitter(stages), pre_tokenizer), [text, "", " ", "12", "a", text[::-1]])
    splitter = compile_splitter([spec.Digits(True)])
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for start in range(0, len(every), 3000):
        text = "".join(f"{c}{c}" for c in every[start : start + 3000])
        assert pre_tokens(splitter, text) == real(pre_tokenizers.Digits(individual_digits=True), text)
    assert pre_tokens(compile_splitter([]), "all of it") == [(0, 9)]


CLASSES = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", ".", r"\s", r"\S", r"\d", r"\.", r"[^\s\d]"])


def _wrapped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeated = st.tuples(CLASSES, st.sampled_from(["?", "*", "+", "{2}", "{1,2}", "{0,2}", "{2,}", "??", "*?", "+?"]))
    ahead = st.tuples(st.sampled_from(["(?!", "(?="]), CLASSES)
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        repeated.map("".join),
        ahead.map("{0[0]}{0[1]})".format),
        st.tuples(CLASSES, inner, st.sampled_from(["?", "*", "+", "{1,2}", "+?"])).map("(?:{0[0]}{0[1]}){0[2]}".format),
    )


@examples(300)
@given(st.recursive(CLASSES, _wrapped, max_leaves=8), st.lists(st.text("abc 1.\n", max_size=12), max_size=20))
def test_random_patterns(pattern: str, texts: list[str]) -> None:
    """Every pattern that compiles is split exactly."""
    try:
        splitter = compile_splitter([spec.Split(pattern)])
    except UnsupportedRegexError:
        return  # mostly patterns that match the empty text
    check((splitter, pre_tokenizers.Split(Regex(pattern), "isolated")), [*texts, "", "abcab  1.\n\nca 11..\n"])


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("^a", "anchor ^"),
        ("a$", "anchor $"),
        (r"\bx", r"anchor \b"),
        (r"(a)\1", r"back-reference or call \1"),
        ("(?>a)", "atomic group"),
        ("(?<=a)b", "look-behind"),
        ("(?<x>a)", "named group"),
        ("a(?!bc)", "more than one class"),
        ("a++", "possessive"),
        ("a{2}?", "interval followed by"),
        ("a{65}", "interval {65}"),
        ("(a?b?)+", "match the empty text"),
        ("a*", "matches the empty text"),
        ("a|", "matches the empty text"),
        ("(?x:a)", "the group (?x:"),
        ("b(?i)a", "the group (?i)"),
        ("[a", "not closed"),
        ("(a", "not closed"),
        ("a)", "stray ) at position 1"),
        (r"\Ra", r"escape \R"),
        ("a**", "quantifier on a quantifier"),
        ("*a", "nothing before it"),
    ],
)
def test_unsupported_constructs_are_named(pattern: str, named: str) -> None:
    with pytest.raises(UnsupportedRegexError) as rejection:
        compile_splitter([spec.Split(pattern)])
    assert named in str(rejection.value)


def test_tables_fit_shared_memory(pairs: dict[str, Pair]) -> None:
    for splitter, _ in pairs.values():
        tables = [splitter.classes.pages, splitter.classes.blocks, *(stage.table for stage in splitter.stages)]
        assert sum(table.nbytes for table in tables) < 64 << 10
        assert all(len(stage.table) < 256 for stage in splitter.stages)


@given(st.lists(st.integers(0, 7), min_size=17, max_size=17), st.integers(1, 40_000))
@examples(5)
def test_class_maps(values: list[int], run: int) -> None:
    classes = np.resize(np.repeat(values, run), 0x110000).astype(np.uint8)
    assert (ClassMap.from_classes(classes).of(np.arange(0x110000)) == classes).all()
