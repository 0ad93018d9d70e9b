"""Remote parquet files that are read where they are, with a store on disk: real servers on loopback."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from cache_cases import same
from conftest import user
from fsspec.implementations.memory import MemoryFileSystem

import gpuload
from gpuload.core.errors import SourceError
from gpuload.pipeline.keep_on_disk import OnDisk
from gpuload.sources import batches, fetch, remote
from tests import s3_cases

s3 = s3_cases.s3


@pytest.fixture
def no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*arguments: Any) -> str:
        raise AssertionError("a file was downloaded")

    monkeypatch.setattr(fetch, "_fetch", download)


def rows(write: Callable[..., str]) -> str:
    columns = {"prompt": [user(f"row {n} " * (n % 9)) for n in range(500)], "n": list(range(500))}
    return write(columns)


@pytest.mark.parametrize("options", [{}, {"max_samples": 100, "shuffle": True, "seed": 1}], ids=str)
def test_s3(
    options: dict[str, Any], s3: Any, write: Callable[..., str], qwen: Any, warm_cache: Path, no_downloads: None
) -> None:
    path = rows(write)
    s3.upload_file(path, "bucket", "only/data.parquet")
    expected = gpuload.load(path, qwen, token_cache=False, **options)
    for again in (False, True):
        found = gpuload.load("s3://bucket/only/*.parquet", qwen, store="disk", **options)
        assert found.tokens.to_lists() == expected.tokens.to_lists()
        assert found.take(["n"]) == expected.take(["n"])
        assert bool(found.report.from_cache) == (again and not options)
    assert not list(warm_cache.parent.glob("*.parquet"))


def test_a_changed_file_is_read_again(
    s3: Any, write: Callable[..., str], qwen: Any, warm_cache: Path, no_downloads: None
) -> None:
    for text in ("a", "b"):
        s3.upload_file(write([user(text)]), "bucket", "data.parquet")
        found = gpuload.load("s3://bucket/data.parquet", qwen, store="disk")
        same(found, gpuload.load("s3://bucket/data.parquet", qwen, store="disk", token_cache=False))
        assert found.tokens.to_lists() == gpuload.load(write([user(text)]), qwen, token_cache=False).tokens.to_lists()


def test_a_file_that_changes_while_it_is_read(
    s3: Any, write: Callable[..., str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "BATCH_ROWS", 100)
    s3.upload_file(rows(write), "bucket", "data.parquet")
    real = OnDisk.add

    def add(self: Any, *arguments: Any) -> None:
        s3.upload_file(write([user("other")], "other.parquet"), "bucket", "data.parquet")
        real(self, *arguments)

    monkeypatch.setattr(OnDisk, "add", add)
    with pytest.raises(SourceError, match="s3://bucket/data.parquet"):
        gpuload.load("s3://bucket/data.parquet", qwen, store="disk")
    assert not list((warm_cache.parent / "store").glob("*"))


def test_storage_that_disappears(
    write: Callable[..., str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/data.parquet", Path(rows(write)).read_bytes())
    real = remote.RemoteFile.open

    found = gpuload.load("memory://data.parquet", qwen, store="disk")
    assert len(found) == 500
    opened = iter(range(100))

    def open_once(self: Any) -> Any:
        if next(opened) > 0:  # behind the one for the footer
            monkeypatch.setattr(remote._Reader, "read", lambda self, size=-1: _raise(self))
        return real(self)

    def _raise(reader: Any) -> bytes:
        raise reader._failed(ConnectionError("connection reset"))

    monkeypatch.setattr(remote.RemoteFile, "open", open_once)
    message = "memory:.*data.parquet: reading failed: ConnectionError: connection reset: check the connection"
    with pytest.raises(SourceError, match=message):
        gpuload.load("memory://data.parquet", qwen, store="disk", token_cache=False)
    MemoryFileSystem.store.clear()


def test_reading_is_tried_again(
    write: Callable[..., str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows(write)
    fsspec.filesystem("memory").pipe("/again.parquet", Path(path).read_bytes())
    real, calls = remote._Reader._fetched, iter(range(1000))

    def fetched(self: Any, length: int) -> bytes:
        if next(calls) % 3 < 2:  # the third attempt succeeds
            raise ConnectionError("connection reset")
        return real(self, length)

    monkeypatch.setattr(remote._Reader, "_fetched", fetched)
    found = gpuload.load("memory://again.parquet", qwen, store="disk", token_cache=False)
    assert next(calls) >= 3
    assert found.tokens.to_lists() == gpuload.load(path, qwen, token_cache=False).tokens.to_lists()
    MemoryFileSystem.store.clear()


def test_memory_downloads(s3: Any, write: Callable[..., str], qwen: Any, warm_cache: Path) -> None:
    s3.upload_file(rows(write), "bucket", "data.parquet")
    gpuload.load("s3://bucket/data.parquet", qwen, store="memory")
    assert list(warm_cache.parent.glob("*.parquet"))


def test_json_and_damaged_files_are_downloaded(s3: Any, write: Callable[..., str], qwen: Any, warm_cache: Path) -> None:
    s3.put_object(Bucket="bucket", Key="data.jsonl", Body=b'{"prompt": "a"}\n{"prompt": "b"}\n')
    assert len(gpuload.load("s3://bucket/data.jsonl", qwen, store="disk")) == 2
    s3.put_object(Bucket="bucket", Key="half.parquet", Body=Path(rows(write)).read_bytes()[:1000])
    with pytest.raises(SourceError, match=r"s3://bucket/half.parquet: truncated parquet file"):
        gpuload.load("s3://bucket/half.parquet", qwen, store="disk")


@pytest.mark.parametrize("place", ["memory", "zip"])
def test_a_file_that_has_changed_and_kept_its_size(place: str, qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    """What a file system says of the version of a file has another name in each of them."""
    archive, url = tmp_path / "x.zip", "memory://changing.jsonl"
    for text in ("old", "new"):
        row = json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n"
        if place == "memory":
            fsspec.filesystem("memory").pipe("/changing.jsonl", row.encode())
        else:
            url = f"zip://in/*.jsonl::{archive}"
            with zipfile.ZipFile(archive, "w") as made:
                made.writestr("in/a.jsonl", row)
        prompts = gpuload.load(url, qwen, return_raw_chat=True)
        assert prompts[0]["raw_prompt"][0]["content"] == text
    MemoryFileSystem.store.clear()
