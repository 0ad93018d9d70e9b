"""The compiled vocabulary and merges, and the reference encoder that uses them, compared with `tokenizers`."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bpe_cases import made_up_merges
from hypothesis import given
from hypothesis import strategies as st
from simulator import encoder
from simulator.encoder import encode, look_up_words, to_nfc
from test_bpe_splitter import TEXT
from tiers import examples, exhaustive
from tokenizers import AddedToken, Tokenizer, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel

from gpuload.tokenizer import merges
from gpuload.tokenizer.compiled import CompiledTokenizer, compile_spec
from gpuload.tokenizer.hash_tables import hash_words
from gpuload.tokenizer.merges import build_tables, look_up_pairs, merge, merge_tables
from gpuload.tokenizer.spec import BpeSpec, bpe_spec, byte_letters
from gpuload.tokenizer.splitter import compile_splitter

LETTERS = byte_letters()
BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}
Pair = tuple[CompiledTokenizer, Any]  # the compiled one, and the real one


def compiled(backend: Tokenizer) -> Pair:
    spec = bpe_spec(backend.to_str())
    assert isinstance(spec, BpeSpec), spec
    # Not cached: these tokenizers are made up.
    return CompiledTokenizer(spec, compile_splitter(spec.stages), build_tables(spec)), backend


@pytest.fixture(scope="module")
def pairs(bpe: dict[str, Any]) -> dict[str, Pair]:
    return {name: (compile_spec(spec), backend) for name, (spec, backend) in bpe.items()}


def flat(pieces: list[bytes]) -> tuple[Any, Any]:
    return np.frombuffer(b"".join(pieces), np.uint8), np.cumsum([0, *map(len, pieces)])


def by_tables(tokenizer: CompiledTokenizer, pieces: list[bytes]) -> list[list[int]]:
    """PreTokens as the splitter would hand them on: whole words, and merges for the rest."""
    whole = look_up_words(tokenizer.tables, *flat(pieces))
    ids, offsets = merge(tokenizer.tables, *flat(pieces))
    merged = [part.tolist() for part in np.split(ids, offsets[1:-1])]
    for entry, parts in zip(whole.tolist(), merged, strict=True):
        assert entry < 0 or tokenizer.spec.ignore_merges or parts == [entry]
    return [parts if entry < 0 else [entry] for entry, parts in zip(whole.tolist(), merged, strict=True)]


def by_model(backend: Tokenizer, pieces: list[bytes]) -> list[list[int]]:
    return [[token.id for token in backend.model.tokenize("".join(LETTERS[b] for b in piece))] for piece in pieces]


def check_texts(pair: Pair, texts: list[str]) -> int:
    """Assert equal ids, and return how many texts were encoded; the others fall back."""
    tokenizer, backend = pair
    ours = [encode(tokenizer, text) for text in texts]
    for text, ids in zip(texts, ours, strict=True):
        assert ids is None or ids == backend.encode(text, add_special_tokens=False).ids, repr(text)
    return sum(ids is not None for ids in ours)


@exhaustive
def test_every_entry(pairs: dict[str, Pair]) -> None:
    """Each entry as a pre-token, reachable or not; all entries of the shipped tokenizer, a sample of the others'."""
    for name, (tokenizer, backend) in pairs.items():
        entries = [entry for entry in tokenizer.spec.vocab if entry and all(letter in BYTES for letter in entry)]
        if name != "shipped":
            entries = random.Random(name).sample(entries, 10_000)
        entries += [token.content for token in tokenizer.spec.added if all(letter in BYTES for letter in token.content)]
        words = [bytes(BYTES[letter] for letter in entry) for entry in entries]
        assert by_tables(tokenizer, words) == by_model(backend, words)
        one_more = [word + b"q" for word in words[::20]] + [word[:-1] for word in words[::20] if word[1:]]
        assert by_tables(tokenizer, one_more) == by_model(backend, one_more)


