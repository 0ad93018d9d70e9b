"""`tokenizers` 1.0 next to the installed version: used only where it returns the same ids."""

import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder_variants import VARIANTS, byte_level, fallback, split_stages, texts, unigram, word_piece
from tiers import SHARED, core, shared
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.normalizers import NFC, NFD, NFKC, BertNormalizer, Lowercase, Prepend, Replace, Strip, StripAccents
from tokenizers.pre_tokenizers import BertPreTokenizer, Digits, Metaspace, Whitespace, WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import gpuload
from gpuload.cache.key import package_versions
from gpuload.core import backends
from gpuload.engines.host import encode
from gpuload.engines.host.encode import HostEncoder, host_encoder
from gpuload.reference.reference import Reference
from gpuload.tokenizer import tokenizers1, unassigned
from gpuload.tokenizer.cuts import cut_table
from gpuload.tokenizer.spec import UnsupportedError

FOLDER = os.environ.get(tokenizers1.VARIABLE) or str(Path(__file__).parents[1] / ".venv-tokenizers1")

USED = {
    "NFC and Lowercase", "Digits", "Digits in runs", "literal", "ByteLevel, no regex", "two regexes",
    "no pre-tokenizer", "bytes, NFKC", "bytes, collapsed spaces", "bytes, nothing else", "bytes, ignore_merges",
    "Metaspace and Replace", "Unigram", "Unigram, bytes", "WordPiece",
}  # fmt: skip
"""Variants whose added tokens have no flags: those of the others are not compared."""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> str:
    """That of 1.0, named by the variable."""
    if not os.path.isdir(f"{FOLDER}/tokenizers"):
        pytest.skip("needs tokenizers 1.0: make tokenizers1-test")
    monkeypatch.setenv(tokenizers1.VARIABLE, FOLDER)
    return FOLDER


def same(backend: Tokenizer | Any, some: list[str]) -> HostEncoder:
    """Compares ids with those of the installed version."""
    tokenizer = (
        backend if hasattr(backend, "apply_chat_template") else PreTrainedTokenizerFast(tokenizer_object=backend)
    )
    reference = Reference(tokenizer, chat_template=None)
    encoder = host_encoder(reference)
    found, expected = encoder.encode(pa.array(some, pa.large_string())).to_lists(), reference.encode_many(some)
    wrong = [(t, a, b) for t, a, b in zip(some, found, expected, strict=True) if a != b]
    assert not wrong, (encoder.name, len(wrong), min(wrong, key=lambda one: len(one[0])))
    return encoder


def test_without_the_variable_nothing_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tokenizers1.VARIABLE, raising=False)
    monkeypatch.setattr(tokenizers1, "opened", None)
    encoder = same(unigram(), texts(1, 10, []))
    assert not any("tokenizers1" in reason for reason in encoder.unused)
    assert not any("tokenizers 1" in str(part) for part in package_versions())


def test_a_folder_without_it_is_said_and_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tokenizers1.VARIABLE, str(tmp_path))
    monkeypatch.delitem(tokenizers1.sys.modules, tokenizers1._NAME, raising=False)
    encoder = same(unigram(), texts(1, 10, []))
    assert encoder.name.startswith("tokenizers 0.")
    (reason,) = (reason for reason in encoder.unused if reason.startswith("tokenizers1"))
    assert f"{tokenizers1.VARIABLE}={tmp_path}: no tokenizers 1.x there: pip install --no-deps --target" in reason


