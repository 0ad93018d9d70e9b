"""Loads of one process share the tables of a tokenizer in device memory: they are made and copied there once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest
from conftest import user
from simulator import engine_on, load_chats_with, load_with
from simulator.host_kernels import COMPILER
from simulator.strict_arrays import StrictKernels
from tokenizer_cases import small_tokenizer

import gpuload
from gpuload.core.errors import DeviceError
from gpuload.engines.device import engine
from gpuload.engines.device.encode import DeviceEncoder
from gpuload.engines.device.engine import DeviceEngine

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

TEXTS = [f"seven apples {k} <|im_end|> and é{k} " * (k % 4 + 1) for k in range(40)]
PROMPTS = pa.table({"prompt": [user(text) for text in TEXTS]})
CHATS = pa.table({"messages": [[*user(text), {"role": "assistant", "content": text[::-1]}] for text in TEXTS]})
OPTIONS: dict[str, Any] = {"token_cache": False, "progress": False}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which tables are made."""
    found = list[str]()

    def counted(name: str) -> Any:
        function = getattr(engine, name)

        def make(*given: Any) -> Any:
            found.append(name)
            return function(*given)

        return make

    for name in ("compile_tokenizer", "DeviceEncoder", "spans_table"):
        monkeypatch.setattr(engine, name, counted(name))
    return found


def prompts(kernels: StrictKernels, tokenizer: Any) -> Any:
    return load_with(engine_on(kernels), PROMPTS, tokenizer, **OPTIONS)


def chats(kernels: StrictKernels, tokenizer: Any) -> Any:
    return load_chats_with(kernels, CHATS, tokenizer, **OPTIONS)


def bytes_of_tables(kernels: StrictKernels) -> int:
    gc.collect()
    return kernels.xp.alive


def test_two_loads_copy_the_tables_once(qwen: Any, made: list[str]) -> None:
    kernels, tokenizer = StrictKernels(), small_tokenizer(qwen.chat_template)
    expected = gpuload.load(PROMPTS, tokenizer, device="cpu", **OPTIONS).tokens.to_lists()
    assert prompts(kernels, tokenizer).tokens.to_lists() == expected
    assert made == ["compile_tokenizer", "DeviceEncoder"]
    tables = bytes_of_tables(kernels)
    assert tables
    assert prompts(kernels, small_tokenizer(qwen.chat_template)).tokens.to_lists() == expected  # another object
    assert made == ["compile_tokenizer", "DeviceEncoder"]
    assert bytes_of_tables(kernels) == tables
    for _ in range(2):
        found = chats(kernels, tokenizer)
        assert (
            found.tokens.to_lists() == gpuload.load_chats(CHATS, tokenizer, device="cpu", **OPTIONS).tokens.to_lists()
        )
    assert made == ["compile_tokenizer", "DeviceEncoder", "spans_table"]


def test_a_tokenizer_that_changes_has_other_tables(qwen: Any, made: list[str]) -> None:
    kernels, tokenizer = StrictKernels(), small_tokenizer(qwen.chat_template)
    before = prompts(kernels, tokenizer).tokens.to_lists()
    tokenizer.add_tokens(["apples"])
    after = prompts(kernels, tokenizer).tokens.to_lists()
    assert after == gpuload.load(PROMPTS, tokenizer, device="cpu", **OPTIONS).tokens.to_lists() != before
    assert made == ["compile_tokenizer", "DeviceEncoder"] * 2


def test_memory_of_other_tokenizers_is_freed(qwen: Any) -> None:
    kernels, sizes = StrictKernels(), list[int]()
    for number in range(4):
        tokenizer = small_tokenizer(qwen.chat_template)
        tokenizer.add_tokens([f"token {k}" for k in range(number)])
        prompts(kernels, tokenizer)
        sizes.append(bytes_of_tables(kernels))
    assert sizes[1] > 1.9 * sizes[0]
    assert sizes[3] < 1.1 * sizes[1]


def test_a_failed_load_leaves_no_more_than_tables(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, tokenizer = StrictKernels(), small_tokenizer(qwen.chat_template)
    prompts(kernels, tokenizer)
    tables = bytes_of_tables(kernels)

    def fail(self: Any, *given: Any) -> Any:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(DeviceEngine, "keep", fail)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        load_with(engine_on(kernels), PROMPTS, tokenizer, device="cuda", **OPTIONS)
    assert bytes_of_tables(kernels) == tables


def test_loads_at_the_same_time(qwen: Any, made: list[str]) -> None:
    kernels, tokenizer, found = StrictKernels(), small_tokenizer(qwen.chat_template), list[Any]()
    threads = [threading.Thread(target=lambda: found.append(prompts(kernels, tokenizer))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = gpuload.load(PROMPTS, tokenizer, device="cpu", **OPTIONS).tokens.to_lists()
    assert [each.tokens.to_lists() for each in found] == [expected] * 4
    assert made == ["compile_tokenizer", "DeviceEncoder"]


class Full(StrictKernels):
    """A device that has no memory for what outlives a load."""

    full = True

    @contextmanager
    def lasting(self) -> Iterator[None]:
        if self.full and threading.current_thread().name.startswith("encode"):
            raise DeviceError("out of GPU memory")
        yield


def test_without_memory_for_tables_each_load_has_its_own(qwen: Any, made: list[str]) -> None:
    kernels, tokenizer = Full(), small_tokenizer(qwen.chat_template)
    for _ in range(2):
        prompts(kernels, tokenizer)
    assert made == ["compile_tokenizer", "DeviceEncoder", "DeviceEncoder"]
    assert bytes_of_tables(kernels) == 0


def test_smaller_chunks_are_those_of_one_load(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, tokenizer, sizes = StrictKernels(), small_tokenizer(qwen.chat_template), list[int]()
    encode = DeviceEncoder.encode

    def little(self: Any, data: Any, offsets: Any) -> Any:
        sizes.append(self.chunk_bytes)
        if len(sizes) == 1:
            raise MemoryError
        return encode(self, data, offsets)

    monkeypatch.setattr(DeviceEncoder, "encode", little)
    for _ in range(2):
        prompts(kernels, tokenizer)
    assert sizes == [256 << 20, 128 << 20, 256 << 20]
