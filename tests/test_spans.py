"""Loss masks: tokens of byte spans, compared with transformers' loop over `char_to_token`."""

import json
import random
import re
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from encoder_variants import MIXED, VARIANTS, byte_level, fallback, texts, with_tokens
from hypothesis import given
from hypothesis import strategies as st
from test_bpe_splitter import TEXT
from tiers import SHARED, shared_tokenizers, with_shared
from tokenizers import AddedToken, Tokenizer, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

import gpuload
from gpuload.core.arrays import Ragged
from gpuload.core.errors import TokenizerError
from gpuload.demo_data import demo_files
from gpuload.engines.host import spans as module
from gpuload.engines.host.spans import TokenSpans
from gpuload.engines.host.token_search import TokenSearch
from gpuload.reference.mask_rules import mask_rules
from gpuload.reference.reference import Reference
from gpuload.reference.template_call import TemplateCall

Spans = list[tuple[int, int]]  # of characters

# Of the real tokenizers, those whose tokens do not lie end to end.
SLOW = {"bert-base-uncased": "the model is WordPiece, not BPE", "t5-small": "the model is Unigram, not BPE"}


# Of the variants, those that are searched. The small ones with byte fallback use some ids twice, see `renumbered`.
FAST = {
    "ByteLevel", "ByteLevel, no regex", "ByteLevel, prefix of a token", "DeepSeek", "Digits", "Digits in runs",
    "NFC twice", "ignore_merges", "literal", "no normalizer", "normalized", "normalized without normalizer",
    "not normalized", "overlaps", "overlaps of both passes", "shipped", "subword prefix", "two regexes", "white space",
}  # fmt: skip


@cache
def real(name: str) -> tuple[Reference, TokenSpans]:
    reference = Reference(demo_files()[1] if name == "shipped" else SHARED / "tokenizers" / name, chat_template=None)
    return reference, TokenSpans(reference)


def made_up(backend: Tokenizer) -> tuple[Reference, TokenSpans]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    if backend.pre_tokenizer is not None:  # transformers 4.57 takes its prefix away
        tokenizer.backend_tokenizer.pre_tokenizer = backend.pre_tokenizer
    reference = Reference(tokenizer, chat_template=None)
    return reference, TokenSpans(reference)


def as_transformers(tokenizer: Any, text: str, spans: Spans, overlapping: bool = False) -> list[int]:
    """The loop of `apply_chat_template(..., return_assistant_tokens_mask=True)` for one text, as 5.24 or those before
    have it."""
    encoded = tokenizer(text, add_special_tokens=False)
    mask = [0] * len(encoded["input_ids"])
    if overlapping:
        ahead = list(spans)
        for token, (begin, stop) in enumerate(encoded.encodings[0].offsets):
            while ahead and ahead[0][1] <= begin:
                ahead.pop(0)
            mask[token] = int(bool(ahead) and ahead[0][0] < stop)
        return mask
    for start, end in spans:
        if end == 0:  # transformers raises OverflowError
            continue
        first, last = encoded.char_to_token(0, start), encoded.char_to_token(0, end - 1)
        if first is None:
            break
        for token in range(first, last + 1 if last else len(mask)):
            mask[token] = 1
    return mask


def ones(spans: Any) -> Any:
    return np.ones(len(spans), np.int32)


def masks(
    reference: Reference, spans: TokenSpans, rows: Sequence[tuple[str, Spans]], overlapping: bool = False
) -> list[list[int]]:
    """The masks of all rows in one call."""
    if not rows:
        return []
    spans.overlapping = overlapping
    ids = Ragged.from_lists(reference.encode_many([text for text, _ in rows]))
    edges = [
        (row, len(text[:start].encode()), len(text[:end].encode()))
        for row, (text, of_row) in enumerate(rows)
        for start, end in of_row
    ]
    number, start, end = np.array(edges, np.int64).reshape(-1, 3).T
    # A slice, whose buffers have more than its own bytes.
    text = pa.array(["before \u4f60", *(text for text, _ in rows), "after"], pa.large_string())[1:-1]
    mask = spans.bits(text, ids, number, start, end, ones(number))
    assert mask.dtype == np.int32
    return [part.astype(int).tolist() for part in np.split(mask, ids.offsets[1:-1])]


