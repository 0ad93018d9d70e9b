"""Tokenizers that differ from one another in one setting, for tests of all encoders; and texts that are risky."""

import json
import random
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

from test_bpe_fallback import LLAMA2, small
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Split

from gpuload.demo_data import demo_files
from gpuload.tokenizer.gigatoken import _DEEPSEEK, ONE_STAGE
from gpuload.tokenizer.spec import GPT2_PATTERN, byte_entries, byte_letters

MERGES = 1500
"""Of the shipped tokenizer. With all of them, compiling it takes seconds."""


@cache
def _shipped() -> tuple[dict[str, Any], str]:
    with open(f"{demo_files()[1]}/tokenizer.json", encoding="utf-8") as file:
        parts = json.load(file)
    (split,) = (step for step in parts["pre_tokenizer"]["pretokenizers"] if step["type"] == "Split")
    return parts["model"], split["pattern"]["Regex"]


@cache
def _model() -> tuple[dict[str, int], list[tuple[str, str]]]:
    merges = [
        tuple(merge if isinstance(merge, list) else merge.split(" ")) for merge in _shipped()[0]["merges"][:MERGES]
    ]
    entries = dict.fromkeys([*byte_letters(), *("".join(pair) for pair in merges)])
    return {entry: number for number, entry in enumerate(entries)}, merges


def byte_level(
    pre: Any = None, normalizer: Any = "NFC", added: tuple[AddedToken, ...] = (), without: str = "", **options: Any
) -> Tokenizer:
    """The shipped tokenizer with fewer merges, and other settings."""
    vocab, merges = _model()
    kept = {entry: number for number, entry in enumerate(vocab) if not without or without not in entry}
    pairs = [pair for pair in merges if "".join(pair) in kept]
    if "unk_token" in options:
        kept[options["unk_token"]] = len(vocab)
    backend = Tokenizer(models.BPE(kept, pairs, **options))
    backend.normalizer = normalizers.NFC() if normalizer == "NFC" else normalizer
    backend.pre_tokenizer = pre or split_stages(Split(Regex(_shipped()[1]), "isolated"))
    return with_tokens(backend, added)


def with_tokens(backend: Tokenizer, added: tuple[AddedToken, ...] = ()) -> Tokenizer:
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False), *added])
    return backend


def split_stages(*stages: Any, **options: Any) -> Any:
    return pre_tokenizers.Sequence([*stages, ByteLevel(**{"add_prefix_space": False, "use_regex": False} | options)])


def behavior(name: str, pattern: Any = None, invert: bool = False) -> Tokenizer:
    return byte_level(split_stages(Split(pattern or Regex(_shipped()[1]), name, invert)))


def fallback(normalizer: Any = None, pre: Any = None, **more: Any) -> Tokenizer:
    """BPE over characters with byte fallback."""
    merges = [tuple(a.replace("Ġ", "▁") for a in pair) for pair in _model()[1]]
    merges = [pair for pair in merges if all(letter == "▁" or letter.isascii() for letter in "".join(pair))]
    letters = sorted({letter for pair in merges for letter in "".join(pair)} | set("é你ñ▁ \n019_"))
    added = more.pop("added", ())
    backend = small(merges, [], "".join(letters), **more)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre
    return with_tokens(backend, added)


def trained(model: Any, trainer: Any, added: tuple[AddedToken, ...] = (), **parts: Any) -> Tokenizer:
    backend = Tokenizer(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.train_from_iterator(texts(1, 400, ["x"]), trainer)
    return with_tokens(backend, added)


def unigram(**options: Any) -> Tokenizer:
    parts: dict[str, Any] = {"pre_tokenizer": Metaspace(), "normalizer": normalizers.NFKC()} | options
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    return trained(models.Unigram(), trainer, **parts)


def unigram_with_bytes() -> Tokenizer:
    parts = json.loads(unigram().to_str())
    parts["model"]["byte_fallback"] = True
    parts["model"]["vocab"] += [[entry, -20.0] for entry in byte_entries()]
    return Tokenizer.from_str(json.dumps(parts))


def word_piece(**options: Any) -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False)
    parts: dict[str, Any] = {
        "normalizer": normalizers.BertNormalizer(),
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
        "post_processor": processors.TemplateProcessing("[UNK] $0", special_tokens=[("[UNK]", 0)]),
    }
    return trained(models.WordPiece(unk_token="[UNK]"), trainer, **(parts | options))


def _raw(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, **({"normalized": False} | flags))


