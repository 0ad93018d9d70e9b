"""Ids of pre-tokens from kernels on the host, compared with the models of `tokenizers` and with plain Python."""

from __future__ import annotations

import random
import re
import tracemalloc
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import test_bpe_fallback
import test_bpe_merges
from bpe_cases import made_up_merges
from hypothesis import given
from hypothesis import strategies as st
from simulator.encoder import look_up_words
from simulator.host_kernels import COMPILER, HostKernels
from simulator.races import RacingKernels
from test_bpe_fallback import GEMMA
from test_bpe_merges import BYTES, LETTERS, by_model, compiled, flat
from tiers import examples, exhaustive, shared
from tokenizers import Tokenizer

from gpuload.core.arrays import Ragged
from gpuload.engines.device import bpe, pretokenize
from gpuload.engines.device.bpe import LONGEST, Merger
from gpuload.engines.device.kernel_source import source
from gpuload.engines.device.kernels import BLOCK
from gpuload.engines.device.pretokenize import PreTokenizer, PreTokens
from gpuload.tokenizer import fallback, hash_tables, merges
from gpuload.tokenizer.compiled import CompiledTokenizer, compile_spec
from gpuload.tokenizer.spec import AddedToken, BpeSpec, bpe_spec
from gpuload.tokenizer.splitter import compile_splitter

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

GOES_ON, BEGINS, NOTHING, TOKEN, IN_TOKEN = range(5)  # marks of text.cuh
Row = list[bytes | int]  # pre-tokens, and ids of added tokens


