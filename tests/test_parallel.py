"""Columns decoded by several threads are those that one thread decodes, in the same order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import user
from tiers import shared, shared_files

from gpuload.core.errors import SourceError
from gpuload.engines.device.parts import zip_with_tables
from gpuload.sources import parallel
from gpuload.sources import read as reading
from gpuload.sources.fetch import SourceFile
from gpuload.sources.parallel import in_order, row_group_parts
from gpuload.sources.read import open_file, other_columns

PATIENCE = 60  # seconds until a thread that nobody continues is given up


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are fewer cores."""
    monkeypatch.setattr(pa, "cpu_count", lambda: 4)


def table(number: int) -> pa.Table:
    return pa.table({"number": [number]})


def numbers(tables: Iterator[pa.Table]) -> list[int]:
    return [one["number"][0].as_py() for one in tables]


@pytest.mark.parametrize(("rows", "parts"), [
    ([], []), ([5], [range(1)]), ([10, 1], [range(1), range(1, 2)]), ([3, 3, 3, 3, 3, 3], [range(4), range(4, 6)]),
    ([0, 0, 10, 0], [range(3), range(3, 4)]),
])  # fmt: skip
def test_parts(monkeypatch: pytest.MonkeyPatch, rows: list[int], parts: list[range]) -> None:
    monkeypatch.setattr(parallel, "PART_ROWS", 10)
    assert row_group_parts(rows) == parts


def test_parts_that_are_decoded_in_another_order_are_delivered_in_order() -> None:
    """Each part begins only after the next one has ended."""
    ended = [threading.Event() for _ in range(4)]

    def part(number: int) -> Iterator[pa.Table]:
        assert number == 3 or ended[number + 1].wait(PATIENCE)
        yield from (table(10 * number + i) for i in range(3))
        ended[number].set()

    found = numbers(in_order([part(i) for i in range(4)]))
    assert found == [10 * number + i for number in range(4) for i in range(3)]


@pytest.mark.parametrize("limit", [0, 1, 8 * 7, 1 << 30])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_any_bound_and_number_of_threads(monkeypatch: pytest.MonkeyPatch, limit: int, threads: int) -> None:
    monkeypatch.setattr(parallel, "AHEAD_BYTES", limit)
    monkeypatch.setattr(pa, "cpu_count", lambda: threads)
    sizes = np.random.default_rng(limit).integers(0, 9, 30).tolist()
    made, delivered, running = [0], [0], threading.Lock()

    def part(number: int) -> Iterator[pa.Table]:
        for i in range(sizes[number]):
            with running:
                made[0] += 1
                # 8 bytes per table, and one table per thread that is beyond the bound.
                assert made[0] - delivered[0] <= limit // 8 + threads + 1
            yield table(100 * number + i)

    def consumed() -> Iterator[pa.Table]:
        for one in in_order([part(i) for i in range(len(sizes))]):
            with running:
                delivered[0] += 1
            yield one

    assert numbers(consumed()) == [100 * number + i for number in range(len(sizes)) for i in range(sizes[number])]


def test_an_error_comes_after_the_tables_before_it() -> None:
    failed = threading.Event()

    def good() -> Iterator[pa.Table]:
        assert failed.wait(PATIENCE)
        yield from map(table, range(3))

    def bad() -> Iterator[pa.Table]:
        yield table(3)
        failed.set()
        raise SourceError("x: damaged")

    tables = in_order([good(), bad(), good()])
    assert numbers(next(tables) for _ in range(4)) == [0, 1, 2, 3]
    with pytest.raises(SourceError, match="x: damaged"):
        next(tables)