MIXED = (
    _raw("<L>", lstrip=True), _raw("<R>", rstrip=True), _raw("<LR>", lstrip=True, rstrip=True), AddedToken("<n>"),
    AddedToken("<nl>", lstrip=True), AddedToken("<nr>", rstrip=True), AddedToken("<s>", special=True), _raw("word"),
)  # fmt: skip
ONE = sorted(ONE_STAGE - {GPT2_PATTERN})
SPACES = [normalizers.Replace(" ", "▁")]

VARIANTS: dict[str, Callable[[], Tokenizer]] = {
    "shipped": byte_level,
    "lstrip": lambda: byte_level(added=(_raw("<L>", lstrip=True),)),
    "rstrip": lambda: byte_level(added=(_raw("<R>", rstrip=True),)),
    "both sides": lambda: byte_level(added=(_raw("<LR>", lstrip=True, rstrip=True), _raw("<x>"))),
    "single word": lambda: byte_level(added=(_raw("foo", single_word=True), AddedToken("bar", single_word=True))),
    "normalized": lambda: byte_level(added=(AddedToken("café"), AddedToken("<n>"), AddedToken("K"))),
    "not normalized": lambda: byte_level(added=(_raw("café"), _raw("K"), _raw(";"), _raw("e\u0301"))),
    "normalized, not NFC": lambda: byte_level(added=(AddedToken("e\u0301"),)),
    "normalized without normalizer": lambda: byte_level(normalizer=None, added=MIXED),
    "white space": lambda: byte_level(added=(_raw("  "), _raw("\n\n"), _raw("\t"))),
    "white space and strip": lambda: byte_level(added=(_raw("  "), *MIXED)),
    "overlaps": lambda: byte_level(added=tuple(_raw(text) for text in ("ab", "bc", "abc", "cab", "<tool", "tool>"))),
    "overlaps of both passes": lambda: byte_level(added=(AddedToken("ab"), _raw("bc"), AddedToken("<t"))),
    "all flags": lambda: byte_level(added=MIXED),
    "no normalizer": lambda: byte_level(normalizer=None),
    "NFKC": lambda: byte_level(normalizer=normalizers.NFKC(), added=MIXED),
    "NFD": lambda: byte_level(normalizer=normalizers.NFD(), added=MIXED),
    "Lowercase": lambda: byte_level(normalizer=normalizers.Lowercase(), added=MIXED),
    "Replace": lambda: byte_level(normalizer=normalizers.Replace("a", "bb"), added=MIXED),
    "Prepend": lambda: byte_level(normalizer=normalizers.Prepend("x"), added=MIXED),
    "Strip": lambda: byte_level(normalizer=normalizers.Strip(), added=MIXED),
    "NFC and Lowercase": lambda: byte_level(
        normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    ),
    "NFC twice": lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.NFC()])),
    "Digits": lambda: byte_level(split_stages(Digits(True), Split(Regex(_shipped()[1]), "isolated"))),
    "Digits in runs": lambda: byte_level(split_stages(Digits(False), use_regex=True)),
    "removed": lambda: behavior("removed"),
    "only matches": lambda: behavior("removed", invert=True),
    "merged with previous": lambda: behavior("merged_with_previous"),
    "merged with next": lambda: behavior("merged_with_next"),
    "contiguous": lambda: behavior("contiguous"),
    "literal": lambda: behavior("isolated", " "),
    "two stages": lambda: byte_level(split_stages(Split("a", "removed"), Split(Regex(r"\p{N}{1,3}"), "isolated"))),
    "ByteLevel": lambda: byte_level(ByteLevel(add_prefix_space=False)),
    "ByteLevel, prefix": lambda: byte_level(ByteLevel(add_prefix_space=True), None, MIXED),
    "ByteLevel, prefix of a token": lambda: byte_level(ByteLevel(add_prefix_space=True), None, (_raw(" word"),)),
    "ByteLevel, no regex": lambda: byte_level(ByteLevel(add_prefix_space=False, use_regex=False)),
    "two regexes": lambda: byte_level(split_stages(Split(Regex(_shipped()[1]), "isolated"), use_regex=True)),
    "no pre-tokenizer": lambda: byte_level(pre_tokenizers.Sequence([])),
    **{
        f"regex {number}": lambda regex=regex: byte_level(split_stages(Split(Regex(regex), "isolated")), None)
        for number, regex in enumerate(ONE)
    },
    "DeepSeek": lambda: byte_level(
        split_stages(*(Split(Regex(stage.pattern), "isolated") for stage in _DEEPSEEK)), None, MIXED
    ),
    "ignore_merges": lambda: byte_level(ignore_merges=True, added=(_raw("café"), AddedToken("Ġthe"))),
    "no entry for a byte": lambda: byte_level(without="b"),
    "unknown": lambda: byte_level(without="b", unk_token="<unk>"),
    "unknown, fused": lambda: byte_level(without="b", unk_token="<unk>", fuse_unk=True),
    "subword prefix": lambda: byte_level(continuing_subword_prefix=""),
    "Llama 2": lambda: fallback(normalizers.Sequence(LLAMA2), added=(_raw("<R>", rstrip=True),)),
    "Llama 2, normalized": lambda: fallback(normalizers.Sequence(LLAMA2), added=(AddedToken("<n>"),)),
    "Gemma": lambda: fallback(SPACES[0], Split(" ", "merged_with_previous"), added=(_raw("  "), _raw("\n\n"))),
    "Gemma, single word": lambda: fallback(SPACES[0], added=(_raw("foo", single_word=True),)),
    "bytes, NFKC": lambda: fallback(normalizers.Sequence([normalizers.NFKC(), *SPACES])),
    "bytes, Strip": lambda: fallback(normalizers.Sequence([normalizers.Strip(), *SPACES]), added=MIXED),
    "bytes, collapsed spaces": lambda: fallback(normalizers.Replace(Regex(" {2,}"), "▁")),
    "bytes, nothing else": fallback,
    "bytes, ignore_merges": lambda: fallback(SPACES[0], ignore_merges=True),
    **{
        f"Metaspace {scheme} {split}": lambda scheme=scheme, split=split: fallback(
            pre=Metaspace("▁", scheme, split), added=MIXED
        )
        for scheme in ("always", "first", "never")
        for split in (True, False)
    },
    "Metaspace _": lambda: fallback(pre=Metaspace("_", "first", False)),
    "Metaspace and Replace": lambda: fallback(SPACES[0], Metaspace("▁", "always", True)),
    "Unigram": unigram,
    "Unigram, flags": lambda: unigram(added=MIXED, normalizer=normalizers.NFC()),
    "Unigram, bytes": unigram_with_bytes,
    "WordPiece": word_piece,
    "WordPiece, flags": lambda: word_piece(added=MIXED, normalizer=normalizers.NFC()),
}  # fmt: skip

