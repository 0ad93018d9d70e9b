"""Rows of small files are rendered and encoded together on a device. Nothing else of a load may tell that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import user
from simulator import engine_on, load_chats_with, load_with
from simulator.host_kernels import COMPILER
from simulator.stream_checks import StreamKernels

import gpuload
from gpuload.cache.directory import IDS, tokens_directory
from gpuload.cache.entry import Entry
from gpuload.core.errors import DataError, MismatchError
from gpuload.engines.device.engine import DeviceEngine

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

FILES, ROWS = 7, 9
OPTIONS: dict[str, Any] = {"max_prompt_length": 60}


def prompt_of(file: int, row: int) -> Any:
    """Some are rejected, some too long, and some have text of control tokens or are rendered by transformers."""
    if row == 3 and file % 2:
        return None
    if row == 4:
        return user(f"<|im_start|> {file} " * (file % 3))
    if row == 5 and file == 2:
        return user(None)
    return user(f"file {file} row {row} " + "long " * (40 * (row == 6)))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """JSON and parquet, with columns of their own; one file is empty, and one is given twice."""
    kind = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
    made = []
    for number in range(FILES):
        rows = [{"prompt": prompt_of(number, row), "n": row, f"of {number % 3}": f"{number}"} for row in range(ROWS)]
        made.append(str(tmp_path / f"{number}.{'jsonl' if number in (2, 3) else 'parquet'}"))
        if made[-1].endswith("jsonl"):
            Path(made[-1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
            prompts = pa.array([row["prompt"] for row in rows], kind)
            pq.write_table(pa.table({"prompt": prompts, **columns}), made[-1], row_group_size=4)
    pq.write_table(pq.read_table(made[0]).slice(0, 0), tmp_path / "empty.parquet")
    return [*made[:4], str(tmp_path / "empty.parquet"), *made[4:], made[1]]


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each rendering on the device had."""
    found: list[int] = []
    render = DeviceEngine.render
    monkeypatch.setattr(DeviceEngine, "render", lambda self, some: found.append(len(some)) or render(self, some))
    return found


def assert_same(found: Any, expected: Any) -> None:
    assert found.report.check.mismatches == []
    assert found.tokens.to_lists() == expected.tokens.to_lists()
    assert [found.origin(row) for row in range(len(found))] == [expected.origin(row) for row in range(len(expected))]
    assert found.columns.equals(expected.columns)
    one, other = found.report, expected.report
    for name in ("rejected", "examples", "overlong", "rows_read", "rows_kept", "control_rows", "by_reference"):
        assert getattr(one, name) == getattr(other, name), name
    assert (one.shortest, one.longest, one.text_bytes) == (other.shortest, other.longest, other.text_bytes)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"return_raw_chat": True, "return_full_prompt": True},
        {"max_samples": 31},
        {"max_samples": 31, "shuffle": True, "seed": 1, "verify": "full"},
        {"store": "disk"},
        {"store": "disk", "max_samples": 20, "shuffle": True, "seed": 2, "return_full_prompt": True},
        {"truncation": "left", "filter_overlong_prompts": False},
    ],
    ids=str,
)
def test_joined_rows_are_those_of_files(
    files: list[str], qwen: Any, more: dict[str, Any], rendered: list[int], tmp_path: Path
) -> None:
    kernels = StreamKernels()
    expected = gpuload.load(files, qwen, device="cpu", cache_dir=str(tmp_path / "cpu"), **OPTIONS, **more)
    found = load_with(engine_on(kernels), files, qwen, cache_dir=str(tmp_path / "gpu"), **OPTIONS, **more)
    assert_same(found, expected)
    assert kernels.races == []
    assert len(rendered) <= 3, "JSON has other types of columns than parquet"


@pytest.mark.usefixtures("warm_cache")
def test_each_file_has_its_entry(files: list[str], qwen: Any, rendered: list[int], tmp_path: Path) -> None:
    """With the ids and counts of its own rows: it is used without the others."""

    def entries(name: str) -> dict[str, Any]:
        found = {}
        for path in tokens_directory(str(tmp_path / name)).glob(f"*{IDS}"):
            entry = Entry.again(path, path.stem)
            rows = entry.rows(0, entry.num_rows)
            counts = rows.rejected, rows.compiled_rows, rows.reasons, rows.control_rows
            found[path.stem] = (rows.ids.to_lists(), rows.text_sizes.tolist(), counts, entry.verified, entry.compared)
        return found

    options: dict[str, Any] = OPTIONS | {"verify": "full"}
    gpuload.load(files, qwen, device="cpu", cache_dir=str(tmp_path / "cpu"), **options)
    load_with(engine_on(StreamKernels()), files, qwen, cache_dir=str(tmp_path / "gpu"), **options)
    expected = entries("cpu")
    assert len(expected) == FILES
    assert entries("gpu") == expected
    rendered.clear()
    for some in (files, files[3:5], files[:1]):
        again = load_with(engine_on(StreamKernels()), some, qwen, cache_dir=str(tmp_path / "gpu"), **options)
        assert_same(again, gpuload.load(some, qwen, device="cpu", token_cache=False, **options))
    assert not rendered


@pytest.mark.usefixtures("warm_cache")
def test_a_file_that_is_cached_is_not_joined_to_others(files: list[str], qwen: Any, tmp_path: Path) -> None:
    more = OPTIONS | {"cache_dir": str(tmp_path / "cache")}
    load_with(engine_on(StreamKernels()), files[5:6], qwen, **more)
    found = load_with(engine_on(StreamKernels()), files, qwen, **more)
    assert found.report.from_cache == files[5:6]
    assert_same(found, gpuload.load(files, qwen, device="cpu", token_cache=False, **OPTIONS))


def test_an_error_names_the_file_and_its_row(files: list[str], qwen: Any) -> None:
    options: dict[str, Any] = {"token_cache": False, "strict": True, **OPTIONS}
    for some in (files, files[2:], files[5:]):
        with pytest.raises(DataError) as expected:
            gpuload.load(some, qwen, device="cpu", **options)
        with pytest.raises(DataError) as found:
            load_with(engine_on(StreamKernels()), some, qwen, **options)
        assert str(found.value) == str(expected.value)


def test_a_difference_names_the_file_and_its_row(files: list[str], qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = DeviceEngine.encode

    def wrong(self: DeviceEngine, text: Any) -> Any:
        made = encode(self, text)
        with self._kernels.current():
            made.ids.values[made.ids.offsets[2 * ROWS + 1]] ^= 1  # row 1 of the third file
        return made

    monkeypatch.setattr(DeviceEngine, "encode", wrong)
    parquet = [files[0], files[5], files[7]]  # without rejected rows
    with pytest.raises(MismatchError, match=f"{parquet[2]} row 1: token 0 is "):
        load_with(engine_on(StreamKernels()), parquet, qwen, strict=True, verify="full", token_cache=False, **OPTIONS)


def test_chats_of_small_files(tmp_path: Path, qwen: Any, rendered: list[int]) -> None:
    files = []
    for number in range(6):
        files.append(str(tmp_path / f"{number}.jsonl"))
        rows = [[*user(f"{number} {row}"), {"role": "assistant", "content": "b" * row}] for row in range(number + 1)]
        Path(files[-1]).write_text("".join(json.dumps({"messages": each}) + "\n" for each in rows))
    expected = gpuload.load_chats(files, qwen, device="cpu")
    found = load_chats_with(StreamKernels(), files, qwen)
    assert rendered == [21]
    assert found.tokens.to_lists() == expected.tokens.to_lists()
    for one, other in zip(found, expected, strict=True):
        assert str(one) == str(other)