class _Poisoned(ModuleType):
    """NumPy, except that uninitialized memory is filled with garbage."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(shape: Any, dtype: Any) -> Any:
        return np.full(shape, 0x5A5A5A5A, dtype)


class PoisonedKernels(HostKernels):
    xp = _Poisoned("poisoned")


KERNELS = PoisonedKernels()


@pytest.fixture(scope="module")
def mergers(bpe: dict[str, Any]) -> list[tuple[Merger, CompiledTokenizer, Any]]:
    """One tokenizer for each set of tables."""
    found: dict[bytes, tuple[Merger, CompiledTokenizer, Any]] = {}
    for spec, backend in bpe.values():
        tokenizer = compile_spec(spec)
        key = tokenizer.tables.pairs.tobytes() + tokenizer.tables.words.tobytes()
        if key not in found:
            found[key] = Merger(KERNELS, tokenizer.tables), tokenizer, backend
    return list(found.values())


@pytest.fixture(scope="module", params=[pytest.param("gemma3", marks=shared)])
def gemma() -> tuple[Merger, Any]:
    backend = Tokenizer.from_file(str(GEMMA))
    spec = bpe_spec(backend.to_str())
    assert isinstance(spec, BpeSpec), spec
    return Merger(KERNELS, compile_spec(spec).tables), backend


def listed(merger: Merger, rows: list[Row | None], offsets: Any = None) -> PreTokens:
    """List the pre-tokens of rows, with other bytes between them; None is a row that falls back."""
    tokens = {piece for row in rows for piece in row or () if isinstance(piece, int)}
    added = {token: f"<{token}>".encode() for token in tokens}
    data, marks, ends = bytearray(b"ab"), [NOTHING] * 2, [0]
    for row in rows:
        for piece in filter(lambda piece: piece != b"", row or ()):
            text = added[piece] if isinstance(piece, int) else piece
            kinds = (TOKEN, IN_TOKEN) if isinstance(piece, int) else (BEGINS, GOES_ON)
            data += text + b"a"
            marks += [kinds[0], *[kinds[1]] * (len(text) - 1), NOTHING]
        ends.append(len(data))
    spec = BpeSpec(False, (), False, {}, [], False, tuple(_token(*pair) for pair in added.items()), "")
    pretokenizer = PreTokenizer(
        merger._kernels, CompiledTokenizer(spec, compile_splitter(()), cast(Any, None)), merger.words
    )
    where = np.array(ends if offsets is None else offsets, np.int64)
    raw = np.frombuffer(bytes(data), np.uint8)
    return pretokenizer.listed(raw, where, 0, np.array(marks, np.uint8), np.zeros(len(where) - 1, bool))


def _token(number: int, text: bytes) -> AddedToken:
    return AddedToken(text.decode(), number, False, False, False)


def encoded(merger: Merger, found: PreTokens, falls_back: list[bool]) -> tuple[Ragged, Any]:
    """Merge, and return the ids of all rows and which of them fall back."""
    offsets, fallback = np.full(len(falls_back) + 1, -85), np.array(falls_back, bool)
    values = merger.ids(found, fallback, offsets, 1000)
    return Ragged(values, offsets - 1000), fallback


def ids_of(merger: Merger, rows: list[Row | None]) -> list[list[int]]:
    """Return the ids of rows, of which no others than the given ones fall back."""
    ids, falls_back = encoded(merger, listed(merger, rows), [row is None for row in rows])
    assert ids.values.dtype == np.int32
    assert ids.offsets.dtype == np.int64
    assert falls_back.tolist() == [row is None for row in rows]
    assert len(ids) == len(rows)
    return ids.to_lists()


def check(merger: Merger, backend: Any, pieces: list[bytes]) -> None:
    assert ids_of(merger, [[piece] for piece in pieces]) == by_model(backend, pieces)


def rows_by_reference(tokenizer: CompiledTokenizer, rows: list[Row | None]) -> list[list[int]]:
    """Return the ids according to look_up_words and merges.merge."""
    found = []
    for row in rows:
        ids: list[int] = []
        for piece in row or ():
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                whole = int(look_up_words(tokenizer.tables, *flat([piece]))[0])
                ids += [whole] if whole >= 0 else merges.merge(tokenizer.tables, *flat([piece]))[0].tolist()
        found.append(ids)
    return found


def test_every_entry(mergers: list[Any]) -> None:
    """Each entry of each vocabulary as a pre-token, reachable or not, and texts that are almost entries."""
    for merger, tokenizer, backend in mergers:
        entries = [entry for entry in tokenizer.spec.vocab if entry and all(letter in BYTES for letter in entry)]
        entries += [token.content for token in tokenizer.spec.added if all(letter in BYTES for letter in token.content)]
        words = [bytes(BYTES[letter] for letter in entry) for entry in entries]
        check(merger, backend, words)
        check(merger, backend, [word + b"q" for word in words[::20]] + [word[:-1] for word in words[::20] if word[1:]])


def test_bytes_of_every_length(mergers: list[Any]) -> None:
    rng = np.random.default_rng(0)
    sizes = (*range(1, 70), *(95, 96, 97, 127, 128, 129, 300, 1000, 2047, LONGEST - 1, LONGEST))
    pieces = [rng.integers(0, 256, size).astype(np.uint8).tobytes() for size in sizes]
    for letters in (b"aeinrst ", b"ab", b"0123456789", "的一是不了在".encode(), b" \n\t"):
        pieces += [rng.choice(list(letters), size).astype(np.uint8).tobytes() for size in sizes]
    rng.shuffle(pieces)
    for merger, _, backend in mergers:
        check(merger, backend, pieces)


def test_sizes_are_those_of_the_source() -> None:
    defined = dict(re.findall(r"#define (\w+) (\d+)\b", source()))
    sizes = {"BLOCK": BLOCK, "LONGEST": LONGEST, "BINS": bpe._BINS, "LISTED": bpe._LISTED}
    sizes |= {"SEGMENT": HostKernels.segment, "MOST_TOKEN": pretokenize._MOST_TOKEN}
    assert {name: int(defined[name]) for name in sizes} == sizes


@pytest.mark.parametrize("most_blocks", [1, 1000])
@pytest.mark.parametrize("seed", range(1, 4))
def test_any_order_of_threads(mergers: list[Any], seed: int, most_blocks: int) -> None:
    """Lanes of a warp, warps and blocks in other orders than in the other tests, and a single block that goes through
    all pre-tokens: the same ids."""

    class Limited(PoisonedKernels):
        def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
            super()._launch(name, min(blocks, most_blocks), arguments)

    rng = random.Random(seed)
    sizes = (3, 9, 17, 23, 24, 25, 33, 63, 64, 65, 200, 256, 257, 400)
    pieces = [bytes(rng.choices(b"abcdeinrst ", k=rng.choice(sizes))) for _ in range(120)]
    _, tokenizer, backend = mergers[0]
    kernels = Limited()
    kernels.seed = seed
    check(Merger(kernels, tokenizer.tables), backend, pieces)


def test_threads_that_merge_do_not_race(mergers: list[Any]) -> None:
    rng = random.Random(0)
    pieces = [bytes(rng.choices(b"abcdeinrst ", k=size)) for size in (3, 25, 33, 63, 64, 65, 200, 257, 400) * 3]
    _, tokenizer, backend = mergers[0]
    check(Merger(RacingKernels(), tokenizer.tables), backend, pieces)


@pytest.mark.parametrize("count", [1, 2, 300])
def test_equal_pieces_are_merged_once(mergers: list[Any], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces with equal bytes share their ids; those with equal lengths or prefixes do not."""
    rng = random.Random(count)
    different = [b"zqxj", b"zqxk", b"zqxjq", b"zq" * 12, b"zq" * 11 + b"qz", b"zqxj" * 40, b"zqxj" * 39 + b"zqxk"]
    pieces = rng.choices(different, k=count)
    merger, tokenizer, _ = mergers[0]
    merged: list[int] = []
    real = HostKernels._launch

    def counting(self: Any, name: str, blocks: int, arguments: list[Any]) -> None:
        merged.extend(arguments[0].tolist() if name == "merge_short" else [])  # bins of all lengths
        real(self, name, blocks, arguments)

    monkeypatch.setattr(HostKernels, "_launch", counting)
    assert ids_of(merger, [pieces, [b"zqxj"]]) == rows_by_reference(tokenizer, [pieces, [b"zqxj"]])
    assert sum(merged) == len({*pieces, b"zqxj"})


