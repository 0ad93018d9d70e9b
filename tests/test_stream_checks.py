"""Races between streams are found, and only races; then loads on the device engine have none."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import user
from simulator import load_with
from simulator.host_kernels import COMPILER
from simulator.stream_checks import HostStream, StreamKernels
from test_device_engine import assert_same
from tiers import core, exhaustive

import gpuload
from gpuload.core.options import Options
from gpuload.engines.conversations import Conversations, from_arrow
from gpuload.engines.device import cuda
from gpuload.engines.device.encode import DeviceEncoder
from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.device.shared import ThreadStreams
from gpuload.engines.device.texts import DeviceTexts, gather
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source, with_prompts

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


class Two:
    """Two streams, and an array made on the first one."""

    def __init__(self) -> None:
        self.kernels = StreamKernels()
        self.xp = self.kernels.xp
        self.first, self.second = self.kernels.new_stream(), self.kernels.new_stream()
        with self.first:
            self.array = self.xp.arange(9)

    def wait_for_event(self) -> None:
        self.second.wait_event(self.first.record())

    def wait_on_host(self) -> None:
        self.first.synchronize()


ORDERED: list[Callable[[Two], Any]] = [Two.wait_for_event, Two.wait_on_host]


def nothing(two: Two) -> None:
    pass


def wait_for_too_early_an_event(two: Two) -> None:
    event = two.first.record()
    with two.first:
        two.array += 1
    two.second.wait_event(event)


def wait_for_the_wrong_stream(two: Two) -> None:
    two.second.synchronize()


def wait_in_the_wrong_direction(two: Two) -> None:
    two.first.wait_event(two.second.record())


UNORDERED: list[Callable[[Two], Any]] = [
    nothing, wait_for_too_early_an_event, wait_for_the_wrong_stream, wait_in_the_wrong_direction
]  # fmt: skip


def read(two: Two) -> None:
    two.array + 1


def read_a_view(two: Two) -> None:
    two.array[2:].view(np.uint8).sum()


def write(two: Two) -> None:
    two.array[3] = 1


def write_to_out(two: Two) -> None:
    two.xp.cumsum(two.xp.ones(9, np.int64), out=two.array)


def copy_to_the_host(two: Two) -> None:
    two.array.get()


def convert(two: Two) -> None:
    int(two.array[3])


def launch_that_reads(two: Two) -> None:
    data, out = two.xp.zeros(9, np.uint8), two.xp.empty(9, np.int64)
    two.kernels.run("hash_texts", 9, 9, data, two.array * 0, two.xp.zeros(9, np.int64), out)


def launch_that_writes(two: Two) -> None:
    starts = two.xp.zeros(9, np.int64)
    two.kernels.run("hash_texts", 9, 9, two.xp.zeros(9, np.uint8), starts, starts, two.array)


def launch_that_reads_by_address(two: Two) -> None:
    address = two.xp.asarray(np.array([two.kernels.address(two.array) + 8], np.int64))
    gather(two.kernels, address, two.xp.full(1, 16, np.int64))


USES = [
    read, read_a_view, write, write_to_out, copy_to_the_host, convert, launch_that_reads, launch_that_writes,
    launch_that_reads_by_address,
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("between", [*ORDERED, *UNORDERED])
def test_a_use_on_another_stream(between: Callable[[Two], Any], use: Callable[[Two], Any]) -> None:
    two = Two()
    between(two)
    with two.second:
        use(two)
    assert bool(two.kernels.races) == (between in UNORDERED)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("ordered", [False, True])
def test_memory_is_written_after_it_was_read(use: Callable[[Two], Any], ordered: bool) -> None:
    two = Two()
    two.wait_for_event()
    with two.second:
        use(two)
    if ordered:
        two.first.wait_event(two.second.record())
    with two.first:
        two.array += 1
    waits = use in (copy_to_the_host, convert)
    assert bool(two.kernels.races) == (not ordered and not waits)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("order", ["", "event", "host", "event before"])
def test_memory_is_freed_after_it_was_used(use: Callable[[Two], Any], order: str) -> None:
    two = Two()
    two.wait_for_event()
    if order == "event before":
        two.first.wait_event(two.second.record())
    with two.second:
        use(two)
    if order == "event":
        two.first.wait_event(two.second.record())
    if order == "host":
        two.second.synchronize()
    del two.array
    waits = use in (copy_to_the_host, convert)
    freed_early = any("freed" in race for race in two.kernels.races)
    assert freed_early == (order not in ("event", "host") and not waits)


def test_reads_on_two_streams_and_views_are_no_races() -> None:
    two = Two()
    two.first.synchronize()
    for stream in (two.first, two.second, two.first):
        with stream:
            two.array + 1
    two.array[1:].reshape(2, 4).view(np.uint8)
    two.second.synchronize()
    del two.array
    assert two.kernels.races == []


def test_a_race_names_both_uses() -> None:
    two = Two()
    with two.second:
        two.array + 1
    assert two.kernels.races == ["not ordered: allocated on stream 3, read by add on stream 4"]


def test_memory_that_outlives_the_load_is_freed_after_a_wait() -> None:
    two = Two()
    with two.first, two.kernels.lasting():
        array = two.xp.zeros(3, np.int64)
    del array
    assert two.kernels.races == []


@pytest.mark.parametrize("waits", [False, True])
def test_threads_learn_from_each_other_by_results_only(waits: bool) -> None:
    """Whatever one thread has waited for, another does not know before it has its result."""
    kernels, made = StreamKernels(), threading.Event()

    def make() -> Any:
        with kernels.current():
            array = kernels.xp.arange(3)
        made.set()
        return array

    with kernels.loading(), ThreadPoolExecutor(1) as pool:
        task = pool.submit(make)
        assert made.wait(60)
        array = task.result() if waits else task._result  # type: ignore[attr-defined]
        while array is None:
            array = task._result  # type: ignore[attr-defined]
        with kernels.current():
            array + 1
    assert bool(kernels.races) == (not waits)


def test_work_outside_of_a_context_is_found() -> None:
    kernels = StreamKernels()
    with kernels.loading(), ThreadPoolExecutor(1) as pool:
        pool.submit(kernels.xp.arange, 3).result()
    assert kernels.races[0] == "device work outside of kernels.current()"


# -- loads -----------------------------------------------------------------------------------------------------------


def reader(kernels: StreamKernels, size: int) -> Any:
    """As cuDF's: makes the prompt column on the reading thread's stream, some rows at a time."""

    def read(source: Source, prompt_key: str) -> Iterator[Conversations] | None:
        if source.without is None:
            return None
        column = pa.concat_arrays([prompts for _, prompts in with_prompts(source, prompt_key)])
        parts = (column.slice(at, size) for at in range(0, len(column), size))
        chunks: Iterator[Conversations] = (from_arrow(DeviceTexts(kernels), part) for part in parts)
        return cuda._on_device(kernels, chunks)  # type: ignore[arg-type]

    return read


def load(kernels: StreamKernels, *arguments: Any, **options: Any) -> gpuload.PromptDataset:
    """`gpuload.load` in chunks of 60 rows."""

    def engine(chosen: Options, reference: Reference, exact_only: bool = False) -> DeviceEngine:
        make = reader(kernels, 60)
        return DeviceEngine(kernels, torch.device("cpu"), reference, exact_only, make, chosen.tokens_on)

    return load_with(engine, *arguments, **options)


OPTIONS: list[dict[str, Any]] = [
    {}, {"return_raw_chat": True, "return_full_prompt": True}, {"max_samples": 77, "shuffle": True, "seed": 3},
    {"tokens_on": "host"}, {"tokens_on": "device", "verify": "off"}, {"verify": "full", "max_samples": 100},
    {"filter_overlong_prompts": False, "truncation": "left"},
    {"apply_chat_template_kwargs": {"sanitize_control_tokens": True}, "max_samples": 200},
]  # fmt: skip


@pytest.mark.parametrize("options", core(OPTIONS, *OPTIONS[2:4]), ids=str)
def test_loads_have_no_races(gsm8k: str, qwen: Any, options: Any) -> None:
    kernels, options = StreamKernels(), {"max_prompt_length": 96, "max_samples": 400} | options
    found = load(kernels, gsm8k, qwen, **options)
    assert_same(found, gpuload.load(gsm8k, qwen, device="cpu", **options))
    assert [batch["input_ids"].shape for batch in found.loader(16)]
    del found
    gc.collect()
    assert kernels.races == []


@exhaustive
def test_rows_that_fall_back_have_no_races(files: list[str], qwen: Any, warm_cache: Any) -> None:
    """Several files with rejected rows and rows by reference, and twice: the second time from the token cache."""
    kernels = StreamKernels()
    for _ in range(2):
        found = load(kernels, files, qwen, max_prompt_length=64)
        expected = gpuload.load(files, qwen, device="cpu", max_prompt_length=64, token_cache=False)
        assert found.tokens.to_lists() == expected.tokens.to_lists()
        assert found.report.rejected == expected.report.rejected
    odd = ["one", "l\u0304\u0323" * 50, "x" * 5000, "<|im_end|>", ""] * 40
    table = pa.table({"prompt": [user(text) for text in odd], "more": odd})
    assert load(kernels, table, qwen, max_prompt_length=5000).report.rows_fallback == 80
    gc.collect()
    assert kernels.races == []


def test_retries_have_no_races(gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out while chunks are encoded: what a failed attempt leaves is freed."""
    encode, failed = DeviceEncoder.encode, list[int]()

    def little(self: DeviceEncoder, *arguments: Any) -> Any:
        made = encode(self, *arguments)
        if not failed:
            failed.append(self.chunk_bytes)
            raise MemoryError
        return made

    monkeypatch.setattr(DeviceEncoder, "encode", little)
    kernels = StreamKernels()
    options: dict[str, Any] = {"max_prompt_length": 128, "max_samples": 300}
    assert_same(load(kernels, gsm8k, qwen, **options), gpuload.load(gsm8k, qwen, device="cpu", **options))
    assert failed
    assert kernels.races == []


