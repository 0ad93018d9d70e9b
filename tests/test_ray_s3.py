"""Files and a store on S3, by moto's server: a cluster reads row groups by ranges and fills the store, and loads on
other machines, which have nothing but the URL, find the ids."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.data", reason="Ray is not installed: make ray-test")

from s3fs import S3FileSystem

import gpuload
from gpuload.cache.shared_store import SharedStore
from gpuload.core.errors import OptionError, StoreError
from gpuload.integrations.ray import prepare, read_prompts
from tests import s3_cases
from tests.cache_cases import same
from tests.ray_cases import cluster_of, origins, rows_of

s3, urls = s3_cases.s3, s3_cases.urls


@pytest.fixture(scope="module")
def cluster(s3: Any) -> Iterator[Any]:
    with cluster_of(2) as started:
        yield started


def test_a_cluster_fills_a_store_and_loads_find_it(
    cluster: Any, urls: list[str], qwen_folder: str, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = "s3://bucket/store"
    cold = gpuload.load(urls, qwen_folder, max_prompt_length=100, device="cpu", token_cache=False)
    dataset = read_prompts("s3://bucket/data", qwen_folder, max_prompt_length=100, rows_per_task=300, device="cpu")
    table = rows_of(dataset)
    assert table["raw_prompt_ids"].to_pylist() == cold.tokens.to_lists()
    assert origins(table) == [tuple(place) for place in cold.origins.tolist()]
    done = prepare(urls, qwen_folder, store, rows_per_task=300, device="cpu")
    assert (done.errors, done.pieces, done.rows_made) == ({}, 5, 1030)
    names = S3FileSystem(use_listings_cache=False).find("bucket/store")
    assert sorted({name.split("/")[2] for name in names}) == ["store.json", "tokens", "verified"]
    assert prepare(urls, qwen_folder, store, device="cpu").found == 2
    # Another machine, with an empty cache of its own.
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "elsewhere"))
    warm = gpuload.load(urls, qwen_folder, max_prompt_length=100, device="cpu", cache_dir=store)
    assert warm.report.from_cache == urls
    same(warm, cold)
    assert len(list((tmp_path / "elsewhere" / "tokens").glob("*.arrow"))) == 2


def test_a_bucket_that_is_not_there_is_an_error(
    s3: Any, urls: list[str], qwen_folder: str, warm_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpuload.cli.main import main

    with pytest.raises(StoreError, match=r"cannot write the store s3://nowhere/store: .*check that the storage"):
        SharedStore("s3://nowhere/store").create()
    # A bucket without such an entry is an empty cache; one that cannot be read is an error.
    assert gpuload.load(urls[1], qwen_folder, device="cpu", cache_dir="s3://bucket/empty").report.from_cache == []
    assert main(["prepare", urls[1], "--tokenizer", qwen_folder, "--cache-dir", "s3://bucket/store"]) == 1
    assert "is filled with --ray" in capsys.readouterr().err
    assert issubclass(OptionError, ValueError)