def test_a_consumer_that_ends_early_stops_the_threads() -> None:
    def endless() -> Iterator[pa.Table]:
        number = 0
        while True:
            yield table(number)
            number += 1

    before = threading.active_count()
    tables = in_order([endless() for _ in range(9)])
    assert numbers(next(tables) for _ in range(3)) == [0, 1, 2]
    tables.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_the_bound_is_one_for_several_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has in advance is not decoded by the other; it is again after the first one has ended."""
    monkeypatch.setattr(parallel, "AHEAD_BYTES", 80)
    made, full = [0, 0], threading.Event()

    def endless(consumer: int) -> Iterator[pa.Table]:
        while True:
            made[consumer] += 1
            if made[0] >= 10:
                full.set()
            yield table(made[consumer])

    first, second = (in_order([endless(consumer)]) for consumer in (0, 1))
    assert numbers([next(first)]) == [1]
    assert full.wait(PATIENCE)
    assert numbers(next(second) for _ in range(5)) == [1, 2, 3, 4, 5]
    assert made[1] <= 7
    first.close()  # type: ignore[attr-defined]
    while made[1] < 10:
        next(second)
    second.close()  # type: ignore[attr-defined]
    assert not parallel._Waiting._of_all


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with row groups of 50 rows, two in a part."""
    monkeypatch.setattr(parallel, "PART_ROWS", 100)
    path = tmp_path / "x.parquet"
    columns = {"prompt": [user(str(i)) for i in range(930)], "answer": [f"a{i}" for i in range(930)]}
    columns["number"] = list(range(930))
    pq.write_table(pa.table(columns), path, row_group_size=50)
    return path


def test_row_groups_are_decoded_at_the_same_time(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, real = threading.Barrier(4), reading.read_row_group

    def read(parquet: Any, reopen: Any, group: int, columns: Any) -> Any:
        if group in (0, 2, 4, 6):
            together.wait(PATIENCE)
        return real(parquet, reopen, group, columns)

    monkeypatch.setattr(reading, "read_row_group", read)
    source = open_file(SourceFile(str(groups), "x", "parquet"))
    found = pa.concat_tables(other_columns(source, "prompt", False))
    assert found.equals(pq.read_table(groups, columns=["answer", "number"]))


def test_row_groups_are_decoded_while_the_first_prompts_are_read(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, real = threading.Event(), reading.read_row_group

    def read(parquet: Any, reopen: Any, group: int, columns: Any) -> Any:
        if group == 6:
            begun.set()
        return real(parquet, reopen, group, columns)

    def chunks() -> Iterator[Any]:
        assert begun.wait(PATIENCE)
        yield range(930)

    monkeypatch.setattr(reading, "read_row_group", read)
    source = open_file(SourceFile(str(groups), "x", "parquet"))
    with ThreadPoolExecutor(1) as thread:
        read_on = zip_with_tables(chunks(), source, "prompt", False, thread)  # type: ignore[type-var]
        assert [one.num_rows for one, _ in read_on] == [930]


@pytest.mark.parametrize("real", ["made up", pytest.param("shared", marks=shared)])
@pytest.mark.parametrize("keep_prompts", [False, True])
def test_columns_are_those_that_one_thread_decodes(groups: Path, keep_prompts: bool, real: str) -> None:
    files = [groups] if real == "made up" else [*shared_files("*.parquet"), *shared_files("wild/*.parquet")]
    for file in files:
        source = open_file(SourceFile(str(file), file.name, "parquet"))
        if "prompt" not in source.schema.names or len(source.schema) == 1:
            continue
        found = list(other_columns(source, "prompt", keep_prompts))
        expected = list(source.batches())
        if not keep_prompts:
            # Batches are bounded in bytes, so those without prompts may be larger.
            found, expected = ([pa.concat_tables(tables)] for tables in (found, expected))
            expected = [one.drop_columns(["prompt"]) for one in expected]
        assert len(found) == len(expected)
        assert all(one.equals(other) for one, other in zip(found, expected, strict=True)), file


def test_a_damaged_page_is_an_error(groups: Path) -> None:
    pq.write_table(pq.read_table(groups), groups, row_group_size=50, write_page_checksum=True, compression="none")
    whole = groups.read_bytes()
    at = whole.index(b"a555")
    groups.write_bytes(whole[:at] + b"b" + whole[at + 1 :])
    source = open_file(SourceFile(str(groups), "x", "parquet"))
    with pytest.raises(SourceError, match="x: damaged parquet file .*CRC.*: download it again"):
        list(other_columns(source, "prompt", False))


def test_a_file_that_changes_is_an_error(groups: Path) -> None:
    source = open_file(SourceFile(str(groups), "x", "parquet"))
    tables = other_columns(source, "prompt", False)
    groups.unlink()
    with pytest.raises(SourceError, match="x: the file was changed while it was loaded"):
        list(tables)
