"""Batches that several threads read, render and encode at once are those of one thread, in the same order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import user

import gpuload
from gpuload.engines.protocol import ArrowPrompts
from gpuload.pipeline import stream
from gpuload.pipeline.parts import Batch, Encoded, SourceRows
from gpuload.pipeline.stream import side_by_side

PATIENCE = 60  # seconds until a thread that nobody continues is given up


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are fewer cores."""
    monkeypatch.setattr(pa, "cpu_count", lambda: 4)


def batches(count: int, failing: int | None = None) -> Iterator[Batch]:
    for number in range(count):
        if number == failing:
            raise ValueError(f"read {number}")
        part = SourceRows(number, np.array([0]), pa.table({"number": [number]}))
        yield Batch((part,), ArrowPrompts(pa.array([])))


def numbers(count: int, work: Callable[[Batch], None], failing: int | None = None) -> list[int]:
    """The numbers of the batches that come through, and then that of the one that fails, negative."""
    found: list[int] = []

    def stage(batch: Batch) -> Batch:
        work(batch)
        return batch

    with ExitStack() as stack:
        try:
            found.extend(
                batch.parts[0].source for batch in side_by_side({"a": stage}, batches(count, failing), {}, stack)
            )
        except ValueError as error:
            found.append(-int(str(error).split()[-1]))
    return found


def test_batches_that_are_done_in_another_order_come_in_order() -> None:
    """Of four neighbors, each is done only after the next one."""
    done = [threading.Event() for _ in range(8)]

    def work(batch: Batch) -> None:
        number = batch.parts[0].source
        assert number % 4 == 3 or done[number + 1].wait(PATIENCE)
        done[number].set()

    assert numbers(8, work) == list(range(8))


def test_at_most_one_batch_more_than_threads_has_begun() -> None:
    begun, yielded, lock = [0], [0], threading.Lock()

    def counted() -> Iterator[Batch]:
        for batch in batches(40):
            with lock:
                begun[0] += 1
                # Five that are worked on or wait, and the one that was read and is about to begin.
                assert begun[0] - yielded[0] <= 6
            yield batch

    with ExitStack() as stack:
        for _ in side_by_side({"a": lambda batch: batch}, counted(), {}, stack):
            with lock:
                yielded[0] += 1
    assert yielded == [40]


def test_large_batches_are_worked_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_BYTES", 7)  # a batch has eight bytes
    running, most = [0], [0]

    def work(batch: Batch) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.001)
        running[0] -= 1

    assert numbers(20, work) == list(range(20))
    assert most == [1]


@pytest.mark.parametrize(("failing_read", "failing_work", "expected"), [
    (None, 5, [0, 1, 2, 3, 4, -5]), (6, None, [0, 1, 2, 3, 4, 5, -6]), (6, 5, [0, 1, 2, 3, 4, -5]),
    (5, 6, [0, 1, 2, 3, 4, -5]),
])  # fmt: skip
def test_an_error_comes_after_the_batches_before_it(
    failing_read: int | None, failing_work: int | None, expected: list[int]
) -> None:
    def work(batch: Batch) -> None:
        if (number := batch.parts[0].source) == failing_work:
            raise ValueError(f"work {number}")

    assert numbers(9, work, failing_read) == expected


def test_a_consumer_that_stops_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with ExitStack() as stack:
        coming = side_by_side({"a": lambda batch: batch}, batches(100), {}, stack)
        assert next(coming).parts[0].source == 0
    assert set(threading.enumerate()) == before


def test_batches_with_tokens_pass_unchanged() -> None:
    def work(batch: Batch) -> Batch:
        raise AssertionError

    given = Encoded((SourceRows(0, np.array([0]), pa.table({"a": [0]})),), tokens="tokens")  # type: ignore[arg-type]
    seconds: dict[str, float] = {}
    with ExitStack() as stack:
        assert list(side_by_side({"a": work}, iter([given]), seconds, stack)) == [given]
    assert not seconds


def test_few_rows_are_shared_out_among_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_PIECE_ROWS", 10)
    column = pa.array([str(k) for k in range(57)])
    table = pa.table({"prompt": column})
    whole = Batch((SourceRows(0, np.arange(57), table),), ArrowPrompts(column))
    given = [Batch((SourceRows(0, np.arange(low, high), table[low:high]),), whole.prompts.take(np.arange(low, high)))
             for low, high in ((0, 50), (50, 57))]  # fmt: skip
    cached = Encoded((SourceRows(1, np.arange(40), pa.table({"a": range(40)})),), tokens="tokens")  # type: ignore[arg-type]
    parts = list(stream.shared_out(iter([*given, cached]), 57))
    assert [len(part) for part in parts] == [13, 13, 12, 12, 7, 40]
    assert parts[-1] is cached
    for part in parts[:-1]:
        assert isinstance(part, Batch)
        assert part.table.column("prompt").to_pylist() == part.prompts.to_arrow(np.arange(len(part))).to_pylist()
        assert part.parts[0].rows.tolist() == [int(text) for text in part.table.column("prompt").to_pylist()]
    assert list(stream.shared_out(iter(given), 1000)) == given


