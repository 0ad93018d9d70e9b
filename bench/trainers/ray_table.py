"""The tables of docs/scale.md, made of the record of `bench.trainers.ray`. Needs no Ray."""

from typing import Any

from bench.report import circumstances, table


def ray_tables(record: dict[str, Any]) -> str:
    """Return a table of stores that were filled, one of tasks that do nothing, and the circumstances."""
    about, runs = record["about"], record["runs"]
    filled = [
        [
            str(run["workers"]), f"{run['rows_per_task']:,}", str(run["pieces"]), f"{run['worker_cpu_s']:.1f}",
            f"{about['rows'] / run['worker_cpu_s']:,.0f}", f"{run['wall_s']:.0f}",
        ]
        for run in runs
    ]  # fmt: skip
    head = [
        "workers", "rows per task", "tasks", "CPU seconds of all tasks", "rows per CPU second",
        "seconds, with the start of the workers",
    ]  # fmt: skip
    empty = [
        [
            str(run["workers"]),
            *(f"{run['empty_task'][name]:.1f} ms" for name in ("driver_cpu_ms", "ray_cpu_ms", "wall_ms")),
        ]
        for run in runs
        if run["empty_task"]
    ]
    parts = [
        table(head, filled, 0, about),
        f"A task that does nothing, in actors that have started, for {about['tasks']:,} tasks:",
        table(
            ["workers", "CPU of the driver", "CPU of Ray's other processes, all nodes", "from one result to the next"],
            empty, 0, about,
        ),
        circumstances(about, (run["versions"] for run in runs)),
    ]  # fmt: skip
    return "\n\n".join(parts)
