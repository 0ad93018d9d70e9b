"""A warm start needs neither transformers nor the tokenizer, and finds exactly what a cold one makes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_cases import same
from conftest import user

import gpuload
from gpuload.cache import known_tokenizer
from gpuload.options import Store

WARM = """
import sys, json
import gpuload
options = json.loads(sys.argv[3])
prompts = gpuload.load(sys.argv[1], sys.argv[2], **options)
print(json.dumps(["transformers" in sys.modules, len(prompts), prompts.tokens.to_lists()[0], prompts.pad_token_id,
    prompts.fingerprint, prompts.report.from_cache]))
"""


@pytest.fixture
def settled(qwen_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tokenizer of the test's own, whose files are taken for old ones."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(qwen_folder, folder)
    monkeypatch.setattr(known_tokenizer, "SETTLED", -1e9)
    return str(folder)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_warm_start_opens_no_tokenizer(
    where: Store, settled: str, gsm8k: str, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"store": where, "max_samples": 100}
    cold = gpuload.load(gsm8k, settled, store=where)
    cold = gpuload.load(gsm8k, settled, token_cache=False, **options)
    patched = "from gpuload.cache import known_tokenizer\nknown_tokenizer.SETTLED = -1e9\n"
    arguments = [sys.executable, "-c", patched + WARM, gsm8k, settled, json.dumps(options)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    opened, rows, first, pad, fingerprint, from_cache = json.loads(done.stdout)
    assert not opened
    assert (rows, first, pad) == (len(cold), cold.tokens.to_lists()[0], cold.pad_token_id)
    assert fingerprint == cold.fingerprint
    assert from_cache == [gsm8k]


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


def test_a_tokenizer_whose_files_change(settled: str, write: Callable[..., str], warm_cache: Path) -> None:
    path = write([user("a"), user("b " * 20)])
    gpuload.load(path, settled)
    file = Path(settled) / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"chat_template": "{{ messages[0].content }}", "pad_token": "!"}))
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