def test_it_is_part_of_the_cache_key(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = package_versions()
    monkeypatch.delenv(tokenizers1.VARIABLE)
    assert [*package_versions(), folder_version(folder)] == with_it


def folder_version(folder: str) -> str:
    (info,) = Path(folder).glob("tokenizers-*.dist-info")
    return info.name.removesuffix(".dist-info").replace("-", " ")


@pytest.mark.parametrize("name", core(sorted(VARIANTS), "Digits", "Unigram", "Metaspace first True"))
def test_every_variant(name: str, folder: str) -> None:
    backend = VARIANTS[name]()
    contents = [token.content for token in backend.get_added_tokens_decoder().values()]
    encoder = same(backend, texts(len(name), 600, contents))
    assert encoder.name.startswith("tokenizers 1.") == (name in USED), encoder


def test_what_it_encodes_otherwise_the_installed_version_encodes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Punctuation of Unicode 9 and later, marks whose order 0.23's NFC does not know, and code points of Unicode 15 on.
    some = ["a\u2e43b", "a\u061db", "q\u0301\u1df6", "e\u07fd\u0316", "\U00016ff4\U00011de0 x", "plain"]
    for backend in (word_piece(), byte_level(split_stages(Digits(True)))):
        assert same(backend, some).name.startswith("tokenizers 1.")
    monkeypatch.setattr(unassigned, "texts_with_unassigned", lambda *_: encode.np.zeros(0, int))
    with pytest.raises(AssertionError, match="\u2e43"):
        same(word_piece(), some)


_NORMALIZERS = {
    "none": None, "NFC": NFC(), "NFD": NFD(), "NFKC": NFKC(), "NFKD": normalizers.NFKD(), "lower": Lowercase(),
    "accents": normalizers.Sequence([NFD(), StripAccents()]), "strip": Strip(), "prepend": Prepend("x"),
    "a": Replace("a", "bb"), "space": Replace(" ", "▁"), "BERT": BertNormalizer(),
    "cased": BertNormalizer(lowercase=False),
}  # fmt: skip
_BYTES = {
    "digits": lambda: split_stages(Digits(True), use_regex=True),
    "runs": lambda: split_stages(Digits(False), use_regex=True),
    "one": lambda: split_stages(), "literal": lambda: split_stages(pre_tokenizers.Split(" ", "merged_with_previous")),
    "words": lambda: split_stages(WhitespaceSplit()),
}  # fmt: skip
_WORDS = {
    "BERT": BertPreTokenizer, "white space": Whitespace, "split": WhitespaceSplit, "Metaspace": Metaspace,
    "never": lambda: Metaspace("▁", "never"), "no split": lambda: Metaspace("▁", "always", False), "none": lambda: None,
    "both": lambda: pre_tokenizers.Sequence([WhitespaceSplit(), Metaspace()]),
}  # fmt: skip
_CONTENTS = [
    "<n>",
    "café",
    "K",
    ";",
    "foo",
    "ab",
    "word",
    " w",
    "▁the",
    "e\u0301",
    "  ",
    "\n\n",
    "<|a|>",
    "<|a|><b>",
    "中",
    "ß",
]


@pytest.mark.parametrize("seed", core(range(24), 0, 1))
def test_combinations_of_parts(seed: int, folder: str) -> None:
    rng = random.Random(seed)
    added = tuple(AddedToken(text, normalized=False) for text in rng.sample(_CONTENTS, rng.randrange(6)))
    normalizer = rng.choice([*_NORMALIZERS.values()])
    kind = rng.choice((byte_level, fallback, unigram, word_piece))
    pre = rng.choice([*(_BYTES if kind is byte_level else _WORDS).values()])()
    name = "pre" if kind in (byte_level, fallback) else "pre_tokenizer"
    backend = kind(normalizer=normalizer, added=added, **{name: pre})
    encoder = same(backend, texts(seed, 400, [token.content for token in added]))
    refused = [reason for reason in encoder.unused if reason.startswith("tokenizers1")]
    assert encoder.name.startswith(("tokenizers 1.", "gigatoken")) or "NULL" in refused[0], encoder


@pytest.mark.parametrize(
    ("added", "pre", "reason"),
    [
        (AddedToken("<x>", normalized=True), Metaspace(), "'<x>' is normalized"),
        (AddedToken("<x>", normalized=False, lstrip=True), Metaspace(), "'<x>' is lstrip"),
        (AddedToken("<x>", normalized=False, single_word=True), Metaspace(), "'<x>' is single_word"),
        (AddedToken("<x>", normalized=False), Metaspace("▁", "first"), "first word"),
        (AddedToken("<x>", normalized=False), pre_tokenizers.UnicodeScripts(), "UnicodeScripts was not compared"),
    ],
)
def test_what_is_not_known_to_be_equal(added: AddedToken, pre: Any, reason: str) -> None:
    assert reason in str(tokenizers1.not_known_equal(unigram(added=(added,), pre_tokenizer=pre).to_str()))
    nmt = unigram(normalizer=normalizers.Sequence([NFC(), normalizers.Nmt()])).to_str()
    assert "Nmt was not compared" in str(tokenizers1.not_known_equal(nmt))


def test_ascii_that_differs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path))
    one = unigram()
    here = backends.batch_encoder(one, one.to_str)
    with pytest.raises(ValueError, match="differs on"):
        tokenizers1.differing_code_points(one.to_str(), "", here, lambda some: here([text.upper() for text in some]))