def check(
    reference: Reference, spans: TokenSpans, rows: Sequence[tuple[str, Spans]], rules: Sequence[bool] = (False, True)
) -> None:
    for overlapping in rules:
        for (text, of_row), mask in zip(rows, masks(reference, spans, rows, overlapping), strict=True):
            assert mask == as_transformers(reference.tokenizer, text, of_row, overlapping), (text, of_row, overlapping)


def cut(rng: random.Random, text: str) -> Spans:
    """Random spans, of which some are empty, or begin where the one before ends."""
    places = sorted(rng.choices(range(len(text) + 1), k=2 * rng.randrange(5)))
    return list(zip(places[::2], places[1::2], strict=True))


def rows_of(reference: Reference, seed: int, count: int) -> list[tuple[str, Spans]]:
    rng = random.Random(seed)
    contents = reference.special_texts()[:60]
    rows = [(text, cut(rng, text)) for text in texts(seed, count, contents)]
    return rows + [(text, [(0, len(text))]) for text, _ in rows[: count // 8]]


# -- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", with_shared(shared_tokenizers, "shipped"))
def test_real_tokenizers(name: str) -> None:
    reference, spans = real(name)
    check(reference, spans, rows_of(reference, 1, 800))
    assert (spans.slow or "").endswith(SLOW.get(name, ""))
    assert (spans.slow is not None) == (name in SLOW)


@pytest.mark.parametrize("name", with_shared(shared_tokenizers, "shipped"))
def test_every_character_alone(name: str) -> None:
    """Each character of a text with many kinds of them is the only one with loss: where it has a token, exactly its
    tokens; nothing depends on the other spans."""
    reference, spans = real(name)
    text = " It's 1234\u00a0 caf\u00e9 \u4f60\u597d\U0001f469\u200d\U0001f467 \U000120a0\n\n x\u0e2a\u0e27\u0e31  "
    check(reference, spans, [(text, [(place, place + 1)]) for place in range(len(text))])
    check(reference, spans, [(text, [(place, place)]) for place in range(len(text) + 1)])


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_variants(name: str) -> None:
    reference, spans = made_up(VARIANTS[name]())
    check(reference, spans, rows_of(reference, 2, 100))
    assert (spans.slow is None) == (name in FAST or name.startswith("regex ")), spans.slow


def renumbered(name: str) -> tuple[Reference, TokenSpans]:
    """A variant with byte fallback and other added tokens, without gaps in its vocabulary."""
    parts = json.loads(VARIANTS[name]().to_str())
    parts["model"]["vocab"] = {entry: number for number, entry in enumerate(parts["model"]["vocab"])}
    backend = with_tokens(Tokenizer.from_str(json.dumps(parts | {"added_tokens": []})))
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("  ", "\n\n", "a b", "\u2581c")])
    return made_up(backend)


@pytest.mark.parametrize(
    "name", sorted(name for name in VARIANTS if re.match("Gemma$|Llama 2$|Metaspace (always|first|never)", name))
)
def test_byte_fallback(name: str) -> None:
    """The prefix of Llama 2 and Metaspace is in a text's tokens or not; that is seen in every text."""
    reference, spans = renumbered(name)
    assert spans.slow is None
    check(reference, spans, rows_of(reference, 9, 300))


TRIMS: dict[str, Any] = {
    "ByteLevel": processors.ByteLevel(trim_offsets=True, add_prefix_space=False),
    "ByteLevel, first": processors.ByteLevel(trim_offsets=True, add_prefix_space=True),
    "Roberta": processors.RobertaProcessing(("<|im_end|>", 1), ("<|im_start|>", 0), True, False),
    "Roberta, first": processors.RobertaProcessing(("<|im_end|>", 1), ("<|im_start|>", 0), True, True),
    "in a sequence": processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True, add_prefix_space=True),
            processors.TemplateProcessing("<|im_start|> $0", special_tokens=[("<|im_start|>", 0)]),
        ]
    ),
}
SPACES = [" a  b ", "  a", " ", "   ", "  \u4f60 \u597d   x", "a <|im_end|> b", "\n \n", " <|im_end|>  ", "a\u3000 b"]


