"""sources/batches.py: the same rows, in batches of bounded size, whatever a row group holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import MESSAGES, user

import gpuload
from gpuload.core.errors import HostMemoryError, SourceError
from gpuload.sources import batches
from gpuload.sources.batches import BATCH_BYTES, BATCH_ROWS, bounded, decoded_bytes
from gpuload.sources.columns import to_python
from gpuload.sources.fetch import SourceFile
from gpuload.sources.frames import open_frame
from gpuload.sources.read import Source, open_file

LONG = "a" * 1_000_000


def opened(path: Path) -> Source:
    return open_file(SourceFile(str(path), str(path), "parquet"))


def repeated(count: int, of: list[str]) -> pa.Array:
    """`count` messages that refer to a few texts in turn."""
    number = pa.array(np.arange(count) % len(of), pa.int32())
    content = pa.DictionaryArray.from_arrays(number, of)
    role = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), ["user"])
    return pa.StructArray.from_arrays([role, content], names=["role", "content"])


def prompts(messages: pa.Array, bounds: Any) -> pa.Table:
    column = pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), messages)
    return pa.table({"prompt": column, "number": np.arange(len(column))})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bounds in bytes are smaller by a factor of 1,000."""
    monkeypatch.setattr(batches, "BATCH_BYTES", BATCH_BYTES // 1000)
    monkeypatch.setattr(batches, "_UNCLEAR_BYTES", batches._UNCLEAR_BYTES // 1000)
    monkeypatch.setattr(batches, "_MOST_ROW_BYTES", (1 << 31) // 1000)


@pytest.mark.parametrize("lengths", [[0], [8192], [8193], [100] * 200, [8192, 1, 8191, 20_000], [3, 0, 5]])
def test_bounded_joins_and_splits_by_rows(lengths: list[int]) -> None:
    table = pa.table({"x": np.arange(sum(lengths))})
    ends = np.cumsum(lengths)
    parts = list(bounded((table.slice(end - n, n) for end, n in zip(ends, lengths, strict=True)), "x"))
    assert pa.concat_tables([table.slice(0, 0), *parts]).equals(table)
    assert max(part.num_rows for part in parts) <= BATCH_ROWS
    assert len(parts) <= sum(lengths) // (BATCH_ROWS // 2) + 1


@pytest.mark.usefixtures("small")
def test_bounded_splits_by_bytes_and_a_large_row_is_on_its_own() -> None:
    table = pa.table({"x": ["a" * n for n in [10, 10, 300_000, 10, *[1000] * 200]]})
    parts = list(bounded([table], "x"))
    assert pa.concat_tables(parts).equals(table)
    assert all(part.num_rows == 1 or part.nbytes <= batches.BATCH_BYTES for part in parts)
    assert len(parts) < 2 * 200_000 // batches.BATCH_BYTES  # they are halved until they fit


@pytest.mark.parametrize(
    ("array", "nbytes"),
    [
        (pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, None]), ["aaa", "b"]), 7),
        (prompts(repeated(4, [LONG]), [0, 4])["prompt"].chunk(0), 4_000_024),
        (prompts(repeated(4, [LONG]), [0, 1, 4])["prompt"].chunk(0).slice(0, 1), 1_000_012),
        (pa.array([1, 2, 3]), 24),
        (pa.array([], MESSAGES), 0),
    ],
)
def test_decoded_bytes_resolves_dictionaries(array: pa.Array, nbytes: int) -> None:
    assert nbytes <= decoded_bytes(array) <= nbytes + 16


@pytest.mark.parametrize("store_schema", [True, False])
@pytest.mark.parametrize("size", [1000, 100_000])
def test_a_small_file_of_repeated_long_texts_is_read_in_bounded_batches(
    size: int, store_schema: bool, tmp_path: Path
) -> None:
    """100 GB of text as dictionary indices, in one row group or in many."""
    table = prompts(repeated(100_000, [LONG, "b"]), np.arange(100_001))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=size, store_schema=store_schema)
    assert (tmp_path / "a.parquet").stat().st_size < 6_000_000
    before, rows = pa.total_allocated_bytes(), 0
    for part in opened(tmp_path / "a.parquet").batches():
        assert sum(decoded_bytes(chunk) for column in part.columns for chunk in column.chunks) <= BATCH_BYTES
        assert pa.total_allocated_bytes() - before < min(pa.cpu_count(), 8) * batches._UNCLEAR_BYTES
        expected = table.slice(rows, part.num_rows)
        assert part.column("number").equals(expected.column("number"))
        if rows < 300:
            assert part.column("prompt").to_pylist() == expected.column("prompt").to_pylist()
        rows += part.num_rows
        if rows > 1000:
            break


