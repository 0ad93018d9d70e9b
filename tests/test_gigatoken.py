"""gigatoken is used only for configurations that it is known to encode exactly."""

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from encoder_variants import byte_level, fallback
from tiers import SHARED, exhaustive, shared
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gpuload.engines.host import encode
from gpuload.engines.host.encode import HostEncoder, host_encoder
from gpuload.reference.reference import Reference
from gpuload.tokenizer.nfc import normalized_otherwise
from gpuload.tokenizer.unassigned import texts_with_unassigned

Edit = Callable[[dict[str, Any]], None]


def edited(backend: Tokenizer, edit: Edit) -> Any:
    """A tokenizer with an edited tokenizer.json."""
    parts = json.loads(backend.to_str())
    edit(parts)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(parts)))


def check(tokenizer: Any, *texts: str) -> HostEncoder:
    """Compare each text with the tokenizer."""
    reference = Reference(tokenizer, chat_template=None)
    encoder = host_encoder(reference)
    found = encoder.encode(pa.array(texts, pa.large_string())).to_lists()
    assert found == [reference.encode(text) for text in texts]
    return encoder


def test_an_added_token_in_decomposed_text(qwen_folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer.add_tokens(["caf\u00e9"])
    encoder = check(tokenizer, "un cafe\u0301 noir", "un caf\u00e9 noir", "caf\u00e9\u0301", "cafe", "\u212bcaf\u00e9")
    assert encoder.name.startswith("gigatoken")


@pytest.mark.parametrize("content", ["<foo>", "foo", "K", "x;"])
@pytest.mark.parametrize("normalized", [False, True])
def test_an_added_token_that_normalization_changes_or_makes(content: str, normalized: bool) -> None:
    tokenizer = edited(byte_level(added=(AddedToken(content, normalized=normalized),)), lambda parts: None)
    texts = [f"a {content}{mark} b" for mark in ("", "\u0301", "\u0338", "\u0323\u0301")]
    assert check(tokenizer, *texts, "\u212a \u212a", "x\u037e").name.startswith("gigatoken")


def test_digits_before_split(qwen: Any) -> None:
    def edit(parts: dict[str, Any]) -> None:
        parts["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Digits", "individual_digits": True})

    assert not check(edited(qwen.backend_tokenizer, edit), "x  5", "a12b").name.startswith("gigatoken")


def _behavior(name: str) -> Edit:
    return lambda parts: parts["pre_tokenizer"]["pretokenizers"][0].update(behavior=name)


def _regex_twice(parts: dict[str, Any]) -> None:
    parts["pre_tokenizer"]["pretokenizers"][-1]["use_regex"] = True


def _no_regex(parts: dict[str, Any]) -> None:
    parts["pre_tokenizer"] = parts["pre_tokenizer"]["pretokenizers"][-1]


def _literal_split(parts: dict[str, Any]) -> None:
    split = {"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": False}
    parts["pre_tokenizer"]["pretokenizers"].insert(0, split)


