"""Pre-tokens from kernels on the host, compared with the reference encoder and with the ids of real tokenizers."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pieces_cases import NO_WORDS, Case, case, compiled, made_up, read, run
from simulator.encoder import Section, cut, split
from simulator.host_kernels import COMPILER, HostKernels
from test_bpe_fallback import LLAMA2, small
from test_bpe_merges import LETTERS
from test_bpe_splitter import CLASSES, TEXT, _wrapped
from tiers import examples, exhaustive, shared_files
from tokenizers import AddedToken as Added
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from gpuload.engines.device.pretokenize import PreTokenizer
from gpuload.tokenizer.regex import UnsupportedRegexError
from gpuload.tokenizer.spec import WHITE_SPACE, AddedToken, BpeSpec, Digits, Split, bpe_spec
from gpuload.tokenizer.splitter import CLOSED, NOWHERE, OPEN, Splitter, restarts

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

EVERY = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def check(case: Case, texts: list[str], *steps: int) -> None:
    """Assert that kernels with chunks of these sizes split as the reference encoder does."""
    expected = [cut(case.tokenizer, text) for text in texts]
    for step in steps or (64,):
        case.pretokenizer.step = step
        found = read(run(case.pretokenizer, texts))
        assert len(found) == len(texts)
        for text, pieces, right in zip(texts, found, expected, strict=True):
            assert pieces == right, (step, text[:2000])


def check_real(case: Case, texts: list[str], *steps: int) -> None:
    """Assert that encoding each pre-token by itself with the real model gives the real tokenizer's ids."""
    expected = [case.backend.encode(text, add_special_tokens=False).ids for text in texts]
    for step in steps or (64,):
        case.pretokenizer.step = step
        found = read(run(case.pretokenizer, texts))
        assert any(pieces is not None for pieces in found)
        for text, pieces, right in zip(texts, found, expected, strict=True):
            assert pieces is None or ids(case.backend, pieces) == right, (step, text[:2000])


def ids(backend: Any, pieces: list[Section]) -> list[int]:
    found: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            found.append(piece)
        else:
            word = piece if backend.model.byte_fallback else "".join(LETTERS[byte] for byte in piece.encode())
            found += [token.id for token in backend.model.tokenize(word)]
    return found


@pytest.fixture(scope="module")
def shipped(qwen_folder: str) -> Case:
    return compiled(Tokenizer.from_file(f"{qwen_folder}/tokenizer.json"))


@pytest.fixture(scope="module")
def cases(bpe: dict[str, Any], folders: dict[str, Path]) -> dict[str, Case]:
    found = {name: case(*pair) for name, pair in bpe.items()}
    found["llama2"] = compiled(small([("▁", "a"), ("a", "b"), ("é", "é"), ("ab", "c")]))
    if "gemma3" in folders:
        found["gemma3"] = compiled(Tokenizer.from_file(str(folders["gemma3"] / "tokenizer.json")))
    return found


def texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict | list):
        return [text for inner in (value.values() if isinstance(value, dict) else value) for text in texts_in(inner)]
    return []


def rows(files: list[Any], count: int) -> list[str]:
    """Return prompts of some rows of each file, each as one text with special tokens between messages."""
    found = []
    for file in files:
        table = pq.ParquetFile(file).read_row_group(0)
        numbers = random.Random(str(file)).sample(range(len(table)), min(count, len(table)))
        for row in (
            table.select([table.schema.names[0], *({"prompt"} & {*table.schema.names})]).take(numbers).to_pylist()
        ):
            found.append("<|im_start|>user\n".join(["", *texts_in(row)]) + "<|im_end|>\n")
    return found


def test_real_rows(cases: dict[str, Case], gsm8k: str) -> None:
    texts = rows([gsm8k], 60)
    if "shipped" not in cases:
        texts += rows([*shared_files("*.parquet"), *shared_files("wild/*.parquet")], 4)
    for one in cases.values():
        check(one, texts, 1, 7, 64)


def test_real_rows_through_the_tokenizer_object(encoders: dict[str, Any], gsm8k: str) -> None:
    """The object can differ from its file."""
    texts = rows([gsm8k], 20) + ([] if "shipped" in encoders else rows(shared_files("*.parquet"), 3))
    specs = {name: bpe_spec(reference.backend.to_str()) for name, (_, reference) in encoders.items()}
    taken = [name for name, spec in specs.items() if isinstance(spec, BpeSpec)]
    assert taken
    for name in taken:
        check_real(case(specs[name], encoders[name][1].backend), texts)


