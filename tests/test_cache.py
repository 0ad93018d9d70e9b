"""The token cache: warm equals cold in everything, whatever decides the ids decides the key, damage is a miss."""

import errno
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SHARED, shared_files, user
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

import gpuload
from gpuload import cache
from gpuload.arrays import Ragged
from gpuload.cli import main
from gpuload.engines import cpu
from gpuload.entry import Entry, EntryWriter, Kept, read_entry
from gpuload.errors import DataError, MismatchError
from gpuload.read import open_file
from gpuload.sources import SourceFile
from gpuload.tokenizer import reference
from gpuload.tokenizer.host import HostEncoder
from gpuload.tokenizer.job import Job

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
# Rows of one message are compiled, longer ones rendered by the reference, and "tool" is refused.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if messages|length > 1 %}{{ m.content.split()|length }}{% endif %}<|im_start|>{{ m.content }}{% endfor %}"
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by a number for each batch that is rendered, and for each encoder that is built."""
    calls: list[int] = []

    def counted(step: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            calls.append(len(calls))
            return step(*arguments, **more)

        return call

    for name in ("render_column", "render_rows", "host_encoder"):
        monkeypatch.setattr(cpu, name, counted(getattr(cpu, name)))
    return calls


@pytest.fixture
def files(write: Callable[..., str], tmp_path: Path) -> list[str]:
    """Three files of different columns and types, with refused, overlong and by-reference rows; the first one in
    several row groups, the second one with nothing but prompts."""
    rng = np.random.default_rng(0)
    chats: list[Any] = [user("number " * int(n)) for n in rng.integers(0, 60, 300)]
    chats[7], chats[20], chats[299] = None, [], [{"role": "tool", "content": "x"}]
    for row in range(0, 300, 11):
        chats[row] = [{"role": "system", "content": f"row {row} \u00e9"}, *user("<|im_end|> \u4f60\u597d")]
    first = str(tmp_path / "first.parquet")
    table = pa.table({"prompt": pa.array(chats, MESSAGES), "extra_info": [{"index": i} for i in range(300)]})
    pq.write_table(table, first, row_group_size=128)
    second = write([user("alone"), [{"role": "tool", "content": ""}], user("")], "second.parquet")
    third = tmp_path / "third.jsonl"
    third.write_text('{"prompt": "a string", "more": [1, 2]}\n{"prompt": null, "more": []}\n')
    return [first, second, str(third)]


def same(warm: gpuload.PromptDataset, cold: gpuload.PromptDataset, checked: bool = True) -> None:
    """Everything that a user can see of two data sets."""
    assert warm.tokens.to_lists() == cold.tokens.to_lists()
    assert (warm.tokens.values.dtype, warm.tokens.offsets.dtype) == (np.int32, np.int64)
    assert warm.column_types.names == cold.column_types.names
    assert warm.take(cold.column_types.names) == cold.take(cold.column_types.names)
    assert [warm.origin(row) for row in range(len(warm))] == [cold.origin(row) for row in range(len(cold))]
    assert warm.fingerprint == cold.fingerprint
    for name in (
        "files max_prompt_length rows_read rows_kept overlong overlong_dropped refused examples rows_compiled "
        "by_reference source_bytes text_bytes tokens shortest longest"
    ).split():
        assert getattr(warm.report, name) == getattr(cold.report, name), name
    if checked:
        assert warm.report.check.rows + warm.report.check.earlier == cold.report.check.rows
    loaders = [prompts.loader(16, shuffle=True, seed=5) for prompts in (warm, cold)]
    batches = [next(iter(loader)) for loader in loaders]
    assert loaders[0].state_dict() == loaders[1].state_dict()
    for key, values in batches[1].items():
        assert batches[0][key].tolist() == values.tolist()


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


# -- warm equals cold ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_prompt_length": 30},
        {"max_prompt_length": 9, "filter_overlong_prompts": False, "truncation": "middle"},
        {"return_raw_chat": True},
        {"pad_token_id": 3, "seed": 4, "shuffle": True},
    ],
    ids=str,
)
def test_warm_equals_cold(
    options: dict[str, Any], files: list[str], qwen: Any, warm_cache: Path, made: list[int]
) -> None:
    filled = gpuload.load(files, qwen, chat_template=TEMPLATE)
    assert (filled.report.from_cache, filled.report.into_cache) == ([], files)
    assert f"3 of 3 files kept in {warm_cache}" in str(filled.report)
    cold = gpuload.load(files, qwen, chat_template=TEMPLATE, token_cache=False, **options)
    assert cold.report.by_reference
    assert cold.report.rows_refused == 5
    count = len(made)
    warm = gpuload.load(files, qwen, chat_template=TEMPLATE, **options)
    assert len(made) == count  # nothing was rendered or encoded
    assert (warm.report.from_cache, warm.report.into_cache) == (files, [])
    same(warm, cold)
    assert f"tokens of 3 of 3 files from {warm_cache}" in str(warm.report)
    assert "rows compared when their tokens were made, none differed" in str(warm.report)


@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_of_a_warm_cache(
    shuffle: bool, gsm8k: str, files: list[str], qwen: Any, warm_cache: Path, made: list[int]
) -> None:
    wanted = [files[1], gsm8k]
    options = {"max_samples": 1000, "shuffle": shuffle, "seed": 3}
    cold = gpuload.load(wanted, qwen, token_cache=False, **options)
    gpuload.load(wanted, qwen)
    count = len(made)
    warm = gpuload.load(wanted, qwen, **options)
    assert len(made) == count
    same(warm, cold, checked=False)


def test_some_rows_of_a_file_are_no_entry(gsm8k: str, files: list[str], qwen: Any, warm_cache: Path) -> None:
    """An entry has all rows: of a sample, only files that it has wholly are kept."""
    options = {"max_samples": 100, "device": "cpu"}
    sampled = gpuload.load([files[1], gsm8k], qwen, **options)
    assert sampled.report.into_cache == [files[1]]
    assert len(entries(warm_cache)) == 1
    again = gpuload.load([files[1], gsm8k], qwen, **options)
    assert again.report.from_cache == [files[1]]
    same(again, sampled)


def test_old_and_new_files_side_by_side(files: list[str], gsm8k: str, qwen: Any, warm_cache: Path) -> None:
    gpuload.load([files[0], files[2]], qwen, chat_template=TEMPLATE)
    mixed = [files[0], gsm8k, files[2], files[0], files[1]]
    warm = gpuload.load(mixed, qwen, chat_template=TEMPLATE)
    assert warm.report.from_cache == [files[0], files[2], files[0]]
    assert warm.report.into_cache == [gsm8k, files[1]]
    assert "gigatoken" in warm.report.engine
    same(warm, gpuload.load(mixed, qwen, chat_template=TEMPLATE, token_cache=False), checked=False)
    assert gpuload.load(mixed, qwen, chat_template=TEMPLATE).report.from_cache == mixed


def test_a_renamed_file_is_found(files: list[str], qwen: Any, warm_cache: Path, tmp_path: Path) -> None:
    gpuload.load(files[0], qwen)
    os.rename(files[0], tmp_path / "moved.parquet")
    assert gpuload.load(tmp_path / "moved.parquet", qwen).report.from_cache == [str(tmp_path / "moved.parquet")]


def test_the_text_has_to_be_made(files: list[str], qwen: Any, warm_cache: Path) -> None:
    gpuload.load(files, qwen)
    before = {path: path.stat().st_mtime_ns for path in entries(warm_cache)}
    warm = gpuload.load(files, qwen, return_full_prompt=True)
    assert warm.report.from_cache == warm.report.into_cache == []
    assert entries(warm_cache) == sorted(before)
    same(warm, gpuload.load(files, qwen, return_full_prompt=True, token_cache=False))


def test_refused_rows_are_refused_again(files: list[str], qwen: Any, warm_cache: Path) -> None:
    gpuload.load(files, qwen, chat_template=TEMPLATE)
    assert gpuload.load(files, qwen, chat_template=TEMPLATE).report.from_cache == files
    told = []
    for cached in (True, False):
        with pytest.raises(DataError, match="first.parquet row 7: prompt is null") as raised:
            gpuload.load(files, qwen, chat_template=TEMPLATE, strict=True, token_cache=cached)
        told.append(str(raised.value))
    assert told[0] == told[1]


def test_a_load_that_keeps_no_row_still_fills_the_cache(files: list[str], qwen: Any, warm_cache: Path) -> None:
    for found in (0, 1):
        with pytest.raises(DataError, match="none of 300 rows is left"):
            gpuload.load(files[0], qwen, max_prompt_length=1)
        assert len(entries(warm_cache)) == 1, found


def test_real_files(qwen: Any, warm_cache: Path, made: list[int]) -> None:
    """In the wild: whatever can be loaded, warm and cold."""
    wild = shared_files("wild/*.parquet")[::3]
    if not wild:
        pytest.skip("no shared data sets")
    compared = 0
    for file in wild:
        try:
            cold = gpuload.load(file, qwen, token_cache=False, max_samples=300)
        except gpuload.GpuloadError:
            continue
        gpuload.load(file, qwen, max_prompt_length=100_000)
        count = len(made)
        warm = gpuload.load(file, qwen, max_samples=300)
        assert len(made) == count, file
        same(warm, cold, checked=False)
        compared += 1
    assert compared > 10


@given(st.data())
def test_rows_of_an_entry(data: Any) -> None:
    """Any range of rows, wherever the parts' edges are, and counts that add up."""
    lengths = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=4))
    parts, rows, row = [], [], 0
    for of_part in lengths:
        refused = {i: f"row {row + i}" for i, length in enumerate(of_part) if length == 0}
        ids = [[row + i] * length for i, length in enumerate(of_part)]
        compiled = len(ids) - len(refused) - data.draw(st.integers(0, 1)) * (len(ids) > len(refused))
        by_reference = len(ids) - len(refused) - compiled
        reasons = {"why": by_reference} if by_reference else {}
        parts.append(Kept(Ragged.from_lists(ids), np.array(of_part), refused, compiled, reasons))
        rows += ids
        row += len(ids)
    entry = Entry(parts, "sample", 0)
    edges = sorted({0, row, *data.draw(st.lists(st.integers(0, row), max_size=4))})
    pairs = list(itertools.pairwise(edges))
    ranges = [entry.rows(low, high) for low, high in pairs]
    for (low, high), found in zip(pairs, ranges, strict=True):
        assert found.tokens.to_lists() == rows[low:high]
        assert found.text_bytes.tolist() == [len(ids) for ids in rows[low:high]]
        assert found.refused == {i: f"row {low + i}" for i, ids in enumerate(rows[low:high]) if not ids}
        picked = data.draw(st.lists(st.integers(0, high - low - 1), unique=True).map(sorted))
        assert found.take(pa.array(picked, pa.int64())).tokens.to_lists() == [rows[low + i] for i in picked]
    assert sum(found.compiled for found in ranges) == sum(part.compiled for part in parts)
    assert sum(found.reasons.get("why", 0) for found in ranges) == sum(part.reasons.get("why", 0) for part in parts)


