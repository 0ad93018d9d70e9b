"""Any text in any conversation, and the tokens are the reference's."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from encoder_variants import VARIANTS
from hypothesis import given
from hypothesis import strategies as st
from tiers import core, examples
from transformers import PreTrainedTokenizerFast

import gpuload
from gpuload.core.arrays import Ragged
from gpuload.engines.host.encode import host_encoder
from gpuload.reference.reference import Reference
from gpuload.tokenizer.unassigned import UNASSIGNED

FRAGMENTS = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "im_end|>", "<tool_call>", "{{ x }}", "{% endfor %}",
    "\u0301", "e\u0301", "\uac00", "\u1100\u1161\u11a8", "\u212b", "\ufb01", "\u200d", "\U0001f469\u200d\U0001f467",
    "\U0001f1e9\U0001f1ea", "\u05e9\u05dc\u05d5\u05dd", "\u0645\u0631\u062d\u0628\u0627", "\u202e", "\u4f60\u597d",
    "\u0e2a\u0e27\u0e31\u0e2a", "   ", "\t\t", "\n\n\n", "\r\n", "\u00a0", "\u3000", "\u2028", "\x00", "\x85",
    "'s", "'LL", "\u017f", "123", "4567", "\u0663", "---", "====", "\\frac{1}{2}", "\ufeff", "\U0010ffff",
]  # fmt: skip
TEXT = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=12)), max_size=14).map("".join)
CHAT = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT), min_size=1, max_size=5).map(
    lambda turns: [{"role": role, "content": content} for role, content in turns]
)


@examples(25)
@given(st.lists(CHAT, min_size=1, max_size=24))
def test_any_conversation(qwen: Any, chats: list[Any]) -> None:
    table = pa.table(
        {"prompt": pa.array(chats, pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))}
    )
    prompts = gpuload.load(table, qwen, verify="off", max_prompt_length=10**6, return_raw_chat=True)
    assert len(prompts) == len(chats)
    for row, chat in enumerate(chats):
        expected = qwen.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert prompts.tokens[row].tolist() == expected
        assert [message["content"] for message in qwen_round_trip(prompts, row)] == [m["content"] for m in chat]


def qwen_round_trip(prompts: gpuload.PromptDataset, row: int) -> Any:
    return prompts.take(["raw_prompt"], [row])["raw_prompt"][0]


@examples(300)
@given(TEXT)
def test_any_text(qwen: Any, encoders: dict[str, Any], text: str) -> None:
    for encoder, reference in encoders.values():
        assert encoder.encode(pa.array([text, ""], pa.large_string())).to_lists() == [reference.encode(text), []]


@pytest.fixture(scope="module")
def kinds() -> dict[str, tuple[Any, Any, list[str]]]:
    """name → (encoder, backend, added tokens) for a small tokenizer of every model and normalizer."""
    names = ["all flags", "normalized", "NFKC", "NFD", "Llama 2", "Metaspace first False", "Metaspace always True"]
    found = {}
    for name in [*names, "Unigram", "Unigram, flags", "Unigram, bytes", "WordPiece", "WordPiece, flags"]:
        backend = VARIANTS[name]()
        encoder = host_encoder(Reference(PreTrainedTokenizerFast(tokenizer_object=backend), chat_template=None))
        found[name] = encoder, backend, [token.content for token in backend.get_added_tokens_decoder().values()]
    return found


@examples(60)
@given(st.data())
def test_any_text_with_any_kind_of_tokenizer(kinds: dict[str, Any], data: Any) -> None:
    for encoder, backend, added in kinds.values():
        text = data.draw(st.lists(st.one_of(TEXT, st.sampled_from(added)), max_size=4).map("".join))
        ids = backend.encode(text, add_special_tokens=False).ids
        assert encoder.encode(pa.array([text, ""], pa.large_string())).to_lists() == [ids, []]


def test_long_words_and_long_runs(qwen: Any, encoders: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    word = "".join(chr(c) for c in rng.integers(97, 123, 20_000))
    texts = [word, "a" * 20_000, " " * 20_000, "\n" * 20_000, "é" * 10_000, "你" * 10_000, "1" * 10_000, "🙂" * 5_000]
    for encoder, reference in encoders.values():
        assert encoder.encode(pa.array(texts, pa.large_string())).to_lists() == [reference.encode(t) for t in texts]


@pytest.mark.parametrize("step", core([2, 64], 64))
def test_every_code_point(encoders: dict[str, Any], step: int) -> None:
    """Between letters, blanks and digits, where a difference in any Unicode table would show; those that only some
    versions of Unicode know above all."""
    spans = [(span.split("-") * 2)[:2] for span in UNASSIGNED.split()]
    young = [c for first, last in spans for c in range(int(first, 16), int(last, 16) + 1) if c < 0x17000]
    some = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000][::step]
    texts = [f"a{chr(c)} {chr(c)}{chr(c)}1" for c in young + some]
    for encoder, reference in encoders.values():
        expected = [one.ids for one in reference.backend.encode_batch_fast(texts, add_special_tokens=False)]
        assert encoder.encode(pa.array(texts, pa.large_string())).to_lists() == expected


def test_slices_and_empty_columns(encoders: dict[str, Any]) -> None:
    encoder, reference = next(iter(encoders.values()))
    texts = ["one", "", "three", "four", ""]
    column = pa.array(texts, pa.large_string())
    for start in range(5):
        assert encoder.encode(column.slice(start, 2)).to_lists() == [
            reference.encode(t) for t in texts[start : start + 2]
        ]
    assert len(encoder.encode(column.slice(5))) == 0
    assert encoder.encode(pa.array(["", ""], pa.large_string())).to_lists() == [[], []]


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), max_size=9), st.data())
def test_ragged(rows: list[list[int]], data: Any) -> None:
    ragged = Ragged.from_lists(rows)
    assert ragged.to_lists() == rows
    assert [ragged[i].tolist() for i in range(len(ragged))] == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12)) if rows else []
    taken = ragged.take(np.array(picked, np.int64))
    assert taken.to_lists() == [rows[i] for i in picked]
    assert Ragged.concatenate([ragged, taken]).to_lists() == rows + [rows[i] for i in picked]
    limit = data.draw(st.integers(1, 8))
    half = limit // 2
    assert ragged.truncate(limit, "left").to_lists() == [row[-limit:] for row in rows]
    assert ragged.truncate(limit, "right").to_lists() == [row[:limit] for row in rows]
    assert ragged.truncate(limit, "middle").to_lists() == [
        row if len(row) <= limit else row[:half] + row[-(limit - half) :] for row in rows
    ]
    assert ragged.values.dtype == taken.values.dtype == np.int32
    assert ragged.offsets.dtype == taken.offsets.dtype == np.int64


def test_the_shipped_tokenizer_is_encoded_by_gigatoken(qwen: Any) -> None:
    assert host_encoder(Reference(qwen)).name.startswith("gigatoken")


def test_real_tokenizers_are_encoded_by_gigatoken(encoders: dict[str, Any]) -> None:
    others = {"bert-base-uncased", "t5-small", "smollm"}  # two are not BPE, and one lacks bytes
    slow = {name for name, (encoder, _) in encoders.items() if not encoder.name.startswith("gigatoken")}
    assert slow <= others