@exhaustive
def test_every_code_point(cases: dict[str, Case]) -> None:
    """Alone, and between a letter, a digit, a space, a newline, an apostrophe: a sample, but for the shipped tokenizer
    and the first frame all of them."""
    for name, one in cases.items():
        chance = random.Random(name)
        one = case(replace(one.tokenizer.spec, nfc=False))  # with NFC, most texts would fall back
        for number, frame in enumerate(("a{0} ", "{0}", "1{0}1", " {0}\n", "'{0}'", "\n{0}a")):
            some = EVERY if name == "shipped" and number == 0 else chance.sample(EVERY, 2000)
            framed = [frame.format(c) for c in some]
            check(one, framed if number == 1 else ["".join(framed[i : i + 500]) for i in range(0, len(framed), 500)])


MARKUP = "< | > <| |> <|im_start|> <|im_end|> <|im_ im_end|> <unused1> [INST] <n> ▁ ▁▁ <｜place▁holder▁no▁7｜>".split()


@examples(150)
@given(
    st.lists(st.lists(st.one_of(TEXT, st.sampled_from(MARKUP)), max_size=6).map("".join), max_size=5),
    st.integers(1, 40),
)
def test_any_text(cases: dict[str, Case], texts: list[str], step: int) -> None:
    for one in cases.values():
        check(one, texts, step)


def test_added_tokens_alone_adjacent_cut_and_overlapping(cases: dict[str, Case]) -> None:
    for name, one in cases.items():
        contents = [token.content for token in one.tokenizer.spec.added] or ["<n>"]
        some = random.Random(name).sample(contents, min(len(contents), 25))
        texts = ["".join(some), " ".join(some)]
        for content in some:
            texts += [content, content * 2, f"a{content}b", f" {content} ", f"\n{content}\n", content[:-1]]
            texts += [content[:-1] + content, content + content[1:], content[0] + content, content.upper()]
        check_real(one, texts, 1, 5, 64)
        check(one, texts, 3)


ADDED = ["<a>", "<a", "a>", "<a><a>", "><", " <b>", "<b> ", "<b", "\n\n", "\n", "é", "éé>", "<é", "b b"]


@examples(300)
@given(
    st.dictionaries(st.sampled_from(ADDED), st.tuples(*[st.booleans()] * 3), max_size=6),
    st.lists(st.lists(st.sampled_from([*ADDED, *"<>ab \n", "\u3000", "\u200b"]), max_size=9).map("".join), max_size=6),
    st.integers(1, 9),
)
def test_random_added_tokens(flags: dict[str, Any], texts: list[str], step: int) -> None:
    """Any combination of the flags normalized, lstrip and rstrip."""
    backend = byte_level(False)
    for content, (normalized, lstrip, rstrip) in flags.items():
        backend.add_tokens([Added(content, normalized=normalized, lstrip=lstrip, rstrip=rstrip)])
    spec = bpe_spec(backend.to_str())
    if isinstance(spec, BpeSpec):  # unsupported: one strips white space with which another begins
        check(case(spec), texts, step, 64)
        check_real(case(spec, backend), [*texts, "a"], step)


def byte_level(prefix_space: bool) -> Tokenizer:
    """Return a byte-level tokenizer without merges."""
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    return tokenizer


def test_stripped_white_space_is_unicodes() -> None:
    one = made_up(Split(r"\S"), added=(AddedToken("<n>", 7, False, True, True),))
    texts = [f"a{c}{c}<n>{c}b" for c in [*WHITE_SPACE, "\u200b", "\x1c", "\u180e", "\ufeff", "x"]]
    check(one, [*texts, *("".join(texts[i:]) for i in range(5)), "<n>", " <n> ", " ", " <n>"], 1, 64)
    assert read(run(one.pretokenizer, [" <n>\u3000\n", "<n>"])) == [[7], [7]]


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 1000])
def test_texts_of_any_number(cases: dict[str, Case], count: int) -> None:
    texts = [["", "a b", "<|im_end|>", " ", "é1", ""][i % 6] for i in range(count)]
    for one in cases.values():
        check(one, texts)
        check(one, [""] * count)


