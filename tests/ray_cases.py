"""What the tests with Ray share: a cluster of three nodes on this machine, files, and rows of a dataset."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]


@contextmanager
def cluster_of(nodes: int, num_cpus: int = 1) -> Iterator[Any]:
    """A cluster of several raylets; the first one is the driver's node and has no CPU for workers."""
    import ray
    from ray.cluster_utils import Cluster

    # Workers are processes of their own, which import this checkout.
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    memory = {"object_store_memory": 150 << 20}
    # A node that does not answer for this long is dead.
    system = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": system, **memory}, connect=False
    )
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=num_cpus, **memory)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, logging_level="ERROR")
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def rows_of(dataset: Any) -> pa.Table:
    """All rows of a Ray Data dataset, in its order."""
    import ray

    return pa.concat_tables(ray.get(dataset.to_arrow_refs()))


def origins(table: pa.Table) -> list[tuple[int, int]]:
    return [(origin["file"], origin["row"]) for origin in table["origin"].to_pylist()]


def split_file(file: str, directory: Path, sizes: list[int], group: int) -> list[str]:
    """Files of the first rows of another one."""
    table, start, files = pq.read_table(file), 0, []
    for number, size in enumerate(sizes):
        files.append(str(directory / f"{number}.parquet"))
        pq.write_table(table.slice(start, size), files[-1], row_group_size=group)
        start += size
    return files
