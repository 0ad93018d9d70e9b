"""Ray on one machine: a store filled by 1, 2 and 3 workers, and what a task costs that does nothing.

    PYTHONPATH=. .venv-ray/bin/python -m bench.trainers.ray [--rows 262144]

Each worker is a node of its own with one CPU; the driver's node has none. Rows are the shipped prompts, each with its
number, so that no two are equal. CPU seconds are compared rather than seconds: three workers, the driver and Ray's own
processes share the cores of one machine.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
from ray.cluster_utils import Cluster

from bench import documents
from bench.environment import versions
from bench.trainers import common
from bench.trainers.ray_table import ray_tables
from gpuload.demo_data import demo_files
from gpuload.integrations.ray import prepare

_SYSTEM = ("gcs_server", "raylet", "monitor.py", "dashboard", "agent")


@contextmanager
def cluster_of(workers: int) -> Iterator[None]:
    """A cluster with nodes of one CPU, and a driver's node without any."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    memory = {"object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory}, connect=False)
    try:
        for _ in range(workers):
            cluster.add_node(num_cpus=1, **memory)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, logging_level="ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def write_files(folder: Path, rows: int, files: int = 2) -> list[str]:
    """Write prompts, each of which ends with its number."""
    prompts = pq.read_table(demo_files()[0], columns=["prompt"])["prompt"].to_pylist()
    names, each = [], rows // files
    for number in range(files):
        chats = []
        for row in range(number * each, (number + 1) * each):
            content = prompts[row % len(prompts)][-1]["content"]
            chats.append([{"role": "user", "content": f"{content} ({row})"}])
        names.append(str(folder / f"{number}.parquet"))
        pq.write_table(pa.table({"prompt": chats, "row": range(each)}), names[-1], row_group_size=16_384)
    return names


class Nothing:
    """A task that does nothing."""

    def __call__(self, batch: pa.Table) -> pa.Table:
        return batch


def system_seconds() -> float:
    """CPU seconds of Ray's own processes that were started by this one."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            if any(name in " ".join(process.cmdline()) for name in _SYSTEM):
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


def empty_tasks(tasks: int) -> dict[str, float]:
    """What a task costs in milliseconds, from the first result to the last: actors have started by then."""
    pool = ray.data.ActorPoolStrategy(size=int(ray.cluster_resources()["CPU"]))
    items = ray.data.from_items([{"part": b"x" * 300} for _ in range(tasks + 1)], override_num_blocks=tasks + 1)
    done = items.map_batches(Nothing, batch_size=None, batch_format="pyarrow", compute=pool, num_cpus=1)
    results = iter(done.iter_rows())
    next(results)
    before = time.perf_counter(), time.process_time(), system_seconds()
    assert sum(1 for _ in results) == tasks
    after = time.perf_counter(), time.process_time(), system_seconds()
    wall, driver, system = (1000 * (b - a) / tasks for a, b in zip(before, after, strict=True))
    return {"wall_ms": wall, "driver_cpu_ms": driver, "ray_cpu_ms": system}


def main() -> None:
    """Measure clusters of 1, 2 and 3 workers, and write the record after each."""
    tasks = {"type": int, "default": 1000, "help": "tasks that do nothing"}
    given = common.arguments(__doc__ or "", "ray", rows=1 << 18, compares=False, tasks=tasks)
    runs: list[dict[str, Any]] = []
    record = {"about": common.about(given, tasks=given.tasks), "runs": runs}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_files(folder, given.rows)
        for workers, rows_per_task in ((1, 1 << 16), (2, 1 << 16), (3, 1 << 16), (1, 1 << 14)):
            store = folder / f"store-{workers}-{rows_per_task}"
            with cluster_of(workers):
                done = prepare(
                    files, given.tokenizer, str(store), rows_per_task=rows_per_task, device="cpu", concurrency=workers
                )
                assert not done.errors
                empty = empty_tasks(given.tasks) if rows_per_task == 1 << 16 else {}
            runs.append({
                "workers": workers, "rows_per_task": rows_per_task, "pieces": done.pieces, "wall_s": done.seconds,
                "worker_s": done.worker_seconds, "worker_cpu_s": done.cpu_seconds, "empty_task": empty,
                "store_bytes": sum(entry.stat().st_size for entry in (store / "tokens").glob("*.arrow")),
                "file_bytes": sum(os.path.getsize(file) for file in files), "versions": versions(),
            })  # fmt: skip
            print(json.dumps(runs[-1]), flush=True)
            common.save(given, record)
    print(f"\n{ray_tables(record)}\n\nwritten to {', '.join([str(given.record), *documents.write(given.record)])}")


if __name__ == "__main__":
    main()