def test_chunks_may_begin_anywhere(cases: dict[str, Case]) -> None:
    unit = " It's 12345 o'clock,\n\n \t x=你好ab，\u0301é<|im_end|>  ½Ⅷ\r\n🙂🙂 HTTPServer<｜end▁of▁sentence｜>é   "
    for one in cases.values():
        check(one, [unit * 2, "x", unit], *range(1, 70))
        check(one, ["y" * shift + unit for shift in range(70)])


def test_bytes_around_the_texts_have_no_effect(cases: dict[str, Case]) -> None:
    text = b"<|im_end|> a b"
    data = np.frombuffer(b"xyz " + text + b" zz|>", np.uint8)
    for one in cases.values():
        for base in (0, 1, 4):
            falls_back = np.zeros(2, bool)
            offsets = np.array([4, 4, 4 + len(text)])
            found = one.pretokenizer.pre_tokens(data[base:], offsets, base, falls_back)
            assert read((found, falls_back)) == [[], cut(one.tokenizer, text.decode())]


MEGA = 1 << 20


@pytest.mark.parametrize("unit", ["a", " ", "\n", "你", "1", "ab ", " \n"])
def test_a_text_of_a_megabyte_among_small_ones(cases: dict[str, Case], unit: str) -> None:
    """Of equal code points, where no thread can begin in the middle, and of many small pre-tokens."""
    text = unit * (MEGA // len(unit.encode())) + "x"
    for name in {"shipped", "deepseek-v3", "gemma3"} & cases.keys():
        one = cases[name]
        one.pretokenizer.step = 64
        found = read(run(one.pretokenizer, ["", "a b", text, " c"]))
        assert found[:2] + found[3:] == [cut(one.tokenizer, other) for other in ("", "a b", " c")]
        # Both ends are split like those of a shorter text, whose length leaves runs of digits the same rest.
        few = cut(one.tokenizer, unit * (4096 + MEGA // len(unit.encode()) % 93) + "x")
        assert found[2] is not None
        assert few is not None
        assert found[2][:60] == few[:60] or len(few) < 60
        assert found[2][-1] == few[-1] or len(few) == 1
        contents = {token.id: token.content for token in one.tokenizer.spec.added}
        whole = "".join(contents[piece] if isinstance(piece, int) else piece for piece in found[2])
        assert whole == text.replace(" ", "▁" if name == "gemma3" else " ")
        if name == "shipped":
            assert found[2] == cut(one.tokenizer, text)


def test_texts_at_once_have_a_limit(shipped: Case) -> None:
    data, offsets = np.zeros(1 << 31, np.uint8), np.array([0, 1 << 31])  # untouched pages are free
    with pytest.raises(ValueError, match="2,147,483,648 bytes at once"):
        shipped.pretokenizer.pre_tokens(data, offsets, 0, np.zeros(1, bool))


def test_memory_is_a_few_bytes_per_byte(cases: dict[str, Case], gsm8k: str) -> None:
    encoded = [text.encode() for text in rows([gsm8k], 1000)]
    data, offsets = np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)])
    for name in cases.keys() - {"llama2"}:  # has few letters, so that most pre-tokens are single characters
        pretokenizer = PreTokenizer(HostKernels(), cases[name].tokenizer, NO_WORDS)
        tracemalloc.start()
        pretokenizer.pre_tokens(data, offsets, 0, np.zeros(len(encoded), bool))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # If ▁ replaces spaces, the text becomes half as long again, and with it what is made of it.
        assert most < (8 if pretokenizer.rewrites else 5) * len(data), (name, most / len(data))


def _matches(table: Any, classes: list[int], start: int = 0) -> list[tuple[int, int]]:
    return split(table, "matches", classes, start, len(classes))


def _check_restarts(splitter: Splitter, strings: list[list[int]]) -> None:
    for stage in splitter.stages:
        where, table = restarts(stage).tolist(), stage.table.tolist()
        for string in strings:
            matches = _matches(table, string)
            for place in range(1, len(string)):
                kind = where[string[place - 1]][string[place]]
                if kind != NOWHERE:
                    later = [match for match in matches if match[1] > place]
                    assert later == _matches(table, string, place), (string, place)
                    assert any(match[1] == place for match in matches) == (kind == CLOSED), (string, place)