def trimming(processor: Any, *added: AddedToken, **parts: Any) -> tuple[Reference, TokenSpans]:
    backend = byte_level(added=added, **parts)
    backend.post_processor = processor
    return made_up(backend)


@pytest.mark.parametrize("name", sorted(TRIMS))
def test_offsets_without_white_space(name: str) -> None:
    reference, spans = trimming(TRIMS[name])
    assert spans.slow is None
    edges = [(text, [(a, b)]) for text in SPACES for a in range(len(text) + 1) for b in range(a, len(text) + 1)]
    check(reference, spans, edges + rows_of(reference, 3, 300))


def with_processor(backend: Tokenizer, processor: Any) -> Tokenizer:
    backend.post_processor = processor
    return backend


def with_token(content: str, **flags: bool) -> Tokenizer:
    return byte_level(added=(AddedToken(content, normalized=False, **flags),))


NOT_SUPPORTED: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "two processors": (
        lambda: with_processor(byte_level(), processors.Sequence([TRIMS["ByteLevel"], TRIMS["Roberta"]])),
        "trims offsets twice",
    ),
    "token of white space": (
        lambda: with_processor(with_token(" \t"), TRIMS["ByteLevel"]),
        "trims white space of added tokens",
    ),
    "token of letters for spaces": (
        lambda: with_processor(with_token("\u0120\u0120"), TRIMS["ByteLevel"]),
        "trims white space of added tokens",
    ),
    "byte fallback": (
        lambda: with_processor(VARIANTS["Gemma"](), TRIMS["ByteLevel"]),
        "trims offsets of a tokenizer with byte fallback",
    ),
    "no spaces": (lambda: fallback(normalizers.Replace(" ", "")), "removes spaces"),
    "lstrip": (lambda: with_token("<L>", lstrip=True), "can drop parts of a text"),
    "rstrip": (lambda: with_token("<R>", rstrip=True), "can drop parts of a text"),
    "gaps": (VARIANTS["removed"], "can drop parts of a text"),
    "no entry for a byte": (VARIANTS["no entry for a byte"], "can drop parts of a text"),
    "prefix": (
        lambda: byte_level(ByteLevel(add_prefix_space=True), None, (AddedToken("<L>", lstrip=True),)),
        "can drop parts of a text",
    ),
    "Llama 2": (VARIANTS["Llama 2"], "can drop parts of a text"),
}


@pytest.mark.parametrize("name", sorted(NOT_SUPPORTED))
def test_what_is_not_supported(name: str) -> None:
    make, reason = NOT_SUPPORTED[name]
    reference, spans = made_up(make())
    assert reason in (spans.slow or "")
    check(reference, spans, rows_of(reference, 4, 100))


def test_a_tokenizer_that_encodes_in_a_way_of_its_own() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), split_special_tokens=True)
    reference = Reference(tokenizer, chat_template=None)
    spans = TokenSpans(reference)
    assert "split_special_tokens is set" in (spans.slow or "")
    check(reference, spans, [("a <|im_end|> b", [(2, 6), (8, 12)])])


def test_white_space_that_added_tokens_strip() -> None:
    """Without a normalizer, only the texts in which white space is really stripped are encoded again."""
    reference, spans = trimming(processors.ByteLevel(trim_offsets=False), *MIXED, normalizer=None)
    assert spans.slow is None
    check(reference, spans, rows_of(reference, 5, 400))


def test_an_id_of_two_tokens() -> None:
    """Ids of a vocabulary may have gaps; `tokenizers` numbers added tokens without looking."""
    parts = json.loads(byte_level().to_str())
    added = {token["content"]: token["id"] for token in parts["added_tokens"]}
    first = next(entry for entry, number in parts["model"]["vocab"].items() if number == 300)
    parts["model"]["vocab"][first] = added["<tool>"]
    backend = Tokenizer.from_str(json.dumps(parts))
    backend.add_tokens(["<new>"])
    reference, spans = made_up(backend)
    assert "has the id of another entry" in (spans.slow or "")
    check(reference, spans, rows_of(reference, 6, 50))


