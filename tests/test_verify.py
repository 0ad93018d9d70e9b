"""Verification in production: a wrong token is found, named, and never given out."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import MESSAGES, user
from tiers import exhaustive

import gpuload
from gpuload.core import memory
from gpuload.core.arrays import Ragged
from gpuload.core.errors import DataError, HostMemoryError, MismatchError
from gpuload.core.marks import CHOSEN, LOSS
from gpuload.engines.host import encode as host
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import ArrowPrompts
from gpuload.pipeline import verify
from gpuload.pipeline.risk import RiskFinder
from gpuload.reference.reference import Reference
from gpuload.sources.types import JSON_TYPE


@pytest.fixture
def wrong_on_wombats(monkeypatch: pytest.MonkeyPatch, qwen: Any) -> None:
    """A fast path that is right on every hostile text and wrong on the last token of a text with " wombat"."""
    real = host._words
    wombat = qwen(" wombat")["input_ids"]

    def nearly(reference: Reference, *more: Any) -> host.HostEncoder:
        encoder = real(reference, *more)

        def encode(text: pa.LargeStringArray) -> Ragged:
            ids = encoder.encode(text)
            for row in range(len(ids)):
                if set(wombat) <= set(ids[row].tolist()):
                    ids[row][-2] += 1
            return ids

        return host.HostEncoder("nearly", encode)

    nearly.__name__ = "_words"
    monkeypatch.setattr(host, "_words", nearly)
    monkeypatch.setattr(verify, "_SECONDS", 60)  # what is found must not depend on how fast this machine is


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


def test_a_sample_has_no_row_that_takes_much_memory(
    write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_ROW_BYTES", 1000)
    chats = [user("long " * 300), user("short"), user("long " * 400)]
    assert gpuload.load(write(chats), qwen).report.check.rows == 1
    report = gpuload.load(write(chats[::2]), qwen).report
    assert report.check.rows == 0
    assert "no rows compared" in str(report)
    assert gpuload.load(write(chats), qwen, verify="full").report.check.rows == 3


def test_a_row_for_which_there_is_too_little_memory_is_named(
    write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of a process that the system kills."""
    file = write([user("short"), user("word " * 1_000_000)])
    monkeypatch.setattr(memory, "free_memory", lambda: 10**8)
    assert len(gpuload.load(file, qwen, max_prompt_length=10**7)) == 2
    message = (
        r"data.parquet row 1 has 5,\d{3},\d{3} bytes: .* takes about 75\d,.* and 100,000,000 are free: split the row"
    )
    with pytest.raises(HostMemoryError, match=message):
        gpuload.load(file, qwen, max_prompt_length=10**7, verify="full")


LONG = "word " * 1_000_000
SHOULD = r"it has 5,\d{3},\d{3} bytes: to encode it, tokenizers takes about 75\d,\d{3},\d{3} bytes of memory, and 100,"


@pytest.mark.parametrize("newer", ["", "\U0001fae8"])
def test_a_row_that_cannot_be_encoded_is_dropped(
    write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch, newer: str
) -> None:
    """Where tokenizers encodes it: all rows, or for a code point that is newer than the tables of gigatoken."""
    file = write([user("short"), user(LONG + newer), user("last"), user(LONG)])
    monkeypatch.setattr(host, "MOST_BY_WORDS", -1)
    if not newer:
        monkeypatch.setattr(host, "not_known_exact", lambda _: "not known")
        monkeypatch.setattr(host, "cut_table", lambda _: 1 / 0)
    monkeypatch.setattr(memory, "free_memory", lambda: 10**8)
    options = {"max_prompt_length": 10**7, "truncation": "right"}
    found = gpuload.load(file, qwen, **options)
    dropped = 1 if newer else 2
    assert len(found) == 4 - dropped
    assert sum(found.report.rejected.values()) == dropped
    assert all(re.match(SHOULD, why) for why in found.report.rejected)
    assert [found.origin(k)[1] for k in range(len(found))] == ([0, 2, 3] if newer else [0, 2])
    with pytest.raises(DataError, match=f"data.parquet row 1: {SHOULD}"):
        gpuload.load(file, qwen, strict=True, **options)
    with pytest.raises(HostMemoryError, match=r"data.parquet row 1 has 5,\d{3},\d{3} bytes"):
        gpuload.load(file, qwen, store="disk", **options)
    monkeypatch.setattr(memory, "free_memory", lambda: 10**12)  # that it was dropped is in no cache
    assert len(gpuload.load(file, qwen, **options)) == 4


