"""The first load of little data: what it does not do, because that would take longer than the load itself."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import user
from tiers import SHARED, shared_tokenizers, with_shared
from tokenizer_cases import small_tokenizer
from tokenizers import models

import gpuload
from gpuload.cache import store
from gpuload.core import backends
from gpuload.reference.reference import Reference

FIRST = """
import sys
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
import gpuload

prompts = gpuload.load(sys.argv[1], tokenizer, max_samples=20)
prompts.batch([0])
print(*sorted(sys.modules))
"""


@pytest.fixture(scope="module")
def modules(gsm8k: str, qwen_folder: str) -> set[str]:
    """What is imported after a first load."""
    arguments = [sys.executable, "-c", FIRST, gsm8k, qwen_folder]
    return set(subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True).stdout.split())


def test_what_a_first_load_does_not_import(modules: set[str]) -> None:
    assert "gpuload.engines.host.engine" in modules
    others = ("cuda", "engine", "kernels", "render")
    assert {f"gpuload.engines.device.{name}" for name in others}.isdisjoint(modules)
    heavy = {"pandas", "gigatoken", "awkward", "msgspec", "cupy", "datasets", "multiprocessing.synchronize"}
    assert heavy.isdisjoint(modules)
    assert {"gpuload.media.headers", "gpuload.template.automaton.rows"}.isdisjoint(modules)


COLLECTIONS = """
import gc, torch, gpuload

seen = []
gc.callbacks.append(lambda phase, about: seen.append(about["generation"]))
gpuload.load
print(seen, gc.isenabled())
"""


def test_the_package_is_imported_without_garbage_collections() -> None:
    """There is at most one at the end, of the new objects (start and stop); without the pause there are some dozens."""
    done = subprocess.run([sys.executable, "-c", COLLECTIONS], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() in ("[] True", "[0, 0] True", "[1, 1] True")  # a generation by version of Python


def test_ids_of_little_data_are_cached_for_tokenizers_given_by_name(
    write: Callable[..., str], tmp_path: Path, warm_cache: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a tokenizer is not even opened where all ids are found. Identifying an object takes longer than encoding."""
    path = write([user(f"{k} " * (k % 9)) for k in range(300)])
    tokenizer = small_tokenizer(qwen.chat_template)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(store, "LEAST_BYTES", 1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(Reference, "model_json", property(lambda self: pytest.fail("the whole tokenizer is written")))
        for _ in range(2):
            prompts = gpuload.load(path, tokenizer)
            assert (prompts.report.into_cache, prompts.report.from_cache) == ([], [])
    assert not list(warm_cache.glob("*"))
    monkeypatch.setattr(store, "LEAST_BYTES", 1 << 10)
    assert gpuload.load(path, tokenizer).report.into_cache == [path]
    monkeypatch.setattr(store, "LEAST_BYTES", 1 << 20)
    for _ in range(2):
        found = gpuload.load(path, str(tmp_path / "tokenizer"))
        assert found.report.into_cache or found.report.from_cache
    assert found.report.from_cache == [path]
    assert found.tokens.to_lists() == prompts.tokens.to_lists()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "tokens": lambda tokenizer: tokenizer.add_tokens(["seven"]),
    "a template": lambda tokenizer: setattr(tokenizer, "chat_template", "x"),
    "a special token": lambda tokenizer: setattr(tokenizer, "bos_token", "<|im_start|>"),
    "a model": lambda tokenizer: setattr(tokenizer.backend_tokenizer, "model", models.BPE({"a": 0}, [])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_is_that_of_the_tokenizer_during_the_load(
    change: str, write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made when it is first asked for, and the tokenizer may have changed by then."""
    monkeypatch.setattr(store, "LEAST_BYTES", 1 << 20)
    tokenizer = small_tokenizer(qwen.chat_template)
    before = Reference(tokenizer).fingerprint()
    path = write([user("seven apples")])
    prompts, eager = gpuload.load(path, tokenizer), gpuload.load(path, tokenizer)
    copied = pickle.loads(pickle.dumps(eager))
    CHANGES[change](tokenizer)
    assert Reference(tokenizer).fingerprint() != before
    assert prompts.fingerprint["tokenizer"] == copied.fingerprint["tokenizer"] == before


@pytest.mark.parametrize("name", with_shared(shared_tokenizers))
def test_the_text_of_an_object_is_the_one_that_the_library_writes(name: str) -> None:
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(SHARED / "tokenizers" / name / "tokenizer.json"))
    made.no_padding()
    made.no_truncation()
    expected = made.to_str()
    made.enable_truncation(7)
    made.enable_padding()
    assert backends.serialized(made) == expected