def test_a_slow_tokenizer() -> None:
    from transformers import ByT5Tokenizer

    reference = Reference(ByT5Tokenizer(), chat_template=None)
    with pytest.raises(ValueError, match="not available when using Python based"):
        reference.tokenizer("a").char_to_token(0, 0)
    with pytest.raises(TokenizerError, match="ByT5Tokenizer is a slow tokenizer"):
        TokenSpans(reference)


# -- rules of transformers before 5.24, and of 5.24 ------------------------------------------------------------------

WORDS = "One two three four"


@pytest.mark.parametrize(
    ("of_row", "expected"),
    [
        ([(4, 7)], [0, 1, 0, 0]),
        ([(3, 8)], [0, 1, 1, 0]),
        ([(0, 7), (14, 18)], [1, 1, 0, 1]),
        ([(5, 6), (6, 7)], [0, 1, 0, 0]),  # one token of two spans
        ([(0, 18)], [1, 1, 1, 1]),
        ([], [0, 0, 0, 0]),
        ([(1, 2)], [1, 1, 1, 1]),  # the end is in token 0
        ([(5, 5)], [0, 1, 0, 0]),  # empty, inside a token
        ([(7, 7)], [0, 0, 0, 0]),  # empty, between two tokens
        ([(3, 3)], [0, 1, 1, 1]),  # empty, and the end is in token 0
        ([(8, 9), (18, 18)], [0, 0, 1, 0]),  # empty, at the end of the text
        ([(0, 0), (8, 9)], [0, 0, 1, 0]),  # transformers raises an error for the empty span
    ],
)
def test_rules(of_row: Spans, expected: list[int]) -> None:
    reference, spans = real("shipped")
    assert as_transformers(reference.tokenizer, WORDS, of_row) == expected
    # The rows around it have no part in it.
    assert masks(reference, spans, [("x y", [(2, 3)]), (WORDS, of_row), ("z", [])]) == [[0, 1], expected, [0]]


@pytest.mark.parametrize(
    ("of_row", "expected"),
    [
        ([(1, 2)], [1, 0, 0, 0]),
        ([(3, 8)], [0, 1, 1, 0]),
        ([(5, 6), (6, 7)], [0, 1, 0, 0]),  # one token of two spans
        ([(5, 5)], [0, 1, 0, 0]),  # empty, inside a token
        ([(3, 3), (7, 7)], [0, 0, 0, 0]),  # empty, between two tokens
        ([(8, 9), (18, 18)], [0, 0, 1, 0]),  # empty, at the end of the text
        ([(0, 0), (8, 9)], [0, 0, 1, 0]),
    ],
)
def test_rules_for_overlapping_tokens(of_row: Spans, expected: list[int]) -> None:
    reference, spans = real("shipped")
    assert as_transformers(reference.tokenizer, WORDS, of_row, overlapping=True) == expected
    rows = [("x y", [(2, 3)]), (WORDS, of_row), ("z", [])]
    assert masks(reference, spans, rows, overlapping=True) == [[0, 1], expected, [0]]


def test_all_tokens_of_a_character_overlap() -> None:
    """An answer that ends with a character of several tokens; the rule of before marks only the first of them."""
    reference, spans = real("shipped")
    text = "a \U000120a0 b"
    tokens = len(reference.encode(text)) - 2
    assert tokens > 2
    assert masks(reference, spans, [(text, [(0, 3)])], overlapping=True) == [[1] * (tokens + 1) + [0]]
    assert masks(reference, spans, [(text, [(0, 3)])])[0][tokens] == 0


def test_rules_for_white_space_without_a_token() -> None:
    reference, spans = trimming(TRIMS["ByteLevel"])
    text = "<tool> <|im_end|><tool>"
    for of_row, expected in (
        ([(6, 17), (17, 23)], [0, 0, 0, 0]),  # the first span starts at a space: it ends the row
        ([(7, 17)], [0, 0, 1, 0]),
        ([(0, 7), (17, 23)], [1, 1, 1, 1]),  # it ends at a space: everything to the end of the row
    ):
        assert as_transformers(reference.tokenizer, text, of_row) == expected
        assert masks(reference, spans, [(text, of_row)]) == [expected]


