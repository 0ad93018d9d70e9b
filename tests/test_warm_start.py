"""A warm start needs neither transformers nor the tokenizer, and finds exactly what a cold one makes."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_cases import same
from conftest import user
from tokenizer_cases import small_tokenizer

import gpuload
from gpuload.cache import known_files as known
from gpuload.cache import known_tokenizer
from gpuload.core.errors import TokenizerError
from gpuload.core.options import Store

WARM = """
import sys, json
import gpuload
for options in json.loads(sys.argv[3]):
    prompts = gpuload.load(sys.argv[1], sys.argv[2], **options)
    print(json.dumps(["transformers" in sys.modules, len(prompts), prompts.tokens.to_lists()[0], prompts.pad_token_id,
        prompts.fingerprint, prompts.report.from_cache]))
"""


@pytest.fixture
def settled(qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tokenizer of the test's own, whose files are taken for old ones."""
    folder = tmp_path / "tokenizer"
    small_tokenizer(qwen.chat_template).save_pretrained(folder)
    monkeypatch.setattr(known_tokenizer, "SETTLED", -1e9)
    return str(folder)


def test_a_warm_start_opens_no_tokenizer(
    settled: str, write: Callable[..., str], warm_cache: Path, tmp_path: Path
) -> None:
    path = write([user(f"{k} " * (k % 9)) for k in range(300)])
    cases: list[dict[str, Any]] = []
    stores: tuple[Store, Store] = ("memory", "disk")
    for store in stores:  # each with a cache of its own
        cases.append({"store": store, "max_samples": 100, "cache_dir": str(tmp_path / store)})
        gpuload.load(path, settled, store=store, cache_dir=str(tmp_path / store))
    patched = "from gpuload.cache import known_tokenizer\nknown_tokenizer.SETTLED = -1e9\n"
    arguments = [sys.executable, "-c", patched + WARM, path, settled, json.dumps(cases)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for options, line in zip(cases, done.stdout.splitlines(), strict=True):
        cold = gpuload.load(path, settled, token_cache=False, **options)
        opened, rows, first, pad, fingerprint, from_cache = json.loads(line)
        assert not opened
        assert (rows, first, pad) == (len(cold), cold.tokens.to_lists()[0], cold.pad_token_id)
        assert fingerprint == cold.fingerprint
        assert from_cache == [path]


WARM_TRAINING = """
import sys, json
import gpuload
from gpuload.cache import known_tokenizer

known_tokenizer.SETTLED = -1e9
for name, path, options in json.loads(sys.argv[2]):
    rows = getattr(gpuload, name)(path, sys.argv[1], **options)
    print(json.dumps(["transformers" in sys.modules, len(rows), rows.fingerprint, rows.report.from_cache]))
"""


def test_a_warm_start_of_rows_to_train_on_opens_no_tokenizer(
    settled: str, qwen: Any, write: Callable[..., str], warm_cache: Path
) -> None:
    """Calls of ShareGPT are converted as the template expects them, which only the tokenizer knows."""
    chat = [*user("a"), {"role": "assistant", "content": "b"}]
    turns = [("human", "a"), ("function_call", '{"name": "f", "arguments": {}}'), ("observation", "1"), ("gpt", "b")]
    messages = write({"messages": [chat] * 3, "n": [1, 2, 3]}, "messages.parquet")
    calls = write({"conversations": [[{"from": who, "value": text} for who, text in turns]] * 3}, "calls.parquet")
    pairs = {"prompt": [chat[:1]] * 3, "chosen": [chat[1:]] * 3, "rejected": [user("c")] * 3}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("load_chats", messages, {}),
        ("load_chats", messages, {"loss_on": "last"}),
        ("load_chats", messages, {"drop_nulls": True, "normalize_messages": "auto"}),
        ("load_chats", messages, {"store": "disk"}),
        ("load_chats", messages, {"turns": "served"}),
        ("load_chats", messages, {"turns": "served", "serving_template": qwen.chat_template}),
        ("load_chats", calls, {}),
        *(("load_pairs", write(pairs, "pairs.parquet"), {"objective": objective}) for objective in ("dpo", "rm")),
    ]
    cold = [getattr(gpuload, name)(path, settled, **options) for name, path, options in cases]
    arguments = [sys.executable, "-c", WARM_TRAINING, settled, json.dumps(cases)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (_, path, options), line, rows in zip(cases, done.stdout.splitlines(), cold, strict=True):
        assert json.loads(line) == [False, len(rows), rows.fingerprint, [path]], options


def test_a_known_tokenizer_is_opened_for_new_chats(settled: str, write: Callable[..., str], warm_cache: Path) -> None:
    chats = [[*user(text), {"role": "assistant", "content": text * 3}] for text in ("a", "b", "c", "d")]
    files = [write({"messages": some}, name) for name, some in (("1.parquet", chats[:2]), ("2.parquet", chats[2:]))]
    gpuload.load_chats(files[0], settled, loss_on="last")
    found = gpuload.load_chats(files, settled, loss_on="last")
    assert (found.report.from_cache, found.report.into_cache) == (files[:1], files[1:])
    expected = gpuload.load_chats(files, settled, loss_on="last", token_cache=False)
    assert found.fingerprint == expected.fingerprint
    assert not found.report.check.mismatches


@pytest.mark.parametrize(
    "change",
    [
        {"apply_chat_template_kwargs": {"add_generation_prompt": False}},
        {"chat_template": "{{ messages[0].content }}"},
        {"chat_template": "{{ strftime_now('%H') }}{{ messages[0].content }}"},
        {"pad_token_id": 5},
    ],
    ids=str,
)
def test_another_option_is_another_tokenizer(
    change: dict[str, Any], settled: str, write: Callable[..., str], warm_cache: Path
) -> None:
    path = write([user("a"), user("b " * 20)])
    plain = gpuload.load(path, settled)
    for _ in range(2):
        found = gpuload.load(path, settled, **change)
        same(found, gpuload.load(path, settled, token_cache=False, **change))
    assert found.pad_token_id == change.get("pad_token_id", plain.pad_token_id)


@pytest.mark.parametrize("kind", ["chats", "pairs"])
def test_rows_to_train_on_are_not_taken_for_prompts(
    kind: str, settled: str, write: Callable[..., str], warm_cache: Path
) -> None:
    """The tokenizer of such a load makes other ids of the same column."""
    column = "messages"
    chat = [*user("a"), {"role": "assistant", "content": "b"}]
    data: dict[str, list[Any]] = {column: [chat] * 3}
    if kind == "pairs":
        data = {"prompt": [chat[:1]] * 3, "chosen": [chat[1:]] * 3, "rejected": [chat[1:]] * 3}
        column = "prompt"
    path = write(data)
    (gpuload.load_chats if kind == "chats" else gpuload.load_pairs)(path, settled)
    found = gpuload.load(path, settled, prompt_key=column)
    same(found, gpuload.load(path, settled, prompt_key=column, token_cache=False))


def test_a_tokenizer_whose_files_change(settled: str, write: Callable[..., str], warm_cache: Path) -> None:
    path = write([user("a"), user("b " * 20)])
    gpuload.load(path, settled)
    file = Path(settled) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": "!"}))
    (Path(settled) / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = gpuload.load(path, settled)
    assert found.tokens.lengths.tolist()[0] == 1
    same(found, gpuload.load(path, settled, token_cache=False))


def test_a_known_tokenizer_is_opened_for_new_rows(settled: str, write: Callable[..., str], warm_cache: Path) -> None:
    first = write([user("a"), user("b " * 20)], "first.parquet")
    gpuload.load(first, settled)
    second = write([user("c"), user("d " * 20)], "second.parquet")
    found = gpuload.load([first, second], settled)
    assert (found.report.from_cache, found.report.into_cache) == ([first], [second])
    same(found, gpuload.load([first, second], settled, token_cache=False))


def test_damaged_facts_are_made_again(
    settled: str, write: Callable[..., str], warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered of a tokenizer and of files has a checksum."""
    monkeypatch.setattr(known, "SETTLED", -1e9)
    path = write([user("a"), user("b " * 20)])
    cold = gpuload.load(path, settled)
    remembered = sorted((warm_cache.parent / "digests").glob("*"))
    assert len(remembered) == 2
    for file in remembered:
        whole = file.read_bytes()
        for bit in random.Random(0).sample(range(8 * len(whole)), 500):
            file.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
            assert known.read_facts(file) is None
        for damaged in (b"[]", b"", whole[: len(whole) // 2], b"\xff" * 20):
            file.write_bytes(damaged)
            assert known.read_facts(file) is None
        another = whole.replace(str(cold.pad_token_id).encode(), str(cold.pad_token_id + 1).encode())
        for damaged in (another, whole[:-9]):
            file.write_bytes(damaged)
            warm = gpuload.load(path, settled)
            same(warm, cold)
            assert warm.pad_token_id == cold.pad_token_id
            assert file.read_bytes() == whole


@pytest.fixture
def same_rows(settled: str, write: Callable[..., str], warm_cache: Path) -> str:
    """A file with rows, whose ids are cached by a load with the tokenizer of `settled`."""
    path = write([user("hello world")] * 3)
    gpuload.load(path, settled)
    return path


def test_the_tokenizer_is_opened_where_it_was(
    settled: str, same_rows: str, qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(settled)
    monkeypatch.chdir(folder.parent)
    expected = gpuload.load(same_rows, folder.name, token_cache=False).decode(0)
    found = gpuload.load(same_rows, folder.name)
    assert found.report.from_cache
    another = tmp_path / "run"
    small_tokenizer("{{ messages[0].content }}").save_pretrained(another / folder.name)
    monkeypatch.chdir(another)
    assert found.decode(0) == expected


@pytest.mark.parametrize("gone", [False, True])
def test_a_tokenizer_that_was_changed_is_not_opened(settled: str, same_rows: str, gone: bool) -> None:
    found = gpuload.load(same_rows, settled)
    assert found.report.from_cache
    if gone:
        shutil.rmtree(settled)
    else:
        small_tokenizer("{{ messages[0].content }}").save_pretrained(settled)
    with pytest.raises(TokenizerError, match="no such directory" if gone else "was changed since the load: load again"):
        found.decode(0)


def test_other_files_next_to_a_tokenizer_do_not_change_it(settled: str, same_rows: str) -> None:
    expected = gpuload.load(same_rows, settled, token_cache=False).decode(0)
    found = gpuload.load(same_rows, settled)
    assert found.report.from_cache
    checkpoint = Path(settled) / "checkpoint-1" / "optimizer.pt"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"x")
    assert found.decode(0) == expected


def test_a_template_behind_a_link_is_read_each_time(
    settled: str, write: Callable[..., str], warm_cache: Path, tmp_path: Path
) -> None:
    path, template = write([user("hello world")] * 3), tmp_path / "templates" / "other.jinja"
    template.parent.mkdir()
    (Path(settled) / "additional_chat_templates").symlink_to(template.parent)
    for text in ("one ", "two "):
        template.write_text(text + "{{ messages[0].content }}")
        assert gpuload.load(path, settled, chat_template="other").decode(0) == text + "hello world"