def test_rows_that_are_shared_out_are_those_of_one_batch(
    write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also rejected rows, and those that another load has cached."""
    file = write([user("word " * (k % 7) + str(k)) if k % 11 else None for k in range(100)])
    expected = gpuload.load(file, qwen, verify="full", token_cache=False)
    monkeypatch.setattr(stream, "_PIECE_ROWS", 9)
    for _ in range(2):
        found = gpuload.load(file, qwen, verify="full")
        assert found.tokens.to_lists() == expected.tokens.to_lists()
        assert [found.origin(k) for k in range(len(found))] == [expected.origin(k) for k in range(len(expected))]
        assert found.report.rejected == expected.report.rejected
    some = gpuload.load(file, qwen, max_samples=40, shuffle=True, seed=1, token_cache=False)
    monkeypatch.undo()
    same = gpuload.load(file, qwen, max_samples=40, shuffle=True, seed=1, token_cache=False)
    assert some.tokens.to_lists() == same.tokens.to_lists()


def test_small_data_is_loaded_without_threads(
    write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write([user("word " * (k % 7) + str(k)) if k % 11 else None for k in range(100)])

    def no_thread(*_: Any) -> Any:
        raise AssertionError("a thread was started")

    monkeypatch.setattr(stream, "ThreadPoolExecutor", no_thread)
    found = gpuload.load(file, qwen, verify="full", token_cache=False)
    assert not found.report.overlapping
    assert set(found.report.seconds) >= {"read", "render", "encode"}
    for name, size in (("_PIECE_ROWS", 99), ("_PIECE_BYTES", 10)):
        with monkeypatch.context() as patch:
            patch.setattr(stream, name, size)
            with pytest.raises(AssertionError, match="a thread was started"):
                gpuload.load(file, qwen, verify="full", token_cache=False)
    monkeypatch.undo()
    monkeypatch.setattr(stream, "_PIECE_ROWS", 99)
    in_threads = gpuload.load(file, qwen, verify="full", token_cache=False)
    assert set(in_threads.report.overlapping) >= {"read", "render", "encode"}
    assert found.tokens.to_lists() == in_threads.tokens.to_lists()
    assert found.report.rejected == in_threads.report.rejected


TEMPLATE = """{% for m in messages %}{% if m.content.startswith('a') %}A{% elif 'b' in m.content %}B{% endif %}\
{% if loop.last and m.content.endswith(' ') %}{{ m.content|wordcount }}{% else %}{{ m.content.strip() }}{% endif %}\
<|im_end|>{% endfor %}"""


def test_many_files_with_many_paths(write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight files at once, in batches that meet the same new paths of the template at the same time."""
    texts = [f"{head}{k % 7}{tail}" for k in range(60) for head in ("a", "b", "\u4f60") for tail in ("", " ", "\n")]
    rows = [user(text) * (1 + number % 3) for number, text in enumerate(texts)]
    files = [write(rows[start::8], f"{start}.parquet") for start in range(8)]
    monkeypatch.setattr("gpuload.sources.batches.BATCH_ROWS", 16)
    monkeypatch.setattr("gpuload.pipeline.parts._SMALL_ROWS", 0)
    options = {"token_cache": False, "chat_template": TEMPLATE, "verify": "full", "progress": False}
    found = gpuload.load(files, qwen, **options)
    expected = [
        qwen.apply_chat_template(row, chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False)
        for start in range(8)
        for row in rows[start::8]
    ]
    assert found.tokens.to_lists() == expected
    assert not found.report.check.mismatches
    assert found.report.rows_compiled > 300
    assert sum(found.report.by_reference.values()) > 50


@pytest.mark.parametrize("some", [1, 5, 79])
def test_samples_of_many_files(write: Callable[..., str], qwen: Any, some: int) -> None:
    rows = [user(f"row {number}") for number in range(80)]
    files = [write(rows[start : start + 10], f"{start}.parquet") for start in range(0, 80, 10)]
    one = gpuload.load(write(rows), qwen, max_samples=some, shuffle=True, seed=3, progress=False)
    many = gpuload.load(files, qwen, max_samples=some, shuffle=True, seed=3, progress=False, token_cache=False)
    assert many.tokens.to_lists() == one.tokens.to_lists()