@pytest.mark.parametrize("turns", ["conversation", "served"])
def test_answers_that_begin_and_end_with_characters_without_tokens(turns: Any) -> None:
    """Line breaks that a normalizer drops, and a template without blocks: never loss on what others say."""
    backend = byte_level(added=[AddedToken(each, special=True) for each in ("<|im_start|>", "<|im_end|>")])
    backend.normalizer = normalizers.Strip()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    chats = [
        [{"role": role, "content": start + text + end} for text in (f"{number} a", f"{number} b") for role in ROLES]
        for number, (start, end) in enumerate([("", ""), ("\n", ""), ("", "\n"), (" \n", "  ")])
    ]
    table = pa.table({"messages": chats})
    rows = gpuload.load_chats(
        table, tokenizer, chat_template=CHATML, turns=turns, verify="full", strict=True, token_cache=False
    )
    assert len(rows) == len(chats)
    for row, messages in zip(rows, chats, strict=True):
        text = "".join("<|im_start|>{role}\n{content}<|im_end|>\n".format(**message) for message in messages)
        parts = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        answers = [(found.end(), text.index("<|im_end|>", found.end()) + 10) for found in HEADER.finditer(text)]
        inside = [any(start < b and a < end for start, end in answers) for a, b in parts["offset_mapping"]]
        if turns == "served":  # what is behind the ids of the prompt
            ends = [
                [len(tokenizer(text[:at], add_special_tokens=False)["input_ids"]) for at in each] for each in answers
            ]
            inside = [any(start <= token < end for start, end in ends) for token in range(len(inside))]
        assert row["input_ids"] == parts["input_ids"]
        assert [label != -100 for label in row["labels"]] == inside
        assert 0 < sum(inside) < len(inside) - 8


ROLES = ("user", "assistant")
HEADER = re.compile(r"<\|im_start\|>assistant\n")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_generation_blocks() -> None:
    """The masks are those of `apply_chat_template` itself."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    )
    rng = random.Random(7)
    contents = iter(texts(7, 1200, ["<|im_end|>", "<|im_start|>assistant\n"]))
    conversations = [
        [{"role": rng.choice(["user", "assistant"]), "content": next(contents)} for _ in range(rng.randrange(1, 7))]
        for _ in range(150)
    ]
    for reference, spans in (real("shipped"), trimming(TRIMS["ByteLevel"]), trimming(None, normalizer=None)):
        rows: list[tuple[str, Spans]] = []
        for messages in conversations:
            text, of_row = "", []
            for message in messages:
                text += f"<|im_start|>{message['role']}\n"
                turn = f"{message['content']}<|im_end|>"
                if message["role"] == "assistant":
                    of_row.append((len(text), len(text) + len(turn)))
                text += f"{turn}\n"
            rows.append((text, of_row))
        for messages, mask in zip(conversations, masks(reference, spans, rows, mask_rules().overlapping), strict=True):
            expected = reference.tokenizer.apply_chat_template(
                messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
            )
            assert mask == expected["assistant_masks"], messages


STARTS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("shapes", [1, 60])
@pytest.mark.parametrize("loss_on", ["assistant", "last"])
def test_blocks_at_the_start_and_characters_of_several_tokens(qwen: Any, shapes: int, loss_on: Any) -> None:
    """Releases of transformers do not agree on them: loads have the masks of the installed one, unchecked, too."""
    chats = [
        [
            *([{"role": "assistant", "content": f"hello you {number}"}] * (start > 0)),
            {"role": "user", "content": "abc" if number % 3 else ""},
            *(
                {"role": "assistant", "content": f"fine \U000120a0{number}\U000120a0"}
                for _ in range(1 + number % shapes)
            ),
            {"role": "user", "content": " "},
        ]
        for start in (0, 1)
        for number in range(60)
    ]
    options: dict[str, Any] = {"chat_template": STARTS, "verify": "off", "token_cache": False, "loss_on": loss_on}
    rows = gpuload.load_chats(pa.table({"messages": chats}), qwen, **options)
    assert len(rows) == len(chats)
    for row, messages in zip(rows, chats, strict=True):
        encoded = qwen.apply_chat_template(
            messages, chat_template=STARTS, return_dict=True, return_assistant_tokens_mask=True
        )
        assert row["input_ids"] == encoded["input_ids"]
        found = [int(label != -100) for label in row["labels"]]
        if loss_on == "assistant":
            assert found == encoded["assistant_masks"], messages
        else:  # what has loss has it with all answers
            assert sum(found) > 1
            assert all(map(int.__le__, found, encoded["assistant_masks"])), messages


# -- which rows are encoded again ------------------------------------------------------------------------------------


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the tokenizer has encoded for their offsets."""
    seen: list[str] = []
    encode = TokenSpans._encode

    def recorded(self: TokenSpans, texts: list[str]) -> Any:
        seen.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(TokenSpans, "_encode", recorded)
    return seen


