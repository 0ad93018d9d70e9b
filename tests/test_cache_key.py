"""The key of the token cache: whatever decides the ids decides it; and what is not cached."""

import os
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cache_cases import same
from conftest import user
from tiers import core
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2TokenizerFast

import gpuload
from gpuload.cache import key
from gpuload.cache import known_files as known
from gpuload.reference import reference
from gpuload.reference.template_call import TemplateCall
from gpuload.sources.fetch import SourceFile
from gpuload.sources.read import open_file

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


@pytest.mark.parametrize("name", core(_CHANGES, *list(_CHANGES)[::3]))
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
    """What is passed through is never from the cache, and a value changed in its pages does not make new ids."""
    file = tmp_path / "data.parquet"
    table = pa.table({"answer": ["aaaa", "mmmm", "zzzz"], "prompt": [user("a"), user("b"), user("c")]})
    pq.write_table(table, file, compression="none", use_dictionary=False)
    gpuload.load(file, qwen)
    file.write_bytes(file.read_bytes().replace(b"mmmm", b"kkkk"))
    again = gpuload.load(file, qwen)
    assert again.report.from_cache == [str(file)]
    assert again.take(["answer"]) == {"answer": ["aaaa", "kkkk", "zzzz"]}


@pytest.mark.parametrize("name", ["version", "own_code"])
def test_other_packages_are_another_key(
    name: str, files: list[str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpuload.load(files[0], qwen)
    monkeypatch.setattr(key, name, lambda *package: "later")
    assert gpuload.load(files[0], qwen).report.from_cache == []


def _at(monkeypatch: pytest.MonkeyPatch, *instant: int) -> None:
    monkeypatch.setattr(reference, "TemplateCall", partial(TemplateCall, instant=datetime(*instant)))


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
    with TemplateCall(qwen, template, instant=datetime(2026, 7, 4)).clock_stopped():
        _at(monkeypatch, 2026, 7, 5)
        inside = gpuload.load(file, qwen, chat_template=template)
    assert qwen.decode(inside.tokens[0]) == "04a"
    after = gpuload.load(file, qwen, chat_template=template)
    assert after.report.from_cache == []
    assert qwen.decode(after.tokens[0]) == "05a"


# -- what is not cached ----------------------------------------------------------------------------------------------


class OwnClass(Qwen2TokenizerFast):
    """Nothing is different here, but no version says so."""


class OwnCall(Qwen2TokenizerFast):
    def _encode_plus(self, *arguments: Any, **more: Any) -> Any:
        return super()._encode_plus(*arguments, **more)


def _with_own_method(folder: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.get_chat_template = lambda *arguments, **more: "{{ messages[0].content }}"
    return tokenizer


_NOT_KEPT: dict[str, tuple[Callable[[str], Any], dict[str, Any], str]] = {
    "own class": (OwnClass.from_pretrained, {}, r"OwnClass has code from outside transformers"),
    "own encoding": (OwnCall.from_pretrained, {}, r"OwnCall overrides _encode_plus"),
    "own method": (_with_own_method, {}, f"get_chat_template was replaced on this {Qwen2TokenizerFast.__name__}"),
    "split": (lambda folder: AutoTokenizer.from_pretrained(folder, split_special_tokens=True), {}, "split_special"),
    "random": (
        _fresh,
        {"chat_template": "{{ ['a', 'b'] | random }}{{ messages[0].content }}", "verify": "off"},
        "contains randomness",
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
    "own arguments": (
        _fresh,
        {"apply_chat_template_kwargs": {"tokenizer_kwargs": {"stride": 0}}},
        "change how text is encoded",
    ),
}


@pytest.mark.parametrize("name", core(_NOT_KEPT, *list(_NOT_KEPT)[::3]))
def test_what_cannot_be_told_is_not_kept(name: str, files: list[str], qwen_folder: str, warm_cache: Path) -> None:
    make, options, why = _NOT_KEPT[name]
    tokenizer = make(qwen_folder)
    for _ in range(2):
        prompts = gpuload.load(files[0], tokenizer, **options)
        assert prompts.report.from_cache == prompts.report.into_cache == []
        notes = [note for note in prompts.report.notes if note.startswith("tokens are not cached: ")]
        assert len(notes) == 1
        assert why.replace("\\", "") in notes[0]
    assert not warm_cache.exists()


def test_a_slow_tokenizer_is_not_kept(write: Callable[..., str], warm_cache: Path, tmp_path: Path) -> None:
    import transformers

    # transformers 4 has the slow class under the plain name.
    slow = getattr(transformers, "BertTokenizerLegacy", transformers.BertTokenizer)
    words = tmp_path / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    tokenizer = slow(str(words))
    prompts = gpuload.load(write(["a b"]), tokenizer, chat_template=None)
    assert any(f"not cached: {slow.__name__} is a slow tokenizer" in note for note in prompts.report.notes)
    assert not warm_cache.exists()


def test_a_method_replaced_in_its_class(
    files: list[str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PreTrainedTokenizerBase.get_chat_template

    def replaced(*arguments: Any, **more: Any) -> Any:
        return real(*arguments, **more)

    monkeypatch.setattr(PreTrainedTokenizerBase, "get_chat_template", replaced)
    prompts = gpuload.load(files[0], qwen)
    assert any("code from outside transformers" in note for note in prompts.report.notes)
    assert not warm_cache.exists()


def test_a_frame_is_not_kept(qwen: Any, warm_cache: Path) -> None:
    prompts = gpuload.load(pa.table({"prompt": [user("a")]}), qwen)
    assert "tokens are not cached: Table is a frame in memory" in prompts.report.notes
    assert not warm_cache.exists()


def test_turned_off(files: list[str], qwen: Any, warm_cache: Path) -> None:
    prompts = gpuload.load(files, qwen, token_cache=False)
    assert not any("kept" in note for note in prompts.report.notes)
    assert not warm_cache.exists()
    gpuload.load(files, qwen)
    assert gpuload.load(files, qwen, token_cache=False).report.from_cache == []


# -- digests that are remembered for a file --------------------------------------------------------------------------


def test_one_file_in_two_forms(
    write: Callable[..., str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered of a file is the digest of the columns that were read, whatever the column made of them is
    called."""
    monkeypatch.setattr(known, "SETTLED", -1e9)
    texts = {name: [f"{name} {row}" for row in range(5)] for name in ("prompt", "chosen", "better", "rejected")}
    file = write(texts)
    for better in ("chosen", "better"):
        pairs = gpuload.load_pairs(file, qwen, chosen_key=better)
        assert all(better in qwen.decode(pair["chosen_ids"]) for pair in pairs)
    asked = [user(f"asked {row}") for row in range(5)]
    answers = [[{"role": "assistant", "content": f"completion {row}"}] for row in range(5)]
    messages = [[*user(f"asked {row}"), {"role": "assistant", "content": f"answered {row}"}] for row in range(5)]
    file = write({"prompt": asked, "completion": answers, "messages": messages}, "chats.parquet")
    for form, word in (("prompt-completion", "completion"), ("messages", "answered")):
        chats = gpuload.load_chats(file, qwen, format=form, loss_on="assistant")
        assert all(word in qwen.decode(chat["input_ids"]) for chat in chats)
