"""A tokenizer read as plain data, or one sentence why it is not supported."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split, WhitespaceSplit

from gpuload.tokenizer import spec
from gpuload.tokenizer.spec import GPT2_PATTERN, BpeSpec, bpe_spec


def backend(pre: Any = None, normalizer: Any = None, model: Any = None) -> Tokenizer:
    vocab = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))} | {"ab": 999}
    tokenizer = Tokenizer(model or models.BPE(vocab, [("a", "b")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False) if pre is None else pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def read(tokenizer: Tokenizer) -> BpeSpec:
    found = bpe_spec(tokenizer.to_str())
    assert isinstance(found, BpeSpec), found
    return found


def test_plain() -> None:
    found = read(backend())
    assert found.stages == (spec.Split(GPT2_PATTERN),)
    assert list(found.merges) == [("a", "b")]
    assert found.vocab["ab"] == 999
    assert [found.nfc, found.prefix_space, found.ignore_merges, found.added] == [False, False, False, ()]


def test_stages_in_sequences() -> None:
    pre = Sequence(
        [
            Sequence([Digits(individual_digits=True), Split(Regex("a+"), "isolated", invert=True)]),
            Split(Regex("b"), "removed", invert=True),
            Split("c.(", "removed"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found = read(backend(pre, normalizers.Sequence([normalizers.NFC()])))
    assert found.nfc
    assert found.stages == (
        spec.Digits(individual=True),
        spec.Split("a+"),
        spec.Split("b", "matches"),
        spec.Split("c\\.\\(", "gaps"),
    )


def test_prefix_space() -> None:
    assert read(backend(ByteLevel(add_prefix_space=True))).prefix_space


def test_merges_as_strings_and_no_type() -> None:
    parts = json.loads(backend().to_str())
    parts["model"]["merges"] = ["a b"]
    del parts["model"]["type"]
    found = bpe_spec(json.dumps(parts))
    assert isinstance(found, BpeSpec)
    assert list(found.merges) == [("a", "b")]


def test_added_tokens_and_flags() -> None:
    tokenizer = backend()
    tokenizer.add_tokens([AddedToken("<l>", lstrip=True, normalized=False), AddedToken("<r>", rstrip=True)])
    tokenizer.add_special_tokens([f"<{number}>" for number in range(3000)])
    added = read(tokenizer).added
    assert len(added) == 3002
    assert added[0] == spec.AddedToken("<l>", added[0].id, normalized=False, lstrip=True, rstrip=False)
    assert added[1].rstrip
    assert added[1].normalized


def test_truncation_and_padding_do_not_matter() -> None:
    tokenizer = backend()
    before = read(tokenizer)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    after = read(tokenizer)
    assert (before.stages, before.vocab, before.merges) == (after.stages, after.vocab, after.merges)


def test_white_space_is_what_strip_takes() -> None:
    """Every code point, compared with what an added token strips."""
    tokenizer = backend()
    tokenizer.add_tokens([AddedToken("<r>", rstrip=True, normalized=False)])
    code_points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000 and (c < 0x3100 or c % 97 == 0)]
    stripped = [c for c in code_points if len(tokenizer.encode("<r>" + chr(c)).ids) == 1]
    assert "".join(map(chr, stripped)) == spec.WHITE_SPACE


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (Tokenizer(models.WordPiece({"a": 0}, unk_token="a")), "the model is WordPiece, not BPE"),
        (Tokenizer(models.Unigram([("a", 0.0)], 0)), "the model is Unigram, not BPE"),
        (backend(model=models.BPE({"a": 0}, [], dropout=0.1)), "dropout"),
        (backend(model=models.BPE({"a": 0}, [], byte_fallback=True)), "its vocabulary lacks an entry for some byte"),
        (backend(model=models.BPE({"a": 0}, [], end_of_word_suffix="_")), "end_of_word_suffix"),
        (backend(Metaspace()), "does not end with ByteLevel"),
        (backend(Sequence([WhitespaceSplit(), ByteLevel()])), "the pre-tokenizer WhitespaceSplit is not supported"),
        (
            backend(Sequence([Digits(), ByteLevel(add_prefix_space=True)])),
            "add_prefix_space after another pre-tokenizer",
        ),
        (
            backend(Sequence([Split("a", "contiguous"), ByteLevel(False)])),
            "Split with behavior Contiguous is not supported",
        ),
        (backend(normalizer=normalizers.NFKC()), "the normalizer NFKC is not supported"),
    ],
)
def test_unsupported_tokenizers(tokenizer: Tokenizer, why: str) -> None:
    found = bpe_spec(tokenizer.to_str())
    assert isinstance(found, str)
    assert why in found


def test_unsupported_added_tokens() -> None:
    for tokens, why in (
        ([AddedToken("w", single_word=True)], "single_word"),
        ([AddedToken("<r>", rstrip=True), AddedToken(" x")], "with rstrip could remove the white space"),
    ):
        tokenizer = backend()
        tokenizer.add_tokens(tokens)
        found = bpe_spec(tokenizer.to_str())
        assert isinstance(found, str)
        assert why in found
