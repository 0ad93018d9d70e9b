"""Verification in production: a wrong token is found, named, and never given out."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import MESSAGES, user

import gpuload
from gpuload import verify
from gpuload.arrays import Ragged
from gpuload.engines.host import encode as host
from gpuload.errors import MismatchError
from gpuload.reference.reference import Reference
from gpuload.risk import RiskFinder
from gpuload.sources.types import JSON_TYPE


@pytest.fixture
def wrong_on_wombats(monkeypatch: pytest.MonkeyPatch, qwen: Any) -> None:
    """A fast path that is right on every hostile text and wrong on the last token of a text with " wombat"."""
    real = host._gigatoken
    wombat = qwen(" wombat")["input_ids"]

    def nearly(reference: Reference) -> host.HostEncoder:
        encoder = real(reference)

        def encode(text: pa.LargeStringArray) -> Ragged:
            ids = encoder.encode(text)
            for row in range(len(ids)):
                if set(wombat) <= set(ids[row].tolist()):
                    ids[row][-2] += 1
            return ids

        return host.HostEncoder("nearly", encode)

    nearly.__name__ = "_gigatoken"
    monkeypatch.setattr(host, "_gigatoken", nearly)


@pytest.mark.usefixtures("wrong_on_wombats")
def test_a_mismatch_is_named_and_falls_back(write: Callable[..., str], qwen: Any) -> None:
    chats = [user("nothing special"), user("a wombat"), user("nothing again")]
    file = write(chats)
    expected = [
        qwen.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats
    ]
    length = len(expected[1])
    place = rf"data.parquet row 1: token {length - 2} is \d+, the tokenizer returns {expected[1][-2]}"
    with pytest.warns(UserWarning, match=place):
        prompts = gpuload.load(file, qwen)
    assert prompts.tokens.to_lists() == expected
    assert "prompt by prompt" in prompts.report.engine
    assert any("differs" in note for note in prompts.report.notes)
    with pytest.raises(MismatchError, match=place):
        gpuload.load(file, qwen, strict=True)
    assert gpuload.load(file, qwen, verify="off").tokens.to_lists() != expected


@pytest.mark.usefixtures("wrong_on_wombats")
def test_full_finds_one_row_in_many(write: Callable[..., str], qwen: Any) -> None:
    chats = [user(f"number {i}") for i in range(9000)]
    chats[8500] = user("number wombat")
    with pytest.raises(MismatchError, match="row 8500: token"):
        gpuload.load(write(chats), qwen, verify="full", strict=True)


@pytest.mark.usefixtures("wrong_on_wombats")
@pytest.mark.parametrize(
    "text",
    [
        "wombat",
        " wombat " * 900,
        "é wombat",
        "<|im_end|> wombat <|im_end|>",
        "e\u0301 wombat",
        "x   7 wombat",
        "\u0663 wombat",
        "\u3000 wombat",
        "\U0001f44d wombat",
    ],
)
def test_a_sample_has_the_rows_that_go_wrong(text: str, write: Callable[..., str], qwen: Any) -> None:
    """The shortest row, the longest, and the only one with a risk of some kind."""
    chats = [user(f"a question of middling length, number {i}") for i in range(5000)]
    chats[1234] = user(f" {text}" if text == "wombat" else text)
    file = write(chats)
    with pytest.raises(MismatchError, match="row 1234: token"):
        gpuload.load(file, qwen, strict=True, max_prompt_length=10_000)


@pytest.mark.usefixtures("wrong_on_wombats")
def test_a_sample_has_decomposed_letters_among_many_accents(write: Callable[..., str], qwen: Any) -> None:
    chats = [user(f"Une question posée à l'élève numéro {i}\u3002") for i in range(8000)]
    for row in range(100, 8000, 800):
        chats[row] = user(f"Une question pose\u0301e au wombat {row}")
    with pytest.raises(MismatchError, match=r"row \d+00: token"):
        gpuload.load(write(chats), qwen, strict=True)


@pytest.mark.usefixtures("wrong_on_wombats")
def test_a_sample_of_many_small_files_is_bounded(write: Callable[..., str], qwen: Any) -> None:
    files = [write([user(f"file {n}, row {i}") for i in range(5)], f"{n}.parquet") for n in range(200)]
    # One of them, the first, is beyond the bound of 64: some row is always compared.
    assert 16 <= gpuload.load(files, qwen).report.check.rows <= 65


@pytest.mark.usefixtures("wrong_on_wombats")
def test_a_sample_has_a_row_even_if_all_are_large(write: Callable[..., str], qwen: Any) -> None:
    file = write([user("a wombat " * 30_000), user("a wombat " * 40_000)])
    with pytest.raises(MismatchError, match="row 0: token"):
        gpuload.load(file, qwen, strict=True, max_prompt_length=10**6)


def test_a_sample_stops_when_its_time_is_spent(
    write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_SECONDS", 0.0)
    monkeypatch.setattr(verify, "_SECONDS_SHARE", 0.0)
    assert gpuload.load(write([user(f"row {i}") for i in range(100)]), qwen).report.check.rows == 1


@pytest.mark.parametrize("kind", ["string", "messages", "dictionary", "JSON"])
def test_risky_prompts_rank_first(kind: str, qwen: Any) -> None:
    texts = [f"text {i}" for i in range(50)]
    texts[7], texts[20], texts[33] = "<|im_start|>system", "e\u0301", "\u212b e\u0301 <|endoftext|>"
    column: Any = {
        "string": lambda: pa.array(texts),
        "messages": lambda: pa.array([user(text) for text in texts], MESSAGES),
        "dictionary": lambda: pa.array(texts).dictionary_encode(),
        "JSON": lambda: pa.array([json.dumps(user(text), ensure_ascii=False) for text in texts], JSON_TYPE),
    }[kind]()
    ranked = RiskFinder(Reference(qwen)).rank(column, np.random.default_rng(0)).tolist()
    assert ranked[0] == 33
    assert set(ranked[:3]) == {7, 20, 33}
    assert sorted(ranked) == list(range(50))


def test_cost_and_outcome_are_reported(gsm8k: str, qwen: Any) -> None:
    check = gpuload.load(gsm8k, qwen).report.check
    assert 5 <= check.rows <= 64
    assert check.mismatches == []
    assert 0 < check.seconds < 5
    assert "none differ" in str(gpuload.load(gsm8k, qwen, max_samples=50).report)
    full = gpuload.load(gsm8k, qwen, verify="full", max_samples=200).report
    assert full.check.rows == 200
    off = gpuload.load(gsm8k, qwen, verify="off", max_samples=200).report
    assert off.check.rows == 0
    assert "no rows compared" in str(off)


def test_rows_that_are_dropped_are_compared_too(write: Callable[..., str], qwen: Any) -> None:
    """A row dropped for a wrong length would be as bad as a wrong token."""
    report = gpuload.load(
        write([user("short"), user("long " * 500)]), qwen, max_prompt_length=100, verify="full"
    ).report
    assert (report.rows_kept, report.check.rows) == (1, 2)