def test_long_rows_of_training_data_are_dropped(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MOST_BY_WORDS", -1)
    monkeypatch.setattr(memory, "free_memory", lambda: 10**8)
    emoji = LONG + "\U0001fae8"
    limit = {"max_length": 10**7}
    texts = {"prompt": ["Q", "Q", "Q"], "completion": ["A", emoji, "B"]}
    answers = {"prompt": ["Q", "Q", "Q"], "chosen": ["A", emoji, "B"], "rejected": ["C", "D", "E"]}
    said = [[{"role": "assistant", "content": text}] for text in texts["completion"]]
    for load, table in (
        (gpuload.load_chats, texts),
        (gpuload.load_chats, {"messages": [user("Q") + each for each in said]}),
        (gpuload.load_chats, {"prompt": [user("Q")] * 3, "completion": said}),
        (gpuload.load_pairs, answers),
    ):
        rows = load(pa.table(table), qwen, **limit)
        few = load(pa.table(table).take([0, 2]), qwen, **limit)
        assert len(rows) == 2
        assert [re.match(SHOULD, why) is not None for why in rows.report.rejected] == [True]
        assert [rows[k] for k in range(2)] == [few[k] for k in range(2)]


def test_what_threads_take_together_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two texts that have room one at a time, the second waits for the first."""
    monkeypatch.setattr(memory, "free_memory", lambda: 10**9)
    nbytes = 5 << 20  # some 786 MB
    order: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def encode(name: str) -> None:
        with memory.room_to_encode(nbytes), memory.room_to_encode(nbytes, "the same text"):
            order.append(f"{name} begins")
            inside.set()
            assert go_on.wait(60)
            order.append(f"{name} ends")

    threads = [threading.Thread(target=encode, args=(name,)) for name in ("first", "second")]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    with memory.room_to_encode(1000):  # short texts do not wait
        threads[1].join(0.2)
        assert order == ["first begins"]
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert order == ["first begins", "first ends", "second begins", "second ends"]
    assert memory._reserved == {}
    with pytest.raises(HostMemoryError, match="a text has"), memory.room_to_encode(2 * nbytes):
        raise AssertionError


ONE_ROW = """
import resource, sys
import gpuload
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
gpuload.load(sys.argv[1], tokenizer, device="cpu")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(gpuload.load(sys.argv[3], tokenizer, device="cpu", max_prompt_length=10**8)))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@exhaustive
def test_memory_for_a_long_row(write: Callable[..., str], gsm8k: str, qwen_folder: str) -> None:
    """That of its columns, texts and ids, and not a hundred times as much."""
    text = " ".join(str(prompt) for prompt in pq.read_table(gsm8k)["prompt"].to_pylist())
    file = write([user((text * 10)[: 8 * 10**6])])
    command = [sys.executable, "-c", ONE_ROW, gsm8k, qwen_folder, file]
    env = os.environ | {"PYTHONPATH": str(Path(gpuload.__file__).parents[1])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    rows, added = map(int, done.stdout.split())
    assert rows == 1
    assert added < 30 * 8 * 10**6


NEWER_THAN_UNICODE_14 = """
import resource, sys
import gpuload
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
gpuload.load(sys.argv[1], tokenizer, device="cpu")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 10**9, resource.RLIM_INFINITY))
found = gpuload.load(sys.argv[3], tokenizer, device="cpu", max_prompt_length=10**8)
print(len(found), found.origin(0)[1], found.origin(1)[1])
print(*found.report.rejected)
"""


@exhaustive
def test_a_long_row_with_a_recent_emoji_does_not_end_a_load(
    write: Callable[..., str], gsm8k: str, qwen_folder: str
) -> None:
    """`tokenizers` would take some 3 GB for it, and the process would be aborted or killed."""
    text = "a word and another " * 10**6
    file = write([user("short"), user(text + "\U0001fae8"), user(text)])
    command = [sys.executable, "-c", NEWER_THAN_UNICODE_14, gsm8k, qwen_folder, file]
    env = os.environ | {"PYTHONPATH": str(Path(gpuload.__file__).parents[1])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows, reason = done.stdout.splitlines()
    assert rows == "2 0 2"
    assert re.match(
        r"it has 19,\d{3},\d{3} bytes: to encode it, tokenizers takes about 2,8\d\d,.* split the row", reason
    )


def test_shapes_of_json_are_looked_for_within_the_time(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [user("q") if k % 2 else [*user("q"), {"role": "assistant", "content": "a"}] for k in range(1000)]
    prompts = ArrowPrompts(pa.array([json.dumps(row) for row in rows], JSON_TYPE))
    whole = verify.shapes_of(prompts)
    assert len(whole.shapes) == 1000
    assert len(set(whole.shapes.tolist())) == 2
    assert whole.rows.tolist() == [0, 0]
    looks = iter([False, False, True])
    part = verify.shapes_of(prompts, lambda: next(looks))
    assert part.shapes.tolist() == whole.shapes[:512].tolist()
    assert sorted(part.forms.tolist()) == sorted(whole.forms.tolist())
    assert len(verify.shapes_of(prompts, lambda: True).shapes) == 0
    # A load whose time is over after a part of the rows compares rows all the same.
    monkeypatch.setattr(verify, "_SHAPE_SHARE", 0.0)
    verifier = verify.Verifier("sample", Reference(qwen), 1000)
    texts = [Reference(qwen).render(row) for row in rows]
    ids = Ragged.from_lists(Reference(qwen).encode_many(texts))
    text = HostText(text=pa.array(texts, pa.large_string()))
    assert len(verifier.compare(str, prompts, text, ids.take)) >= 16
    assert verifier.check.mismatches == []


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


def rare_rows(count: int, rare: Callable[[int], list[dict[str, Any]]], every: int = 5000) -> list[Any]:
    """Conversations of which one in thousands has another shape, and is neither short nor long nor risky."""
    chats: list[Any] = []
    for k in range(count):
        chats.append([*user(f"a question of middling length, number {k:05}"), {"role": "assistant", "content": "four"}])
        if k % every == every // 2:
            chats[k] = rare(k)
    return chats


@pytest.mark.usefixtures("wrong_on_wombats")
@pytest.mark.parametrize("form", ["field", "role", "shape", "JSON"])
def test_a_sample_has_each_rare_shape(form: str, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_SECONDS", 60.0)  # on a slow machine, too

    def rare(k: int) -> list[dict[str, Any]]:
        question, answer = user(f"a question of wombat length, number {k:05}"), {"role": "assistant", "content": "four"}
        if form == "field":
            return [*question, {**answer, "reasoning_content": "because"}]
        return [{"role": "system", "content": "Be"}, *question] if form == "role" else [*question, answer, *question]

    chats = rare_rows(20_000, rare, 20_000)
    table = pa.table({"prompt": chats})
    if form == "JSON":
        table = pa.table(
            {
                "prompt": pa.ExtensionArray.from_storage(
                    JSON_TYPE, pa.array(list(map(json.dumps, chats)), pa.large_string())
                )
            }
        )
    with pytest.raises(MismatchError, match="row 10000: token"):
        gpuload.load(table, qwen, strict=True, progress=False)


def test_a_sample_has_the_fields_of_answers(qwen: Any) -> None:
    """Prompts and completions are columns of their own, in which answers have other fields."""
    rows = [{"prompt": user(f"{k}"), "completion": [{"role": "assistant", "content": "four"}]} for k in range(3000)]
    rows[1700]["completion"][0]["reasoning_content"] = "because"
    found = verify.shapes_of(ArrowPrompts(pa.array(rows)))
    assert sorted(np.unique(found.shapes, return_counts=True)[1].tolist()) == [1, 2999]
    assert 1700 in found.rows.tolist()


def test_shapes_are_the_same_in_all_batches(qwen: Any) -> None:
    """Whatever the roles of a batch are, however a column is encoded, and with fields that are null."""
    chats = rare_rows(
        40, lambda k: [{"role": "system", "content": ""}, *user("x"), {"role": "tool", "content": "y"}], 7
    )
    whole = verify.shapes_of(ArrowPrompts(pa.array(chats, MESSAGES))).shapes
    assert len(set(whole.tolist())) == 2
    for low in range(0, 40, 3):
        part = pa.array(chats, MESSAGES).slice(low, 3)
        assert verify.shapes_of(ArrowPrompts(part)).shapes.tolist() == whole[low : low + 3].tolist()
    more = [[{**message, "name": None} for message in chat] for chat in chats]
    kind = pa.list_(pa.struct([("name", pa.string()), ("role", pa.string()), ("content", pa.string())]))
    assert verify.shapes_of(ArrowPrompts(pa.array(more, kind))).shapes.tolist() == whole.tolist()


def test_shapes_that_were_not_compared_are_reported(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = [user("x") * (1 + k) for k in range(300)]
    options: dict[str, Any] = {"max_prompt_length": 10_000, "progress": False}
    report = gpuload.load(pa.table({"prompt": chats}), qwen, **options).report
    check = report.check
    assert check.shapes == 300
    assert 300 - verify._SHAPE_ROWS - 64 <= check.shapes_not_compared < 300
    assert f"{check.shapes_not_compared} of 300 shapes of rows (roles and fields of messages) were not" in str(report)
    few = gpuload.load(pa.table({"prompt": chats[:20]}), qwen, **options).report
    assert (few.check.shapes, few.check.shapes_not_compared) == (20, 0)
    assert "shapes" not in str(few)


@pytest.mark.usefixtures("wrong_on_wombats")
def test_a_sample_has_each_mark_that_is_normalized(write: Callable[..., str], qwen: Any) -> None:
    """Marks whose order the normalizer changes, in one row of many whose marks it changes too."""
    chats = [user(f"une question pose\u0301e \u00e0 l'\u00e9l\u00e8ve {i:05} " + "long " * 40) for i in range(12_000)]
    chats[7001] = user("une question \u0eba\u0eb8 pose\u0301e au wombat " + "long " * 40)
    with pytest.raises(MismatchError, match="row 7001: token"):
        gpuload.load(write(chats), qwen, strict=True)


def test_the_first_difference_is_named() -> None:
    loss, chosen = int(LOSS), int(CHOSEN)
    assert verify._difference([1, 2], [1, 3]) == "token 1 is 2, the tokenizer returns 3"
    assert verify._difference([1, 2 | loss], [1, 3]) == "token 1 is 2, the tokenizer returns 3"
    assert verify._difference([1], [1, 2 | loss]) == "token 1 is nothing, the tokenizer returns 2"
    assert verify._difference([1, 2 | loss], [1, 2]) == "token 1, 2, has loss, but should have no loss"
    assert verify._difference([1, 2], [1, 2 | loss | chosen]) == "token 1, 2, has no loss, but should have loss, chosen"