@pytest.mark.usefixtures("small")
def test_other_columns_of_a_file_of_repeated_long_texts(tmp_path: Path) -> None:
    """A string view, which polars writes, and JSON text, which `datasets` writes."""
    table = prompts(repeated(9000, ["a" * 9000, "b"]), np.arange(9001)).append_column(
        "view", pa.array([f"{i:8}" for i in range(9000)], pa.string_view())
    )
    json = pa.array([['{"x": 1}']] * 9000).cast(pa.list_(pa.json_()))
    pq.write_table(table.append_column("json", json), tmp_path / "a.parquet")
    found = pa.concat_tables(opened(tmp_path / "a.parquet").batches())
    assert found["prompt"].to_pylist() == table["prompt"].to_pylist()
    assert found["view"].to_pylist() == table["view"].to_pylist()
    assert to_python(found["json"].combine_chunks()) == [[{"x": 1}]] * 9000


@pytest.mark.parametrize("store_schema", [True, False])
def test_a_row_that_cannot_be_bounded_is_one_clear_error(store_schema: bool, tmp_path: Path) -> None:
    table = prompts(repeated(3100, [LONG]), [*range(51), 3050, *range(3051, 3101)])
    pq.write_table(table, tmp_path / "a.parquet", store_schema=store_schema)
    with pytest.raises(SourceError, match=r"a.parquet: row 50 or a later one has more than 2 GiB of data: remove it"):
        for _ in opened(tmp_path / "a.parquet").batches():
            pass
    with pytest.raises(SourceError, match="Table: row 50 or a later one"):
        for _ in open_frame(table, "Table").batches():
            pass


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dictionary", [True, False])
def test_long_prompts_are_read_exactly(dictionary: bool, tmp_path: Path) -> None:
    """Texts of very different lengths, some repeated, so that a batch has one row or thousands."""
    rng = np.random.default_rng(0)
    texts = ["x" * int(n) + str(i % 200) for i, n in enumerate(rng.pareto(0.6, 1500).clip(0, 20_000))]
    table = pa.table({"prompt": pa.array([user(text) for text in texts], MESSAGES), "text": texts})
    for size in (200, 1500):
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=size, use_dictionary=dictionary)
        parts = list(opened(tmp_path / "a.parquet").batches())
        assert pa.concat_tables(parts).combine_chunks().equals(table.combine_chunks())
        assert len(parts) > 5


def test_a_batch_that_arrow_cannot_decode_is_read_in_smaller_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"x": np.arange(10_000)})
    pq.write_table(table, tmp_path / "a.parquet")
    real, steps = pq.ParquetFile.iter_batches, []

    def limited(self: Any, step: int, **arguments: Any) -> Any:
        """As Arrow does for a nested column of more than 2 GiB: the rows up to 3,000 are small."""
        steps.append(step)
        row = 0
        for batch in real(self, step, **arguments):
            if step > 100 and row + step > 3000:
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")
            yield batch
            row += len(batch)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", limited)
    monkeypatch.setattr(batches, "BATCH_ROWS", 1024)
    parts = list(opened(tmp_path / "a.parquet").batches())
    assert pa.concat_tables(parts).combine_chunks().equals(table)
    assert steps == [1024, 32]


def test_running_out_of_memory_is_not_a_damaged_file(gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise pa.ArrowMemoryError("malloc of size 123 failed")

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetFile, "iter_batches", fail)
        with pytest.raises(HostMemoryError, match=r"gsm8k.parquet: out of memory while reading \(malloc of size 123"):
            gpuload.load(gsm8k, qwen, device="cpu", token_cache=False)
    monkeypatch.setattr("gpuload.engines.host.engine.render_column", fail)
    with pytest.raises(
        HostMemoryError, match=r"out of memory while loading \(malloc of size 123 failed\): free memory"
    ):
        gpuload.load(gsm8k, qwen, device="cpu", token_cache=False)