@pytest.mark.parametrize(("thread", "races"), [
    ("read", ["allocated", "read by lay_pieces", "read by copy_pieces"]), ("render", ["read by list_pretokens"]),
    ("encode", ["read by a copy to the host"]), ("MainThread", ["read by copy_pieces", "freed"]),
])  # fmt: skip
@exhaustive
def test_without_the_wait_of_a_thread_a_load_has_races(
    gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch, thread: str, races: list[str]
) -> None:
    """The contexts of this thread end without a wait. (Those of verify end with a copy to the host, which is one.)"""
    waits = ThreadStreams.current

    @contextmanager
    def current(self: ThreadStreams) -> Iterator[None]:
        with waits(self):
            pass  # makes the stream
        if threading.current_thread().name.split("_")[0] != thread:
            with waits(self):
                yield
        else:
            with self._of.thread:
                yield

    monkeypatch.setattr(ThreadStreams, "current", current)
    kernels = StreamKernels()
    load(kernels, gsm8k, qwen, max_prompt_length=96, max_samples=400)
    gc.collect()
    found = "; ".join(kernels.races)
    assert [race for race in races if race not in found] == []


def test_each_thread_of_a_load_has_a_stream(gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, used = StreamKernels(), dict[str, set[int]]()
    enter = HostStream.__enter__

    def entering(self: HostStream) -> HostStream:
        used.setdefault(threading.current_thread().name.split("_")[0], set()).add(self.number)
        return enter(self)

    monkeypatch.setattr(HostStream, "__enter__", entering)
    load(kernels, gsm8k, qwen, max_prompt_length=96, max_samples=400)
    assert used.keys() == {"MainThread", "read", "render", "encode", "verify"}
    streams = [used[name] - used["MainThread"] for name in used if name != "MainThread"]
    assert [len(one) for one in streams] == [1] * 4
    assert len(set.union(*streams)) == 4


def test_later_loads_use_the_streams_and_tables_of_earlier_ones(gsm8k: str, qwen: Any) -> None:
    kernels = StreamKernels()
    options: dict[str, Any] = {"max_prompt_length": 96, "max_samples": 300}
    expected = gpuload.load(gsm8k, qwen, device="cpu", **options)
    assert_same(load(kernels, gsm8k, qwen, **options), expected)
    streams = set(map(id, kernels._streams._idle))
    assert len(streams) == 5
    found = [load(kernels, gsm8k, qwen, **options) for _ in range(2)]
    assert set(map(id, kernels._streams._idle)) == streams
    for one in found:
        assert_same(one, expected)
    del found, one
    gc.collect()
    assert kernels.races == []
