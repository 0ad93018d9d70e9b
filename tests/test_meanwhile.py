"""Work that is done while another thread encodes without the interpreter lock."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import user
from tokenizer_cases import small_tokenizer

import gpuload
from gpuload.cache import key
from gpuload.core import backends
from gpuload.core.meanwhile import Meanwhile, without_lock


def test_work_begins_when_another_thread_gives_up_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(10)
        begun, threads = threading.Event(), []

        def work() -> int:
            threads.append(threading.get_ident())
            begun.set()
            return 7

        made = Meanwhile(work)
        without_lock()
        assert not threads  # this thread has the lock
        assert begun.wait(10)
    finally:
        sys.setswitchinterval(interval)
    without_lock()
    assert made.result() == made.result() == 7
    assert len(threads) == 1
    assert threads != [threading.get_ident()]


def test_work_that_nobody_began_is_done_when_it_is_asked_for() -> None:
    assert Meanwhile(lambda: 7).result() == 7
    with pytest.raises(ZeroDivisionError):
        Meanwhile(lambda: 1 // 0).result()


@pytest.mark.parametrize("size", [10, 3000])
def test_an_object_is_identified_while_texts_are_encoded(
    size: int, write: Callable[..., str], warm_cache: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are enough of them: otherwise later, when the name of an entry is needed."""
    begun, waited = threading.Event(), []

    def decides_later(*given: Any) -> Callable[[], bytes]:
        decides = key.decides_later(*given)
        return lambda: begun.set() or decides()  # type: ignore[func-returns-value]

    def without_lock_seen() -> None:
        without_lock()
        waited.append(begun.wait(10))

    monkeypatch.setattr("gpuload.cache.store.decides_later", decides_later)
    monkeypatch.setattr(backends, "without_lock", without_lock_seen)
    monkeypatch.setattr(backends, "_MANY_CHARACTERS", 20_000)
    path = write([user("".join(f" {k}a{j}" for j in range(size))) for k in range(3)])
    tokenizer = small_tokenizer(qwen.chat_template)
    assert gpuload.load(path, tokenizer, max_prompt_length=100_000).report.into_cache == [path]
    assert all(waited)
    assert bool(waited) == (size > 10)
    assert begun.is_set()