def test_bytes_and_runs(pairs: dict[str, Pair]) -> None:
    rng = np.random.default_rng(0)
    pieces = [rng.integers(0, 256, size).astype(np.uint8).tobytes() for size in (*range(1, 40), 300, 4096)]
    pieces += [rng.choice(list(b"aeinrst "), size).astype(np.uint8).tobytes() for size in (*range(1, 40), 300, 4096)]
    pieces += [
        unit * count for unit in (b"a", b" ", b"1", b"\n", b"=", b"\t", b"\xe4\xbd\xa0") for count in (2, 17, 300)
    ]
    for tokenizer, backend in pairs.values():
        assert by_tables(tokenizer, pieces) == by_model(backend, pieces)


def test_every_pair_that_merges_is_found(pairs: dict[str, Pair]) -> None:
    for tokenizer, _ in pairs.values():
        vocab, ranks = tokenizer.spec.vocab, {pair: rank for rank, pair in enumerate(tokenizer.spec.merges)}
        left, right = (np.array([vocab[pair[side]] for pair in ranks]) for side in (0, 1))
        assert (look_up_pairs(tokenizer.tables, left, right) == list(ranks.values())).all()
        assert (tokenizer.tables.merged[list(ranks.values())] == [vocab[a + b] for a, b in ranks]).all()
        others = np.random.default_rng(0).integers(0, max(vocab.values()) + 1, (2, 20_000))
        names = {number: entry for entry, number in vocab.items()}
        expected = [ranks.get((names.get(a, ""), names.get(b, "")), merges.NO_RANK) for a, b in others.T.tolist()]
        assert look_up_pairs(tokenizer.tables, *others).tolist() == expected


@examples(150)
@given(TEXT)
def test_any_text(pairs: dict[str, Pair], text: str) -> None:
    for pair in pairs.values():
        check_texts(pair, [text])


def test_every_plane(pairs: dict[str, Pair]) -> None:
    """Valid UTF-8 of every plane: words of neighbouring code points, and of random ones."""
    rng = random.Random(0)
    for pair in pairs.values():
        texts = []
        for plane in range(17):
            for _ in range(40):
                start = rng.randrange(0x10000 - 8)
                near = [plane << 16 | start + step for step in range(8)]
                far = [plane << 16 | rng.randrange(0x10000) for _ in range(8)]
                texts += ["".join(chr(c) for c in word if not 0xD800 <= c < 0xE000) for word in (near, far)]
        assert check_texts(pair, texts) > 100


def test_added_tokens(pairs: dict[str, Pair]) -> None:
    """Alone, adjacent, cut, overlapping, inside words, with white space around."""
    for name, pair in pairs.items():
        contents = [token.content for token in pair[0].spec.added]
        some = random.Random(name).sample(contents, min(len(contents), 25))
        texts = ["".join(some), " ".join(some)]
        for content in some:
            texts += [content, content * 2, f"a{content}b", f" {content} ", f"\n{content}\n", content[:-1]]
            texts += [content[:-1] + content, content + content[1:], content[0] + content, content.upper()]
        assert check_texts(pair, texts)


def small(merged: list[tuple[str, str]], normalizer: Any = None, without: str = "", **options: Any) -> Tokenizer:
    """Return a tokenizer of all bytes except some, and the results of the merges; its ids are not contiguous."""
    entries = dict.fromkeys([letter for letter in LETTERS if letter not in without] + [a + b for a, b in merged])
    vocab = {entry: 3 * number + 5 for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab, merged, **options))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def test_unreachable_entries_are_not_used() -> None:
    """`abc` comes from `ab` and `c`, but `bc` is merged before `ab` can be."""
    listed = [("b", "c"), ("a", "b"), ("ab", "c")]
    texts = ["abc", "ab", "bc", "abcabc", "aabc", "abab"]
    tokenizer, backend = compiled(small(listed))
    assert check_texts((tokenizer, backend), texts) == len(texts)
    assert encode(tokenizer, "abc") == [backend.token_to_id("a"), backend.token_to_id("bc")]
    tokenizer, backend = compiled(small(listed, ignore_merges=True))
    assert check_texts((tokenizer, backend), texts) == len(texts)
    assert encode(tokenizer, "abc") == [backend.token_to_id("abc")]