# -- the key ---------------------------------------------------------------------------------------------------------


def _fresh(folder: str, change: Callable[[Any], Any] = lambda tokenizer: None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    change(tokenizer)
    return tokenizer


def _lower_case(tokenizer: Any) -> None:
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
# name → a change of the tokenizer, options
_CHANGES: dict[str, tuple[Callable[[Any], Any] | None, dict[str, Any]]] = {
    "added token": (lambda tokenizer: tokenizer.add_tokens(["wombat"]), {}),
    "special token of the template": (lambda tokenizer: setattr(tokenizer, "bos_token", "zz"), {}),
    "normalizer": (_lower_case, {}),
    "the tokenizer's template": (
        lambda tokenizer: setattr(tokenizer, "chat_template", "{{ messages[0].content }}"),
        {},
    ),
    "another template": (None, {"chat_template": "{{ bos_token }}{{ messages[0].content }}"}),
    "constants": (None, {"apply_chat_template_kwargs": {"enable_thinking": False}}),
    "a constant's type": (None, {"apply_chat_template_kwargs": {"enable_thinking": 0}}),
    "tools": (None, {"apply_chat_template_kwargs": {"tools": [_TOOL]}}),
    "generation prompt": (None, {"apply_chat_template_kwargs": {"add_generation_prompt": False}}),
    "column": (None, {"prompt_key": "other"}),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_what_decides_ids_decides_the_key(
    name: str, write: Callable[..., str], qwen_folder: str, warm_cache: Path
) -> None:
    change, options = _CHANGES[name]
    file = write({"prompt": [user("A wombat\u00e9"), user("b")], "other": [user("c"), user("d")]})
    before = {"chat_template": "{{ bos_token }}{{ enable_thinking }}{{ tools }}{{ messages[0].content }}"}
    if name == "the tokenizer's template":
        before = {}
    gpuload.load(file, _fresh(qwen_folder), **before)
    assert gpuload.load(file, _fresh(qwen_folder), **before).report.from_cache == [file]
    changed = _fresh(qwen_folder, change or (lambda tokenizer: None))
    options = before | options
    found = gpuload.load(file, changed, **options)
    assert found.report.from_cache == []
    assert found.report.into_cache == [file]
    same(found, gpuload.load(file, changed, token_cache=False, **options))
    assert gpuload.load(file, changed, **options).report.from_cache == [file]
    assert gpuload.load(file, _fresh(qwen_folder), **before).report.from_cache == [file]


def test_an_object_that_is_changed_between_loads(files: list[str], qwen_folder: str, warm_cache: Path) -> None:
    tokenizer = _fresh(qwen_folder)
    gpuload.load(files[0], tokenizer)
    tokenizer.add_tokens(["number number"])
    again = gpuload.load(files[0], tokenizer)
    assert again.report.from_cache == []
    assert len(tokenizer) - 1 in again.tokens.values


def test_content_changed_in_place(tmp_path: Path, qwen: Any, warm_cache: Path) -> None:
    """Same size, same times, same footer: only the pages tell."""
    file = tmp_path / "data.parquet"
    chats = [user(text) for text in ("aaaa", "mmmm", "zzzz")]
    pq.write_table(pa.table({"prompt": chats}), file, compression="none", use_dictionary=False)
    first = gpuload.load(file, qwen)
    before, about = open_file(SourceFile(str(file), "x", "parquet")).identity, file.stat()
    content = file.read_bytes()
    assert content.count(b"mmmm") == 1
    with open(file, "r+b") as raw:
        raw.seek(content.index(b"mmmm"))
        raw.write(b"kkkk")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert open_file(SourceFile(str(file), "x", "parquet")).identity == before
    second = gpuload.load(file, qwen)
    assert second.report.from_cache == []
    assert second.tokens.to_lists() != first.tokens.to_lists()
    same(second, gpuload.load(file, qwen, token_cache=False))


def test_other_columns_are_read_as_they_are(tmp_path: Path, qwen: Any, warm_cache: Path) -> None:
    """What is passed through is never from the cache, and a value changed in its pages does not make the ids anew."""
    file = tmp_path / "data.parquet"
    table = pa.table({"answer": ["aaaa", "mmmm", "zzzz"], "prompt": [user("a"), user("b"), user("c")]})
    pq.write_table(table, file, compression="none", use_dictionary=False)
    gpuload.load(file, qwen)
    file.write_bytes(file.read_bytes().replace(b"mmmm", b"kkkk"))
    again = gpuload.load(file, qwen)
    assert again.report.from_cache == [str(file)]
    assert again.take(["answer"]) == {"answer": ["aaaa", "kkkk", "zzzz"]}


@pytest.mark.parametrize("name", ["version", "_own_code"])
def test_other_packages_are_another_key(
    name: str, files: list[str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpuload.load(files[0], qwen)
    monkeypatch.setattr(cache, name, lambda *package: "later")
    assert gpuload.load(files[0], qwen).report.from_cache == []


def _at(monkeypatch: pytest.MonkeyPatch, *instant: int) -> None:
    monkeypatch.setattr(reference, "Job", partial(Job, instant=datetime(*instant)))


@pytest.mark.parametrize("form", ["strftime_now('%d %b %Y')", 'strftime_now( "%Y-%m-%d" )'])
def test_a_template_that_tells_the_date(
    form: str, write: Callable[..., str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write([user("a"), user("b")])
    template = f"{{% if strftime_now is defined %}}{{{{ {form} }}}}{{% endif %}}{{{{ messages[0].content }}}}"
    _at(monkeypatch, 2026, 7, 4, 1, 2)
    first = gpuload.load(file, qwen, chat_template=template)
    _at(monkeypatch, 2026, 7, 4, 23, 58)
    assert gpuload.load(file, qwen, chat_template=template).report.from_cache == [file]
    _at(monkeypatch, 2026, 7, 5)
    later = gpuload.load(file, qwen, chat_template=template)
    assert later.report.from_cache == []
    assert later.tokens.to_lists() != first.tokens.to_lists()


def test_the_clock_is_the_one_that_templates_see(
    write: Callable[..., str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load inside another one, over midnight: it tells the other one's date, and that is the one in its key."""
    file, template = write([user("a")]), "{{ strftime_now('%d') }}{{ messages[0].content }}"
    with Job(qwen, template, instant=datetime(2026, 7, 4)).clock_stopped():
        _at(monkeypatch, 2026, 7, 5)
        inside = gpuload.load(file, qwen, chat_template=template)
    assert qwen.decode(inside.tokens[0]) == "04a"
    after = gpuload.load(file, qwen, chat_template=template)
    assert after.report.from_cache == []
    assert qwen.decode(after.tokens[0]) == "05a"


# -- what is not kept ------------------------------------------------------------------------------------------------


class OwnClass(Qwen2Tokenizer):
    """Nothing is different here, but no version says so."""


class OwnCall(Qwen2Tokenizer):
    def _encode_plus(self, *arguments: Any, **more: Any) -> Any:
        return super()._encode_plus(*arguments, **more)


def _with_own_method(folder: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.get_chat_template = lambda *arguments, **more: "{{ messages[0].content }}"
    return tokenizer


_NOT_KEPT: dict[str, tuple[Callable[[str], Any], dict[str, Any], str]] = {
    "own class": (OwnClass.from_pretrained, {}, r"OwnClass has code that is not from transformers"),
    "own encoding": (OwnCall.from_pretrained, {}, r"OwnCall overrides _encode_plus"),
    "own method": (_with_own_method, {}, r"this Qwen2Tokenizer has a get_chat_template of its own"),
    "split": (lambda folder: AutoTokenizer.from_pretrained(folder, split_special_tokens=True), {}, "split_special"),
    "random": (
        _fresh,
        {"chat_template": "{{ ['a', 'b'] | random }}{{ messages[0].content }}", "verify": "off"},
        "random",
    ),
    "time of day": (_fresh, {"chat_template": "{{ strftime_now('%H') }}{{ messages[0].content }}"}, "time of day"),
    "clock under another name": (
        _fresh,
        {"chat_template": "{% set now = strftime_now %}{{ now('%d') }}{{ messages[0].content }}"},
        "time of day",
    ),
    "computed format": (
        _fresh,
        {"chat_template": "{{ strftime_now('%' + form) }}{{ messages[0].content }}"}
        | {"apply_chat_template_kwargs": {"form": "H"}},
        "time of day",
    ),
    "not plain": (_fresh, {"apply_chat_template_kwargs": {"now": datetime(2026, 1, 1)}}, "now is not plain data"),
    "not plain inside": (_fresh, {"apply_chat_template_kwargs": {"documents": [{"a": {1: "b"}}]}}, "not plain data"),
    "own arguments": (_fresh, {"apply_chat_template_kwargs": {"tokenizer_kwargs": {"stride": 0}}}, "own"),
}


@pytest.mark.parametrize("name", _NOT_KEPT)
def test_what_cannot_be_told_is_not_kept(name: str, files: list[str], qwen_folder: str, warm_cache: Path) -> None:
    make, options, why = _NOT_KEPT[name]
    tokenizer = make(qwen_folder)
    for _ in range(2):
        prompts = gpuload.load(files[0], tokenizer, **options)
        assert prompts.report.from_cache == prompts.report.into_cache == []
        notes = [note for note in prompts.report.notes if note.startswith("tokens are not kept: ")]
        assert len(notes) == 1
        assert why.replace("\\", "") in notes[0]
    assert not warm_cache.exists()


def test_a_slow_tokenizer_is_not_kept(write: Callable[..., str], warm_cache: Path, tmp_path: Path) -> None:
    from transformers import BertTokenizerLegacy

    words = tmp_path / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    tokenizer = BertTokenizerLegacy(str(words))
    prompts = gpuload.load(write(["a b"]), tokenizer, chat_template=None)
    assert any("not kept: BertTokenizerLegacy is a slow tokenizer" in note for note in prompts.report.notes)
    assert not warm_cache.exists()


def test_a_method_replaced_in_its_class(
    files: list[str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PreTrainedTokenizerBase.get_chat_template

    def replaced(*arguments: Any, **more: Any) -> Any:
        return real(*arguments, **more)

    monkeypatch.setattr(PreTrainedTokenizerBase, "get_chat_template", replaced)
    prompts = gpuload.load(files[0], qwen)
    assert any("code that is not from transformers" in note for note in prompts.report.notes)
    assert not warm_cache.exists()


def test_a_frame_is_not_kept(qwen: Any, warm_cache: Path) -> None:
    prompts = gpuload.load(pa.table({"prompt": [user("a")]}), qwen)
    assert "tokens are not kept: Table is a frame in memory" in prompts.report.notes
    assert not warm_cache.exists()


def test_turned_off(files: list[str], qwen: Any, warm_cache: Path) -> None:
    prompts = gpuload.load(files, qwen, token_cache=False)
    assert not any("kept" in note for note in prompts.report.notes)
    assert not warm_cache.exists()
    gpuload.load(files, qwen)
    assert gpuload.load(files, qwen, token_cache=False).report.from_cache == []


# -- exactness -------------------------------------------------------------------------------------------------------


def test_verification_is_never_weaker_than_asked(files: list[str], qwen: Any, warm_cache: Path) -> None:
    def found(verify: str) -> bool:
        report = gpuload.load(files[0], qwen, verify=verify).report
        assert bool(report.from_cache) != bool(report.into_cache)
        if verify == "full":
            assert report.check.rows + report.check.earlier == report.rows_read - report.rows_refused
        return bool(report.from_cache)

    asked = ["off", "off", "sample", "off", "sample", "full", "full", "sample", "off"]
    assert [found(verify) for verify in asked] == [False, True, False, True, True, False, True, True, True]
    assert len(entries(warm_cache)) == 1


def test_wrong_tokens_are_never_kept(
    write: Callable[..., str], gsm8k: str, qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the file where one differs, and not those of any other file of the load."""
    real = cpu.host_encoder

    def wrong(of: Any) -> HostEncoder:
        def encode(text: pa.LargeStringArray) -> Ragged:
            ids = real(of).encode(text)
            for row in range(len(ids)):
                if text[row].as_py().startswith("<|im_start|>alone"):
                    ids[row][-1] += 1
            return ids

        return HostEncoder("wrong", encode)

    two = [gsm8k, write([user("not this"), user("alone")])]
    options: dict[str, Any] = {"chat_template": "<|im_start|>{{ messages[0].content }}"}
    with monkeypatch.context() as patched:
        patched.setattr(cpu, "host_encoder", wrong)
        with pytest.warns(UserWarning, match="data.parquet row 1"):
            prompts = gpuload.load(two, qwen, **options)
        assert prompts.report.into_cache == []
        with pytest.raises(MismatchError):
            gpuload.load(two, qwen, strict=True, **options)
    assert entries(warm_cache) == []
    right = gpuload.load(two, qwen, **options)
    assert right.report.from_cache == []
    assert right.tokens.to_lists() == prompts.tokens.to_lists()


def test_a_file_that_changes_meanwhile_is_not_kept(
    tmp_path: Path, qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data.parquet"
    pq.write_table(pa.table({"prompt": [user("mmmm")]}), file, compression="none")
    real = cpu.render_column

    def render(*arguments: Any) -> Any:
        file.write_bytes(file.read_bytes().replace(b"mmmm", b"kkkk"))
        return real(*arguments)

    monkeypatch.setattr(cpu, "render_column", render)
    assert gpuload.load(file, qwen).report.into_cache == []
    assert entries(warm_cache) == []


# -- damage, other processes, little room ----------------------------------------------------------------------------


def test_a_damaged_entry_is_made_anew(files: list[str], qwen: Any, warm_cache: Path) -> None:
    cold = gpuload.load(files[0], qwen, chat_template=TEMPLATE)
    (entry,) = entries(warm_cache)
    whole = entry.read_bytes()
    table = pa.table({"ids": [[1, 2]] * 300})
    with pa.OSFile(str(entry), "wb") as sink, pa.ipc.new_file(sink, table.schema) as foreign:
        foreign.write_table(table)
    strange = [entry.read_bytes(), b"", b"not an entry", b"\0" * len(whole), whole[:-1], whole[: len(whole) // 2]]
    strange += [whole[: len(whole) // 3] + b"\0" * 4096 + whole[len(whole) // 3 + 4096 :]]
    for content in strange:
        entry.write_bytes(content)
        again = gpuload.load(files[0], qwen, chat_template=TEMPLATE)
        assert again.report.into_cache == [files[0]]
        assert entries(warm_cache) == [entry]
        assert gpuload.load(files[0], qwen, chat_template=TEMPLATE).report.from_cache == [files[0]]
    same(again, cold)


def test_no_changed_byte_changes_a_token(files: list[str], qwen: Any, warm_cache: Path, tmp_path: Path) -> None:
    """One byte at a time, in a process of its own: what is read is what was written, or nothing."""
    gpuload.load(files[0], qwen, chat_template=TEMPLATE)
    (entry,) = entries(warm_cache)
    script = tmp_path / "flip.py"
    script.write_text(
        "import random, sys\n"
        "from pathlib import Path\n"
        "from gpuload.entry import read_entry\n"
        "entry, key, copy = Path(sys.argv[1]), Path(sys.argv[1]).stem, Path(sys.argv[2])\n"
        "def known(found):\n"
        "    return [vars(part) | {'text_bytes': part.text_bytes.tolist(), 'tokens': part.tokens.to_lists()}\n"
        "        for part in found.parts], found.verified, found.compared\n"
        "whole, expected = entry.read_bytes(), known(read_entry(entry, key, 300))\n"
        "assert len(expected[0]) == 3 and expected[0][0]['refused']\n"
        "random.seed(0)\n"
        "places = [*range(len(whole) - 3000, len(whole)), *random.sample(range(len(whole)), 3000)]\n"
        "missed = 0\n"
        "for place in places:\n"
        "    changed = bytearray(whole)\n"
        "    changed[place] ^= 1 << random.randrange(8)\n"
        "    copy.write_bytes(changed)\n"
        "    found = read_entry(copy, key, 300)\n"
        "    missed += found is None\n"
        "    assert found is None or known(found) == expected, place\n"
        "print(missed)\n"
    )
    done = _python(script, entry, tmp_path / "copy.arrow")
    assert int(done) > 2000


def test_an_entry_of_another_key_or_size(files: list[str], qwen: Any, warm_cache: Path) -> None:
    gpuload.load(files[0], qwen)
    (entry,) = entries(warm_cache)
    assert read_entry(entry, entry.stem, 300) is not None
    assert read_entry(entry, entry.stem, 299) is None
    assert read_entry(entry, "another", 300) is None
    assert read_entry(entry.with_name("none.arrow"), entry.stem, 300) is None


def _python(*arguments: object) -> str:
    return _finish(_start(*arguments))


def _start(*arguments: object) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(Path(gpuload.__file__).parents[1])}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return out.strip()


def test_processes_that_start_together(
    files: list[str], gsm8k: str, qwen: Any, qwen_folder: str, warm_cache: Path, tmp_path: Path
) -> None:
    script = tmp_path / "load.py"
    script.write_text(
        "import sys, gpuload\n"
        "prompts = gpuload.load(sys.argv[2:], sys.argv[1])\n"
        "print(prompts.fingerprint['tokens'], len(prompts.report.from_cache) + len(prompts.report.into_cache))\n"
    )
    wanted = [*files, gsm8k]
    ranks = [_start(script, qwen_folder, *wanted) for _ in range(3)]
    expected = gpuload.load(wanted, qwen, token_cache=False).fingerprint["tokens"]
    assert {_finish(rank) for rank in ranks} == {f"{expected} 4"}
    assert sorted(path.suffix for path in entries(warm_cache)) == [".arrow"] * 4
    warm = gpuload.load(wanted, qwen)
    assert warm.report.from_cache == wanted
    assert warm.fingerprint["tokens"] == expected


def test_what_was_not_used_for_the_longest_time_goes_first(
    write: Callable[..., str], qwen: Any, warm_cache: Path
) -> None:
    files = [write([user(f"{number} " * 500)], f"{number}.parquet") for number in range(4)]
    sizes = []
    for age, file in zip((50, 40, 30), files, strict=False):
        gpuload.load(file, qwen, max_prompt_length=4000)
        (new,) = [path for path in entries(warm_cache) if path.stat().st_mtime > time.time() - 20]
        os.utime(new, (time.time() - age,) * 2)
        sizes.append(new.stat().st_size)
    assert gpuload.load(files[0], qwen, max_prompt_length=4000).report.from_cache == [files[0]]  # and is used now
    old, young = warm_cache / "old.partial", warm_cache / "young.partial"
    for partial_file, days in ((old, 2), (young, 0)):
        partial_file.touch()
        os.utime(partial_file, (time.time() - days * 86400,) * 2)
    gpuload.load(files[3], qwen, max_prompt_length=4000, token_cache_bytes=sum(sizes) + 100)
    kept = [bool(gpuload.load(file, qwen, max_prompt_length=4000).report.from_cache) for file in files]
    assert kept == [True, False, True, True]
    assert not old.exists()
    assert young.exists()


def test_a_load_that_does_not_fit(files: list[str], gsm8k: str, qwen: Any, warm_cache: Path) -> None:
    """What fits is kept, and found by the next load, which does not write the rest in its place."""
    gpuload.load(files[0], qwen)
    (entry,) = entries(warm_cache)
    bound = entry.stat().st_size + 20_000
    for _ in range(2):
        report = gpuload.load([files[0], gsm8k], qwen, token_cache_bytes=bound).report
        assert (report.from_cache, report.into_cache) == ([files[0]], [])
        assert f"tokens are not kept: all of them would take more than token_cache_bytes={bound:,}" in report.notes
        assert entries(warm_cache) == [entry]


def test_the_bound_is_a_part_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.arrow").write_bytes(b"\0" * 5000)
    disk = type("usage", (), {"free": 15_000})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda folder: disk)
    assert cache.default_bound(tmp_path) == 2000
    disk.free = 10**15  # type: ignore[attr-defined]
    assert cache.default_bound(tmp_path) == 20 * 10**9


def test_a_folder_that_cannot_be_written(files: list[str], qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    (tmp_path / "a file").touch()
    prompts = gpuload.load(files, qwen, cache_dir=str(tmp_path / "a file"))
    (note,) = [note for note in prompts.report.notes if "not kept" in note]
    assert note == f"tokens are not kept: {tmp_path / 'a file' / 'tokens'}: Not a directory"
    same(prompts, gpuload.load(files, qwen, token_cache=False))


@pytest.mark.parametrize("at", ["write", "close"])
def test_a_full_disk(at: str, files: list[str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpuload.load(files[1], qwen)
    real = getattr(EntryWriter, at)

    def full(writer: EntryWriter, *arguments: Any) -> None:
        if writer.rows:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(writer, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(EntryWriter, at, full)
        prompts = gpuload.load([files[1], files[0], files[2]], qwen)
    assert prompts.report.from_cache == [files[1]]
    assert f"tokens are not kept: {warm_cache}: No space left on device" in prompts.report.notes
    assert len(entries(warm_cache)) == 1 + len(prompts.report.into_cache)
    same(prompts, gpuload.load([files[1], files[0], files[2]], qwen, token_cache=False), checked=False)


def test_nothing_is_left_of_a_load_that_fails(files: list[str], qwen: Any, warm_cache: Path) -> None:
    with pytest.raises(DataError):
        gpuload.load([files[1], files[0]], qwen, chat_template=TEMPLATE, strict=True)
    assert entries(warm_cache) == []


# -- other engines, the command line ---------------------------------------------------------------------------------


def test_an_entry_serves_every_engine(
    files: list[str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from host_kernels import COMPILER, HostKernels

    if COMPILER is None:
        pytest.skip("no C++ compiler")
    from gpuload import pipeline
    from gpuload.engines.device import DeviceEngine

    def on_device(options: Any, of: Any, exact_only: bool = False) -> DeviceEngine:
        return DeviceEngine(HostKernels(), torch.device("cpu"), of, exact_only)

    cold = gpuload.load(files[:2], qwen)
    monkeypatch.setattr(pipeline, "_engine", on_device)
    warm = gpuload.load(files, qwen)
    assert warm.report.from_cache == files[:2]
    assert warm.report.into_cache == [files[2]]
    same(gpuload.load(files[:2], qwen), cold)
    monkeypatch.undo()


def test_prepare(
    files: list[str], qwen_folder: str, qwen: Any, warm_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prepare", *files, "--tokenizer", qwen_folder, "--template-kwargs", '{"enable_thinking": false}']
    assert main(command) == 0
    assert f"tokens of 3 of 3 files kept in {warm_cache}" in capsys.readouterr().out
    assert main(command) == 0
    assert f"tokens of 3 of 3 files from {warm_cache}" in capsys.readouterr().out
    options: dict[str, Any] = {"apply_chat_template_kwargs": {"enable_thinking": False}}
    assert gpuload.load(files, qwen, **options).report.from_cache == files
    assert main([*command, "--verify", "full"]) == 0
    assert gpuload.load(files, qwen, verify="full", **options).report.from_cache == files

    assert main([*command, "--cache-dir", str(tmp_path / "elsewhere")]) == 0
    assert main(["prepare", "--clear", "--cache-dir", str(tmp_path / "elsewhere")]) == 0
    assert f"{tmp_path / 'elsewhere' / 'tokens'}: 3 entries removed" in capsys.readouterr().out
    assert len(entries(warm_cache)) == 3
    assert main(["prepare", "--clear"]) == 0
    assert entries(warm_cache) == []


def test_prepare_says_what_is_wrong(
    files: list[str], qwen_folder: str, warm_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prepare", files[0], "--tokenizer", qwen_folder]
    (tmp_path / "a file").touch()
    assert main([*command, "--cache-dir", str(tmp_path / "a file")]) == 1
    assert "1 of 1 files are not in the cache: tokens are not kept: " in capsys.readouterr().err
    assert main([*command, "--template-kwargs", "{"]) == 1
    assert "not valid JSON" in capsys.readouterr().err
    for wrong in (["prepare"], ["prepare", files[0]], ["prepare", "--tokenizer", qwen_folder]):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2
    capsys.readouterr()


@pytest.mark.skipif(not (SHARED / "tokenizers").is_dir(), reason="no shared tokenizers")
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "llama3.1-instruct", "mistral-nemo", "smollm"])
def test_real_tokenizers(name: str, gsm8k: str, warm_cache: Path, made: Sequence[int]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    options: dict[str, Any] = {"pad_token_id": 0}
    if tokenizer.chat_template is None:
        options["chat_template"] = TEMPLATE
    cold = gpuload.load(gsm8k, tokenizer, max_samples=-1, **options)
    count = len(made)
    warm = gpuload.load(gsm8k, AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name), **options)
    assert warm.report.from_cache == [gsm8k]
    assert len(made) == count
    same(warm, cold)
