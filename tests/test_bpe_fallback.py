"""BPE over characters with byte fallback, cut where no merge can cross, compared with `tokenizers`."""

import random
from typing import Any

import pytest
from bpe_cases import made_up_merges
from hypothesis import given
from hypothesis import strategies as st
from simulator.encoder import cut_characters, encode
from test_bpe_splitter import TEXT
from tiers import SHARED, examples, shared
from tokenizers import AddedToken, Tokenizer, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Split

from gpuload.tokenizer import fallback
from gpuload.tokenizer.compiled import CompiledTokenizer, compile_spec
from gpuload.tokenizer.spec import BpeSpec, Fallback, bpe_spec, byte_entries
from gpuload.tokenizer.splitter import compile_splitter

GEMMA = SHARED / "tokenizers" / "gemma3" / "tokenizer.json"
LLAMA2 = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
Pair = tuple[CompiledTokenizer, Any]  # the compiled one, and the real one


@pytest.fixture(scope="module", params=[pytest.param("gemma3", marks=shared)])
def gemma() -> Pair:
    backend = Tokenizer.from_file(str(GEMMA))
    spec = bpe_spec(backend.to_str())
    assert isinstance(spec, BpeSpec), spec
    return compile_spec(spec), backend


def small(merged: list[tuple[str, str]], steps: Any = LLAMA2, letters: str = "abcdé你▁", **options: Any) -> Tokenizer:
    """Return a tokenizer of a few letters, all bytes, and the results of the merges."""
    entries = dict.fromkeys(["<unk>", *byte_entries(), *letters] + [a + b for a, b in merged])
    vocab = {entry: 2 * number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab, merged, byte_fallback=True, unk_token="<unk>", fuse_unk=True, **options))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def compiled(backend: Tokenizer) -> Pair:
    spec = bpe_spec(backend.to_str())
    assert isinstance(spec, BpeSpec), spec
    # Not cached: these tokenizers are made up.
    return CompiledTokenizer(spec, compile_splitter(()), fallback.build_tables(spec)), backend


def check(pair: Pair, texts: list[str]) -> None:
    tokenizer, backend = pair
    for text in texts:
        assert encode(tokenizer, text) == backend.encode(text, add_special_tokens=False).ids, repr(text)


def test_every_entry(gemma: Pair) -> None:
    """A sample of entries, reachable or not, and texts that are almost entries."""
    entries = [entry.replace("▁", " ") for entry in gemma[0].spec.vocab]
    entries = random.Random(0).sample(entries, 6000)
    entries += [" YYYY", " ::::::::", " diffformul", " yyyy", "<0x41>", "▁the"]
    check(gemma, [*entries, *(entry + "q" for entry in entries[::8]), *(entry[1:] for entry in entries[::8])])


@examples(250)
@given(text=TEXT)
def test_any_text(gemma: Pair, text: str) -> None:
    check(gemma, [text])


def test_planes_runs_and_added_tokens(gemma: Pair) -> None:
    rng = random.Random(0)
    texts = [unit * count for unit in ("a", " ", "1", "\n", "=", "你", "\U0010ffff") for count in (2, 17, 300, 3000)]
    for plane in range(17):
        for _ in range(30):
            start = rng.randrange(0x10000 - 8)
            places = [start + step for step in range(8)] + [rng.randrange(0x10000) for _ in range(8)]
            texts.append("".join(chr(plane << 16 | c) for c in places if not 0xD800 <= plane << 16 | c < 0xE000))
    for token in rng.sample(gemma[0].spec.added, 60):
        content = token.content
        texts += [content, content * 2, f"a{content}b", f" {content} ", content[:-1], content[:-1] + content]
    check(gemma, texts)


def test_parts_are_short(gemma: Pair) -> None:
    """A text of words is cut into words, not kept in one part."""
    words = cut_characters(gemma[0].tables, "▁the▁quick▁brown▁fox,▁and▁more." * 1000)
    assert max(map(len, words)) < 12


@examples(100)
@given(
    made_up_merges("abcdé你▁"),
    st.lists(st.text("abcdé你ü \n𒀀", max_size=24), min_size=1, max_size=30),
)
def test_random_merges(listed: list[tuple[str, str]], texts: list[str]) -> None:
    check(compiled(small(listed)), ["", *texts])


def test_prefix_and_replaced_spaces() -> None:
    texts = ["", " ", "a", " a", "▁a", "a b  c", "<n>a<n> <n>b"]
    for steps, expected in (
        (LLAMA2, Fallback("▁", "▁")),
        ([normalizers.Replace(" ", "▁")], Fallback("", "▁")),
        ([normalizers.Prepend(" "), normalizers.Replace(" ", "▁")], Fallback("▁", "▁")),
        ([], Fallback("", " ")),
    ):
        backend = small([("▁", "a"), ("b", "▁")], steps)
        backend.add_tokens([AddedToken("<n>", normalized=False)])
        pair = compiled(backend)
        assert pair[0].spec.fallback == expected
        check(pair, texts)
    backend = small([("▁", "a")], [normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = Split(" ", "merged_with_previous")
    check(compiled(backend), texts)


def test_rejections() -> None:
    normalized = small([])
    normalized.add_tokens([AddedToken("<n>", normalized=True)])
    split = small([], [])
    split.pre_tokenizer = Split(" ", "isolated")
    byte_level = small([])
    byte_level.pre_tokenizer = ByteLevel()
    for backend, why in (
        (normalized, "an added token is normalized, which is not supported with byte fallback"),
        (split, "the pre-tokenizer Split with byte fallback"),
        (byte_level, "the pre-tokenizer ByteLevel with byte fallback"),
        (small([], [normalizers.NFC()]), "the normalizer NFC with byte fallback"),
        (small([], [*LLAMA2, normalizers.Prepend("x")]), "the normalizer Prepend with byte fallback"),
        (small([], ignore_merges=True), "byte fallback with ignore_merges"),
        (small([("<0x41>", "a")]), "the model merges entries of its byte fallback"),
    ):
        assert why in str(bpe_spec(backend.to_str()))