def test_restarts_do_not_depend_on_the_text_before(cases: dict[str, Case]) -> None:
    """By brute force: every short sequence of classes, or a sample, and longer ones."""
    for name, one in cases.items():
        chance, classes = random.Random(name), range(one.tokenizer.splitter.classes.count)
        strings = [[*s] for length in (2, 3) for s in itertools.product(classes, repeat=length)]
        strings = strings if name == "shipped" else chance.sample(strings, min(len(strings), 2000))
        strings += [chance.choices(classes, k=chance.randint(4, 12)) for _ in range(4000)]
        _check_restarts(one.tokenizer.splitter, strings)


def test_restarts_are_found_where_words_end(shipped: Case) -> None:
    splitter = shipped.tokenizer.splitter
    letter, space, digit, newline = splitter.classes.of(np.array([ord(c) for c in "x 1\n"])).tolist()
    where = restarts(splitter.stages[0])
    assert where[letter, space] == where[letter, newline] == where[digit, letter] == where[digit, digit] == CLOSED
    assert where[space, letter] == where[space, space] == where[letter, letter] == NOWHERE
    splitter = made_up(Digits(False)).tokenizer.splitter
    letter, digit = splitter.classes.of(np.array([ord("x"), ord("1")])).tolist()
    where = restarts(splitter.stages[0])
    assert where[letter, letter] == where[letter, digit] == OPEN
    assert (where[digit, letter], where[digit, digit]) == (CLOSED, NOWHERE)


@examples(200)
@given(
    st.lists(
        st.tuples(st.recursive(CLASSES, _wrapped, max_leaves=8), st.sampled_from(["all", "matches", "gaps"])),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.text("abc 1.\n", max_size=14), max_size=12),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
)
def test_random_patterns(patterns: Any, texts: list[str], step: int, prefix_space: bool, without_gaps: bool) -> None:
    """Several stages with any value of keep."""
    if without_gaps:
        patterns = [*patterns[:-1], (rf"{patterns[-1][0]}|\s|\S", patterns[-1][1])]
    try:
        one = made_up(*(Split(*pattern) for pattern in patterns), prefix_space=prefix_space)
    except UnsupportedRegexError:
        return
    check(one, [*texts, "abcab  1.\n\nca 11..\n" * 3], step)
    classes = one.tokenizer.splitter.classes
    _check_restarts(
        one.tokenizer.splitter, [classes.of(np.array([*map(ord, text)], np.int64)).tolist() for text in texts]
    )


@pytest.mark.parametrize("pattern", [r"\p{N}{1,3}", r"[^\r\n\p{L}\p{N}]?\p{L}+|\s+(?!\S)|\s+"])
def test_one_stage_against_the_real_one(pattern: str) -> None:
    texts = [text for unit in ("a1 ", "12 \n", "x  ", "é½ 你") for text in (unit, unit * 30, unit[::-1] * 31)]
    real: Any = {"all": ("isolated", False), "matches": ("removed", True), "gaps": ("removed", False)}
    for keep, (behavior, invert) in real.items():
        split = pre_tokenizers.Split(Regex(pattern), behavior, invert)
        found = read(run(made_up(Split(pattern, keep)).pretokenizer, texts))
        assert found == [[piece for piece, _ in split.pre_tokenize_str(text)] for text in texts]


def test_prepended_and_replaced_spaces() -> None:
    texts = ["", " ", "a", " a", "a b  c", "<n>a<n> <n>b", "<n>", "a<n>", "\u3000a", "\n", " <n> <n> x "] * 5
    steps = [[], LLAMA2, [normalizers.Replace(" ", "▁")], [normalizers.Prepend("é▁"), normalizers.Replace(" ", "<>")]]
    for backend in (byte_level(True), *(small([("▁", "a"), ("b", "▁")], some) for some in steps)):
        backend.add_tokens([Added("<n>", normalized=False)])
        check(compiled(backend), texts, 1, 2, 3, 64)
        check_real(compiled(backend), texts)


@examples(60)
@given(
    st.lists(st.sampled_from(["ab", "bc", "dé", "é你", "▁a", "a▁", "▁▁", "你▁"]), max_size=6, unique=True),
    st.lists(st.text("abcdé你ü \n𒀀", max_size=24), min_size=1, max_size=12),
    st.integers(1, 9),
)
def test_random_merges_of_characters(merged: list[str], texts: list[str], step: int) -> None:
    one = compiled(small([(two[0], two[1]) for two in merged]))
    check(one, texts, step)
    check_real(one, texts, step)