@pytest.mark.parametrize("rules", [[False], [True]])
def test_only_texts_that_change_at_spans_are_encoded_again(again: list[str], rules: list[bool]) -> None:
    reference, spans = real("shipped")
    del again[:]
    changed = ["e\u0301tat", "ae\u0301", "\u212b and \u0958", "a \u0958\u212b"]
    kept = ["caf\u00e9 \u4f60\u597d", "plain <|im_end|> text", "", "\u0e2a\u0e27\u0e31\u0e2a"]
    kept += ["cafe\u0301", "\u4f60\u597d <|im_end|> e\u0301 \u0958\u212b"]
    before = spans.encoded_again
    check(reference, spans, [(text, [(1, 2)]) for text in [*changed, *kept, *changed] if text], rules)
    assert again == [*changed, *changed]
    assert spans.encoded_again == before + 8


@pytest.mark.parametrize("rules", [[False], [True]])
def test_bytes_and_spaces_are_not_encoded_again(again: list[str], rules: list[bool]) -> None:
    """Characters without an entry, and added tokens with spaces, of a tokenizer that replaces spaces."""
    reference, spans = any_of("Gemma")
    del again[:]
    check(reference, spans, [(text, [(2, 4)]) for text in ("x \u65e5\u672c y", "x a b  y", "x \u2581c \u2581y")], rules)
    assert again == []


@pytest.mark.parametrize("word", ["x", " restaurants", "=" * 8, "=" * 9, " " * 40, "=" * 16])
def test_long_tokens_are_compared_to_their_last_byte(again: list[str], word: str) -> None:
    """In texts that NFC may change."""
    reference, spans = real("shipped")
    (token,) = reference.encode(word)
    ids = Ragged.from_lists([[token, *reference.encode("\u00e9")]])
    for change in range(len(word)):
        del again[:]
        text = f"{word[:change]}#{word[change + 1 :]}\u00e9"
        spans.bits(pa.array([text], pa.large_string()), ids, *np.array([[0], [0], [1]]), ones([0]))
        assert again == [text]


def test_texts_are_encoded_again_in_batches(again: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 3)
    reference, spans = made_up(VARIANTS["WordPiece"]())
    del again[:]
    rows = rows_of(reference, 10, 20)
    check(reference, spans, rows)
    assert again == 2 * [text for text, of_row in rows if of_row]


def test_texts_without_spans_are_not_encoded_again(again: list[str]) -> None:
    reference, spans = made_up(VARIANTS["WordPiece"]())
    del again[:]  # what the constructor tries out
    rows: list[tuple[str, Spans]] = [("the", []), ("word and", [(0, 4)]), ("the end", [])]
    check(reference, spans, rows)
    assert again == ["word and"] * 2


def test_ids_that_are_not_those_of_the_text_are_noticed(again: list[str]) -> None:
    """Lengths that add up are not enough where NFC may have changed a text; nor are they with an unknown id."""
    reference, spans = real("shipped")
    spans.overlapping = False
    text, other = "One two three caf\u00e9", "Two one three caf\u00e9"
    assert len(reference.encode(other)) == 4
    del again[:]
    number, start, end = np.array([[0], [4], [7]])
    ids = Ragged.from_lists([reference.encode(other)])
    assert spans.bits(pa.array([text], pa.large_string()), ids, number, start, end, ones(number)).tolist() == [
        0,
        1,
        0,
        0,
    ]
    assert again == [text]

    entry = "\u0120\u4f60"  # not in the alphabet, so no text becomes this entry
    parts = json.loads(byte_level(normalizer=None).to_str())
    parts["model"]["vocab"] |= {entry: 10_000}
    reference, spans = made_up(Tokenizer.from_str(json.dumps(parts)))
    assert spans.slow is None
    del again[:]
    ids = Ragged.from_lists([[*reference.encode(text), 10_000]])
    spans.bits(pa.array([text], pa.large_string()), ids, number, start, end, ones(number))
    assert again == [text]