def _prefix_space(parts: dict[str, Any]) -> None:
    parts["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True


def _suffix(parts: dict[str, Any]) -> None:
    parts["model"]["end_of_word_suffix"] = "e"


@pytest.mark.parametrize(
    "edit",
    [
        _behavior("MergedWithPrevious"), _behavior("MergedWithNext"), _behavior("Contiguous"), _behavior("Removed"),
        _regex_twice, _no_regex, _literal_split, _prefix_space, _suffix,
    ],
)  # fmt: skip
def test_settings_that_gigatoken_ignores(edit: Edit) -> None:
    encoder = check(edited(byte_level(), edit), "a banana's  in the 123 house", "  x", "it's the theme\n\n y")
    assert not encoder.name.startswith("gigatoken")
    assert any(reason.startswith("gigatoken: ") for reason in encoder.unused)


ADDED: list[tuple[list[AddedToken], list[str]]] = [
    ([AddedToken("foo", single_word=True)], ["food foo barfoo", "foo_ _foo foo1 \u00e9foo"]),
    ([AddedToken("  "), AddedToken("<R>", rstrip=True)], ["a<R>  b", "a<R>    b"]),
    ([AddedToken("x "), AddedToken("<L>", lstrip=True)], ["ax  <L>", "x <L>"]),
    ([AddedToken("ab", normalized=True), AddedToken("bc", normalized=False)], ["abc", "abbc"]),
    ([AddedToken("abc", normalized=True), AddedToken("b", normalized=False)], ["abc", "ab"]),
]


@pytest.mark.parametrize(("added", "texts"), ADDED, ids=lambda value: None)
@pytest.mark.parametrize("backend", [byte_level, fallback])
def test_added_tokens_that_gigatoken_confuses(
    backend: Callable[[], Tokenizer], added: list[AddedToken], texts: list[str]
) -> None:
    tokenizer = edited(backend(), lambda parts: None)
    tokenizer.add_tokens(added)
    assert not check(tokenizer, *texts).name.startswith("gigatoken")


def test_added_white_space_after_rstrip(qwen_folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer.add_tokens(["  ", AddedToken("<R>", rstrip=True)])
    check(tokenizer, "a<R>  b")


@shared
def test_single_words_of_gemma() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "gemma3")
    tokenizer.add_tokens([AddedToken("foo", single_word=True)])
    check(tokenizer, "food foo barfoo")


EVERY = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
MARKS = [c for c in EVERY if unicodedata.combining(c)]


def known(characters: list[str]) -> list[str]:
    """Those that gigatoken encodes: texts with others fall back to `tokenizers`."""
    data = "".join(characters).encode()
    offsets = np.cumsum([0, *(len(c.encode()) for c in characters)])
    rows = texts_with_unassigned(np.frombuffer(data, np.uint8), offsets, normalized_otherwise())
    others = {characters[row] for row in rows}
    return [c for c in characters if c not in others]


def check_nfc(texts: list[str]) -> None:
    tokenizer = edited(byte_level(), lambda parts: None)
    encoder, backend = host_encoder(Reference(tokenizer, chat_template=None)), tokenizer.backend_tokenizer
    assert encoder.name.startswith("gigatoken")
    found = encoder.encode(pa.array(texts, pa.large_string())).to_lists()
    expected = [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=False)]
    wrong = [text for text, one, right in zip(texts, found, expected, strict=True) if one != right]
    assert not wrong, (len(wrong), [hex(ord(c)) for c in min(wrong, key=len)[:9]])


@exhaustive
def test_nfc_every_code_point() -> None:
    """Alone, after a letter, and among marks of the highest and the lowest class. Without the planes of private use."""
    some = known(EVERY[:-0x20000])
    assert len(some) > 140_000
    check_nfc([f"{c} e{c} q\u0345{c}\u0334" for c in some])


def test_nfc_every_pair_of_marks() -> None:
    some = known(MARKS)
    assert len(some) > 800
    check_nfc(["".join(f"a{one}{other}" for other in some) for one in some])


def test_nfc_marks_that_versions_of_unicode_normalize_differently() -> None:
    """Lao, Telugu, Arabic and others, which `tokenizers` takes for no marks, and a pair that it does not compose."""
    some = [chr(c) for c in normalized_otherwise()]
    assert {*"\u0c3c\u0eba\u0898\u08d3\u1abf\u1ace\U00011930"} <= {*some}
    check_nfc([f"{letter}{mark}{one}\u0323" for mark in "\u0301\u0345" for one in some for letter in "qe"])
    check_nfc(["\U00011935\U00011930", "\U00011938\u0323", *some])
    check_nfc([f"a{one}{other}" for one in some for other in some])
    # Most marks are not concerned, or Vietnamese and Arabic texts would all be encoded by `tokenizers`.
    assert len(some) < 200
    assert known([*"\u0301\u0323\u064e\u093c\u3099"]) == [*"\u0301\u0323\u064e\u093c\u3099"]


@pytest.mark.parametrize("most", [1, 40, 10**6])
def test_tokenizers_encodes_some_texts_at_a_time(most: int, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results take much more memory than the ids."""
    monkeypatch.setattr(encode, "_CALL_BYTES", most)
    encoder = encode._tokenizers(Reference(qwen))
    texts = ["", "one", "two words", "\u00e9 " * 30, "", "three", "x" * 41, "", ""]
    for some in (texts, texts[4:], [""], []):
        column = pa.array(["before", *some], pa.large_string()).slice(1)
        assert encoder.encode(column).to_lists() == [qwen(text)["input_ids"] for text in some]