@examples(60)
@given(
    made_up_merges("abcd"),
    st.lists(st.text("abcd", min_size=1, max_size=24), min_size=1, max_size=30),
    st.booleans(),
)
def test_random_merges(listed: list[tuple[str, str]], texts: list[str], ignore_merges: bool) -> None:
    """In any order, with several ways to one entry and pairs listed twice: only ranks decide."""
    pair = compiled(small(listed, ignore_merges=ignore_merges))
    assert check_texts(pair, texts) == len(texts)


def test_a_pair_that_is_listed_twice() -> None:
    """Its last position counts. `to_str()` lists no pair twice, a file may."""
    parts = json.loads(small([("a", "b"), ("b", "c")]).to_str())
    parts["model"]["merges"] = [("a", "b"), ("b", "c"), ("a", "b")]
    spec = bpe_spec(json.dumps(parts))
    assert isinstance(spec, BpeSpec)
    tokenizer = CompiledTokenizer(spec, compile_splitter(spec.stages), build_tables(spec))
    assert check_texts((tokenizer, Tokenizer.from_str(json.dumps(parts))), ["abc", "ab", "bc", "abcab"]) == 4
    assert len(encode(tokenizer, "abc") or []) == 2
    assert encode(tokenizer, "abc") == [spec.vocab["a"], spec.vocab["bc"]]


def test_bytes_without_an_entry_are_dropped() -> None:
    pair = compiled(small([("a", "b"), ("b", "b")], without="x"))
    assert check_texts(pair, ["axb", "x", "xx", "xab", "abx", "bxbxb", ""]) == 7
    rejected = bpe_spec(small([("a", "b")], without="x", unk_token="a").to_str())
    assert isinstance(rejected, str)
    assert "the vocabulary lacks a byte" in rejected


def test_flags_of_added_tokens() -> None:
    texts = [
        "a <L> b",
        "a \n<L><L> <R> \t x",
        "<R>  <R> <L>",
        " <n>a<n>",
        "<nn><n><nn",
        "<L>",
        "x<R>\u3000\u200b",
        "<n><N> <L>",
    ]
    for normalizer in (None, normalizers.NFC()):
        backend = small([("a", "b")], normalizer)
        backend.add_tokens([AddedToken("<L>", lstrip=True, normalized=False), AddedToken("<R>", rstrip=True)])
        backend.add_tokens([AddedToken("<n", normalized=True), AddedToken("<n>", normalized=False), AddedToken("<nn>")])
        backend.add_special_tokens([AddedToken("n><", normalized=True), "a", "aa"])
        assert check_texts(compiled(backend), [*texts, *(text * 2 for text in texts), "aaa aa a"]) == 2 * len(texts) + 1


def test_prefix_space() -> None:
    backend = small([("Ġ", "a")])
    backend.pre_tokenizer = ByteLevel(add_prefix_space=True)
    backend.add_tokens(["<n>"])
    texts = ["", "a", " a", "\ta", "<n>", "<n>a<n> a<n>\u00a0a", "  a"]
    assert check_texts(compiled(backend), texts) == len(texts)


def test_text_is_normalized_or_falls_back() -> None:
    """Some marks that would have to be reordered fall back, and code points that versions of Unicode may differ on."""
    tokenizer, backend = compiled(small([], normalizers.NFC()))
    for text, expected in (
        ("plain", "plain"),
        ("é", "é"),
        ("e\u0301", "é"),
        ("e\u0323\u0302", "ệ"),
        ("\u0302e\u0301\u0316", "\u0302é\u0316"),
        ("\u212b", "Å"),
        ("\u0958", "\u0915\u093c"),
        ("한", "한"),
        ("\u1112\u1161\u11ab", "한"),
        ("q\u0301\u0323\u0316\u0302", "q\u0323\u0316\u0301\u0302"),
        ("l\u0304\u0323", None),
        ("\u0304\u0323", None),
        ("é\u0323", None),
        ("\u0344", None),
        ("\u0378", None),
    ):
        assert to_nfc(text) == expected
        assert check_texts((tokenizer, backend), [text]) == (expected is not None)