@shared
@pytest.mark.parametrize("name", ["t5-small", "bert-base-uncased"])
def test_real_tokenizers(name: str, folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    rng = random.Random(1)
    ranges = [
        (0x20, 0x7F),
        (0xA0, 0x24F),
        (0x300, 0x370),
        (0x370, 0x600),
        (0x900, 0xE00),
        (0x1100, 0x11FF),
        (0x1D00, 0x2100),
    ]
    ranges += [(0x2E00, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x10000, 0x11FFF), (0x1E000, 0x1FAFF)]
    some = ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(40))) for _ in range(2000)]
    table = pq.read_table(SHARED / "datasets" / "xquad_12lang.parquet", columns=["prompt"])
    some += [prompt[-1]["content"] for prompt in table["prompt"].to_pylist()[::40]]
    assert same(tokenizer, some).name.startswith("tokenizers 1.")


@shared
def test_a_load(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "LEAST_TOKENIZERS1", 0)
    prompts = [f"Question {number}: is \u00e9 = e\u0301 in a\u2e43b?" for number in range(500)]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "prompts.parquet")
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "bert-base-uncased", pad_token="[PAD]")
    found = gpuload.load(str(tmp_path / "prompts.parquet"), tokenizer, chat_template=None, device="cpu", verify="full")
    assert "tokenizers 1." in found.report.engine
    assert found.tokens.to_lists() == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]


@pytest.mark.parametrize("name", core(["shipped", "Unigram", "WordPiece", "DeepSeek", "Llama 2"], "shipped", "Unigram"))
def test_an_object_of_version_1(name: str, folder: str) -> None:
    """What gpuload asks of an object has the same answers, whichever version it is of."""
    old = VARIANTS[name]()
    new = tokenizers1.opened(old.to_str())
    assert (backends.is_reworked(old), backends.is_reworked(new)) == (False, True)
    flags = ("content", "normalized", "lstrip", "rstrip", "single_word", "special")
    tokens = [
        {number: [getattr(token, flag) for flag in flags] for number, token in backends.added_tokens(each).items()}
        for each in (old, new)
    ]
    assert tokens[0] == tokens[1]
    assert '"added_tokens":' in backends.serialized(new)
    assert backends.serialized(old) == old.to_str()
    if name == "shipped":
        assert backends.state(old, "normalizer") == backends.state(new, "normalizer") == {"type": "NFC"}
        with pytest.raises(UnsupportedError):  # its pre-tokenizers are written in another way
            cut_table(new)
    some = texts(3, 300, [])
    new.truncation = _module().Truncation(max_length=3)
    new.padding = _module().Padding(pad_token="<pad>", length=8)
    assert backends.stored_pad_token(new) == "<pad>"
    both = [backends.batch_encoder(each, old.to_str)(some).to_lists() for each in (old, new)]
    assert both[0] == both[1]
    assert backends.batch_encoder(new, old.to_str)([]).to_lists() == []
    assert backends.why_not_plain(new) is None


def _module() -> Any:
    return tokenizers1.sys.modules[tokenizers1._NAME]


def test_a_tokenizer_with_an_object_of_version_1(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is encoded by that object, whatever else could encode it: the others are compared with 0.2x."""
    reference = Reference(PreTrainedTokenizerFast(tokenizer_object=byte_level()), chat_template=None)
    reworked = tokenizers1.opened(reference.model_json)
    monkeypatch.setattr(Reference, "backend", property(lambda self: reworked))
    encoder = host_encoder(reference)
    assert encoder.name.startswith("tokenizers ")
    assert encoder.unused == ()
    some = texts(5, 300, ["<tool>"])
    assert encoder.encode(pa.array(some, pa.large_string())).to_lists() == reference.encode_many(some)