def test_marks_stay_in_their_rows() -> None:
    """Also if the ids are too few for the text."""
    reference, spans = real("shipped")
    ids = Ragged.from_lists([reference.encode("One two"), [1, 2]])
    number, start, end = np.array([[0], [4], [18]])
    text = pa.array([WORDS, "x y"], pa.large_string())
    assert spans.bits(text, ids, number, start, end, ones(number)).tolist() == [0, 1, 0, 0]


def test_a_search_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly(self: Any, *arguments: Any) -> Any:
        fast, found = tokens(self, *arguments)
        found[found == 3] = 2
        return fast, found

    tokens = TokenSearch.tokens
    monkeypatch.setattr(TokenSearch, "tokens", nearly)
    reference, spans = made_up(byte_level())
    assert "offsets of the tokenizer itself: differs on" in (spans.slow or "")
    check(reference, spans, rows_of(reference, 8, 50))


# -- any text --------------------------------------------------------------------------------------------------------

ROWS = st.lists(st.tuples(TEXT, st.lists(st.integers(0, 1 << 16), max_size=8)), max_size=5)


@pytest.mark.parametrize("name", ["shipped", "trimming", "Gemma"])
@given(data=ROWS)
def test_any_text_and_spans(name: str, data: list[tuple[str, list[int]]]) -> None:
    reference, spans = any_of(name)
    assert spans.slow is None
    rows = []
    for text, places in data:
        edges = sorted(place % (len(text) + 1) for place in places)
        rows.append((text, list(zip(edges[::2], edges[1::2], strict=False))))
    check(reference, spans, rows)


@cache
def any_of(name: str) -> tuple[Reference, TokenSpans]:
    makers: dict[str, Callable[[], tuple[Reference, TokenSpans]]] = {
        "shipped": lambda: real("shipped"),
        "trimming": lambda: trimming(TRIMS["ByteLevel, first"]),
        "Gemma": lambda: renumbered("Gemma"),
    }
    return makers[name]()


def test_no_rows_and_no_spans() -> None:
    reference, spans = real("shipped")
    none = np.zeros(0, np.int64)
    assert len(spans.bits(pa.array([], pa.large_string()), Ragged.from_lists([]), none, none, none, ones(none))) == 0
    assert masks(reference, spans, [("", []), ("One", []), ("", [])]) == [[], [0], []]


def test_an_empty_block_at_the_start_of_a_text(qwen: Any) -> None:
    """transformers fails at it. For the tokenizer of a load, too, it has no tokens: no row differs or is dropped."""
    template = (
        "{% for m in messages %}{% generation %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}"
        "{% endgeneration %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    rows = [
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": f" there {row}"}] for row in range(3)
    ]
    table = pa.table({"messages": rows})
    chats = gpuload.load_chats(table, qwen, chat_template=template, verify="full", strict=True)
    answers = [len(qwen(row[1]["content"])["input_ids"]) for row in rows]
    assert [mask[-count:] for mask, count in zip(chats.loss_mask.to_lists(), answers, strict=True)] == [
        [True] * count for count in answers
    ]
    assert chats.loss_tokens == sum(answers)


def test_threads_that_render_do_not_disturb_each_other(qwen: Any) -> None:
    """transformers keeps the blocks of a template that is being rendered in one list for all threads."""
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    call = TemplateCall(qwen, template, add_generation_prompt=False)
    one, other = ([{"role": "assistant", "content": letter * 9}] * 9 for letter in "ab")
    expected, rendered = call.blocks(one), call.render(other)
    finished, found = threading.Event(), list[str]()

    def render() -> None:
        while not finished.is_set():
            found.append(call.render(other))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(1) as pool:
        rendering = pool.submit(render)
        try:
            assert all(call.blocks(one) == expected for _ in range(1000))
        finally:
            finished.set()
            sys.setswitchinterval(interval)
        rendering.result()
    assert set(found) <= {rendered}