def test_to_nfc_is_nfc() -> None:
    """It agrees with the tokenizer's own normalizer."""
    nfc = normalizers.NFC()
    for c in (c for c in range(0, 0x110000, 31) if not 0xD800 <= c < 0xE000):
        for text in (chr(c), f"a{chr(c)}", f"{chr(c)}\u0301", f"\u0323{chr(c)}"):
            assert to_nfc(text) in (None, nfc.normalize_str(text)), hex(c)


def test_tables_are_cached_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path))
    spec = bpe_spec(small([("a", "b")]).to_str())
    assert isinstance(spec, BpeSpec)
    built = merge_tables(spec)
    (file,) = (tmp_path / "tables").iterdir()
    monkeypatch.setattr(merges, "build_tables", lambda _: pytest.fail("built again"))
    again = merge_tables(spec)
    assert all((getattr(built, name) == getattr(again, name)).all() for name in vars(built))
    monkeypatch.undo()
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path))
    file.write_bytes(file.read_bytes()[:100])  # damaged: rebuilt
    assert (merge_tables(spec).pairs == built.pairs).all()
    file.unlink()
    monkeypatch.setenv("GPULOAD_CACHE", "/dev/null")  # cannot be written: built anyway
    assert (merge_tables(spec).pairs == built.pairs).all()


# Words of up to 18 letters "a", and up to three others after them.
GROWING = [("a" * size, "a") for size in range(1, 18)] + [("a" * size, "b") for size in range(1, 18)]
GROWING += [("a" * size + "b", "c") for size in range(1, 18, 2)] + [("a" * 15 + "bc", "d")]


def test_words_with_equal_hashes_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are compared, so look-ups are right even if all words have the same hash."""
    for module in (merges, encoder):
        monkeypatch.setattr(module, "hash_bytes", lambda _, offsets: np.full(len(offsets) - 1, 7, np.uint64))
        monkeypatch.setattr(module, "hash_words", lambda words: np.full(len(words), 7, np.uint64))
    spec = bpe_spec(small(GROWING, ignore_merges=True).to_str())
    assert isinstance(spec, BpeSpec)
    tables = build_tables(spec)
    texts = ["a" * size + end for size in range(20) for end in ("", "b", "c", "bc", "bcd", "\0", "b\0")]
    found = look_up_words(tables, *flat([text.encode() for text in texts]))
    letter = {chr(byte): letter for letter, byte in BYTES.items()}
    assert found.tolist() == [spec.vocab.get("".join(letter[c] for c in text), -1) for text in texts]


def test_frequent_words_are_in_the_slots_of_their_hashes(pairs: dict[str, Pair]) -> None:
    """Most look-ups read one slot of 32 bytes: words with low ids are frequent."""
    for tokenizer, _ in pairs.values():
        words = tokenizer.tables.words
        used = np.flatnonzero(words[:, 2])
        assert words.dtype == np.uint64
        assert words.shape[1] * words.itemsize == 32
        assert len(used) + len(tokenizer.tables.long_ids) <= len(tokenizer.spec.vocab)
        assert len(words) >= 2 * len(used)
        mask = np.uint64(len(words) - 1)
        at_home = used[hash_words(np.ascontiguousarray(words[used, :2])) & mask == used.astype(np.uint64)]
        assert len(at_home) > 0.75 * len(used)
        low = words[used, 3] < np.quantile(words[used, 3], 0.2)
        assert np.isin(used[low], at_home).mean() > 0.93