def test_runs(mergers: list[Any]) -> None:
    units = (b"a", b" ", b"1", b"\n", b"=", b"\t", b"-", b"\xff", b"ab", b"\r\n", "你".encode())
    counts = (1, 2, 3, 31, 32, 33, 64, 65, 127, 128, 129, 500, LONGEST)
    pieces = [(unit * count)[:LONGEST] for unit in units for count in counts]
    for merger, _, backend in mergers:
        check(merger, backend, pieces)


def words_of_every_plane() -> list[str]:
    """Valid UTF-8: words of neighbouring code points, and of random ones."""
    rng = random.Random(0)
    words = []
    for plane in range(17):
        for _ in range(60):
            start = rng.randrange(0x10000 - 12)
            near = [plane << 16 | start + step for step in range(12)]
            far = [plane << 16 | rng.randrange(0x10000) for _ in range(rng.choice([1, 4, 40]))]
            words += ["".join(chr(c) for c in word if not 0xD800 <= c < 0xE000) for word in (near, far)]
    return [word for word in words if word]


def test_every_plane(mergers: list[Any]) -> None:
    for merger, _, backend in mergers:
        check(merger, backend, [word.encode() for word in words_of_every_plane()])


def test_every_plane_with_byte_fallback(gemma: tuple[Merger, Any]) -> None:
    check_characters(*gemma, words_of_every_plane())


@examples(60)
@given(
    st.lists(
        st.none()
        | st.lists(
            st.binary(max_size=50)
            | st.text(max_size=20).map(str.encode)
            | st.text("abeinrst ,\n'", max_size=80).map(str.encode)
            | st.integers(0, 2**21 - 1),
            max_size=6,
        ),
        max_size=8,
    )
)
def test_rows_of_anything(mergers: list[Any], rows: list[Row | None]) -> None:
    for merger, tokenizer, _ in mergers:
        assert ids_of(merger, rows) == rows_by_reference(tokenizer, rows)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 257, 1000])
def test_any_number_of_pieces_and_rows(mergers: list[Any], count: int) -> None:
    chance = random.Random(count)
    merger, tokenizer, _ = mergers[0]
    kinds: list[Any] = [b"", b" the", b"zqxj", b"zq" * 40, "ŵöřđ".encode(), 7, 2**21 - 1, b"\xf0\x9f", b"hello"]
    pieces: Row = chance.choices(kinds, k=count)
    assert ids_of(merger, [pieces]) == rows_by_reference(tokenizer, [pieces])
    rows: list[Row | None] = []
    while pieces:
        size = chance.choice([0, 0, 1, 2, 40])
        rows.append(chance.choice([None, pieces[:size], pieces[:size]]))
        pieces = pieces[size:]
    assert ids_of(merger, rows) == rows_by_reference(tokenizer, rows)