FRAGMENTS = [
    " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2003", "\u2028", "\x85", "0", "5",
    "12", "1234", "٣", "½", "\u0301", "\u0323", "\u0338", "\u0345", "e\u0301", "é", "café", "cafe\u0301", "K",
    "\u212a", "\u037e", ";", "\u212b", "A\u030a", "ﬁ", "ſ", "①", "Ａ", "\uac00", "\u1100\u1161\u11a8", "İ",
    "ß", "a", "b", "c", "ab", "abc", "foo", "bar", "word", "the", " the", "It's", "'LL", "don't", "HELLO",
    "Hello", "x_y", "_", "▁", "Ġ", "Ċ", "你好", "中文。", "こんにちは", "สวัสดี", "नमस्ते", "שלום", "مرحبا", "👩‍👩‍👧",
    "🇩🇪", "👍🏽", "\x00", "\x1f", "\x7f", "\u200b", "\ufeff", "\U0010ffff", "\u0378", "=====", "!?", "<", ">",
    "<|", "{{", "/", "\u1e9b\u0323", "q\u0307\u0323", "\u0f73\u0f72", "\u2126", "𒀀", "<0x41>", "<|im_end|>",
    "<tool>", "<unk>",
]  # fmt: skip


def texts(seed: int, count: int, contents: list[str]) -> list[str]:
    """Random texts of risky fragments, and of the texts of added tokens: whole, cut, and in other forms."""
    rng = random.Random(seed)
    forms = ("NFC", "NFD", "NFKC", "NFKD")

    def piece() -> str:
        kind = rng.random()
        if kind < 0.6 or not contents:
            return rng.choice(FRAGMENTS)
        text = rng.choice(contents)
        if kind < 0.85:
            return text
        cut = rng.randrange(len(text) + 1)
        return rng.choice([text[:cut], text[cut:], text.upper(), unicodedata.normalize(rng.choice(forms), text)])

    return ["".join(piece() for _ in range(rng.randrange(1, 14))) for _ in range(count)]
