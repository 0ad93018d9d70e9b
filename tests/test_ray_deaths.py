"""A node or a worker is killed while a Ray dataset is read: rows, their order and the report are those of `load`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.data", reason="Ray is not installed: make ray-test")

import gpuload
from gpuload.integrations.ray import read_prompts, report
from tests.ray_cases import cluster_of, origins, rows_of, split_file
from tests.test_ray_dataset import same_report, same_rows
from tests.test_ray_prepare import kill_when


@pytest.fixture
def cluster() -> Iterator[Any]:
    with cluster_of(2) as started:
        yield started


@pytest.mark.parametrize("victim", ["node", "worker"])
def test_what_dies_while_a_dataset_is_read_loses_nothing(
    cluster: Any, gsm8k: str, qwen_folder: str, tmp_path: Path, victim: str
) -> None:
    import psutil

    files = split_file(gsm8k, tmp_path, [3000, 30, 3000], 250)
    options: dict[str, Any] = {"max_prompt_length": 100, "device": "cpu"}
    dataset = read_prompts(files, qwen_folder, rows_per_task=250, concurrency=2, **options)

    def kill() -> None:
        if victim == "node":
            node = sorted(cluster.worker_nodes, key=lambda node: node.node_id)[0]
            cluster.remove_node(node, allow_graceful=False)
            return
        processes = psutil.Process(os.getpid()).children(recursive=True)
        workers = [each for each in processes if "MapWorker(MapBatches(Tokeniz" in " ".join(each.cmdline())]
        workers[0].kill()

    killer = kill_when(lambda: report(dataset).rows_read >= 500, kill)
    table = rows_of(dataset)
    killer.join()
    expected = gpuload.load(files, qwen_folder, **options)
    assert table["raw_prompt_ids"].to_pylist() == expected.tokens.to_lists()
    assert len(set(origins(table))) == len(table)
    same_rows(table, expected)
    same_report(report(dataset), expected.report)