def test_a_million_empty_rows(mergers: list[Any]) -> None:
    merger, tokenizer, _ = mergers[0]
    offsets = np.zeros(1_000_001, np.int64)
    offsets[700_000:] = len(b"abzqxja<5>a")
    ids, falls_back = encoded(merger, listed(merger, [[b"zqxj", 5]], offsets), [False] * 1_000_000)
    assert ids[699_999].tolist() == rows_by_reference(tokenizer, [[b"zqxj", 5]])[0]
    assert ids.offsets[699_999] == 0
    assert (ids.offsets[700_000:] == len(ids.values)).all()
    assert not falls_back.any()


def test_no_pieces_at_all(mergers: list[Any]) -> None:
    assert ids_of(mergers[0][0], []) == []
    assert ids_of(mergers[0][0], [None, [], None]) == [[], [], []]


def test_rows_with_too_long_pre_tokens_fall_back(mergers: list[Any]) -> None:
    """One byte more than the device merges, and a megabyte: these rows have no ids, the others are not affected."""
    for merger, tokenizer, _ in mergers:
        rows: list[Row | None] = [
            [b"zqxj" * 30, b"zqxj", 3],
            [b" the", b"x" * (LONGEST + 1), b"zqxj", 5, *[b" the"] * 100],
            [],
            None,
            [b"y" * LONGEST],
            *[[b"zqxj", b" zq"]] * 40,
            [b" " * 1_000_000],
            [4, b"zq" * 500_000, b"zq" * 500_000],
            [],
            [b" the"],
        ]
        ids, falls_back = encoded(merger, listed(merger, rows), [row is None for row in rows])
        assert np.flatnonzero(falls_back).tolist() == [1, 3, 45, 46]
        assert ids.to_lists() == rows_by_reference(
            tokenizer, [row if not gone else [] for row, gone in zip(rows, falls_back, strict=True)]
        )


def test_words_with_equal_tags_are_distinguished(mergers: list[Any]) -> None:
    """If the tags of two long words are equal, their bytes decide."""
    _, tokenizer, _ = mergers[0]
    tables = tokenizer.tables
    entries = [0, 1, 2]
    low, high = tables.long_offsets[entries], tables.long_offsets[[1, 2, 3]]
    words = [tables.long_bytes[i:j].tobytes() for i, j in zip(low, high, strict=True)]
    hashes = hash_tables.hash_bytes(*flat(words))
    # A table in which the first word comes after two others that have its tag.
    mask, table = 7, np.full(8, hash_tables.EMPTY, np.uint64)
    for step, entry in enumerate([1, 2, 0]):
        table[(int(hashes[0]) + step) & mask] = (int(hashes[0]) >> 32 << 32) | entry
    merger = Merger(KERNELS, replace(tables, long_words=table))
    assert ids_of(merger, [[words[0]]]) == [[int(tables.long_ids[0])]]


def test_short_words_that_differ_in_zeros_are_distinguished() -> None:
    """Words are padded with zeros, which a text can contain as well. They are in one full run of slots here."""
    zero = LETTERS[0]
    listed = [("a", zero), ("a" + zero, zero), (zero, zero), (zero * 2, "a"), ("b" * 2, "b" * 2)]
    tokenizer, backend = compiled(test_bpe_merges.small([("b", "b"), *listed], ignore_merges=True))
    words = tokenizer.tables.words
    run = np.roll(words[np.argsort(words[:, 2] == 0, kind="stable")], 100, axis=0)
    pieces = [b"a", b"a\0", b"a\0\0", b"\0\0a", b"\0", b"\0\0", b"bb", b"bbbb"]
    rows: list[Row | None] = [[piece] for piece in pieces]
    assert ids_of(Merger(KERNELS, tokenizer.tables), rows) == by_model(backend, pieces)
    # Look-ups that begin at the run's first slot find every word in it.
    for piece in pieces:
        start = hash_tables.hash_words(hash_tables.padded_words(*flat([piece])))[0] & np.uint64(len(words) - 1)
        moved = Merger(KERNELS, replace(tokenizer.tables, words=np.roll(run, int(start) - 100, axis=0)))
        assert ids_of(moved, [[piece]]) == by_model(backend, [piece])


@exhaustive
def test_words_of_any_length_at_any_address() -> None:
    """Also at both ends of the buffer, where words of 8 bytes would extend beyond it. Neighbouring bytes do not count,
    whatever they are."""
    tokenizer, backend = compiled(test_bpe_merges.small(test_bpe_merges.GROWING, ignore_merges=True))
    merger = Merger(KERNELS, tokenizer.tables)
    pretokenizer = PreTokenizer(KERNELS, replace(tokenizer, splitter=compile_splitter(())), merger.words)
    words = [b"a" * size + end for size in range(20) for end in (b"", b"b", b"bc", b"bcd") if size + len(end)]
    for word, ids in zip(words, by_model(backend, words), strict=True):
        for before in range(0, 19, 3):
            for after in (0, 1, 24):
                buffer = np.full(before + len(word) + after, 0xFF, np.uint8)
                buffer[before : before + len(word)] = np.frombuffer(word, np.uint8)
                marks = np.full(len(buffer), NOTHING, np.uint8)
                marks[before : before + len(word)] = [BEGINS, *[GOES_ON] * (len(word) - 1)]
                # The slice makes the first byte of the data, too, have any alignment.
                for cut in {0, before // 2, before}:
                    offsets = np.array([0, len(buffer) - cut])
                    found = pretokenizer.listed(buffer[cut:], offsets, 0, marks[cut:], np.zeros(1, bool))
                    assert encoded(merger, found, [False])[0].to_lists() == [ids]


@examples(60)
@given(
    made_up_merges("abcd"),
    st.lists(st.text("abcd", min_size=1, max_size=70), min_size=1, max_size=30),
    st.booleans(),
)
def test_random_merges(listed: list[tuple[str, str]], texts: list[str], ignore_merges: bool) -> None:
    """In any order, with several ways to one entry: only ranks decide."""
    tokenizer, backend = compiled(test_bpe_merges.small(listed, ignore_merges=ignore_merges))
    check(Merger(KERNELS, tokenizer.tables), backend, [text.encode() for text in texts])


def test_bytes_without_an_entry_are_dropped() -> None:
    tokenizer, backend = compiled(test_bpe_merges.small([("a", "b"), ("b", "b")], without="x"))
    pieces = [b"axb", b"x", b"xx", b"xab", b"abx", b"bxbxb", b"x" * 100 + b"ab" + b"x" * 40]
    check(Merger(KERNELS, tokenizer.tables), backend, pieces)


def check_characters(merger: Merger, backend: Any, words: list[str]) -> None:
    expected = [[token.id for token in backend.model.tokenize(word)] for word in words]
    assert ids_of(merger, [[word.encode()] for word in words]) == expected


def test_characters_with_byte_fallback(gemma: tuple[Merger, Any]) -> None:
    merger, backend = gemma
    entries = [entry for entry in backend.get_vocab(with_added_tokens=False) if entry]
    check_characters(merger, backend, random.Random(0).sample(entries, 20_000))
    check_characters(merger, backend, [unit * count for unit in "a 1\n=你\U0010ffff" for count in (2, 17, 300, 1024)])


@examples(100)
@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=10))
def test_any_characters_with_byte_fallback(gemma: tuple[Merger, Any], words: list[str]) -> None:
    check_characters(*gemma, words)


@examples(60)
@given(
    made_up_merges("abcdé你▁"),
    st.lists(st.text("abcdé你ü \n𒀀", min_size=1, max_size=40), min_size=1, max_size=30),
)
def test_random_merges_of_characters(listed: list[tuple[str, str]], texts: list[str]) -> None:
    backend = test_bpe_fallback.small(listed)
    spec = bpe_spec(backend.to_str())
    assert isinstance(spec, BpeSpec)
    check_characters(Merger(KERNELS, fallback.build_tables(spec)), backend, texts)


def test_memory_is_bounded_by_the_text(mergers: list[Any], gsm8k: str) -> None:
    """The peak in addition to the pre-tokens and the result, in bytes per byte of text."""
    merger, _, backend = mergers[0]
    english = [messages[0]["content"] for messages in pq.read_table(gsm8k)["prompt"].to_pylist()][:1000]
    strange = [text.translate(str.maketrans("abcdefghijklm", "ажщцдюфгхйкшм")) for text in english]
    for texts in (english, strange):
        rows: list[Row | None] = []
        for text in texts:
            spans = backend.pre_tokenizer.pre_tokenize_str(text)
            rows.append([text[low:high].encode() for _, (low, high) in spans])
        pieces = listed(merger, list(rows))
        tracemalloc.start()
        ids, _ = encoded(merger, pieces, [False] * len(rows))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        expected = backend.encode_batch(texts, add_special_tokens=False)
        assert ids.values.tolist() == [token for encoding in expected for token in encoding.ids]
        assert peak - ids.nbytes < 8 * sum(len(text.encode()) for text in texts)
