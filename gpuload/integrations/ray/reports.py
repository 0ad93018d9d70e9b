"""The reports of all workers as one.

An actor on the driver's node keeps the report of each part under the part's key. A part that Ray runs twice, because
its worker died or because the dataset is read again, is counted once.
"""

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from gpuload.dataset.report import Report

Key = tuple[int, int]


class Done(NamedTuple):
    """A part that a worker has tokenized."""

    report: Report  # of the part
    began: float  # by the clock of the actor that keeps the reports
    ended: float


class ReportKeeper:
    """The actor's class."""

    def __init__(self) -> None:
        self._parts: dict[Key, Done] = {}

    def put(self, key: Key, report: Report) -> None:
        """Keeps the report of a part that has just been tokenized."""
        ended = time.monotonic()
        self._parts[key] = Done(report, ended - report.seconds.get("total", 0.0), ended)

    def get(self) -> dict[Key, Done]:
        """All parts so far."""
        return self._parts


def start_keeper() -> Any:
    """Starts the actor on this node: it lives as long as the driver."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(ReportKeeper).remote()


def merged(empty: Report, done: Mapping[Key, Done], parts: Sequence[Key]) -> Report:
    """One report of all parts that were made so far, `done`. The seconds of stages are sums over all workers; the total
    is the time from when the first part was begun to when the last one was done."""
    total = deepcopy(empty)
    there = [done[key] for key in parts if key in done]
    for report, _, _ in there:
        total.add(report)
        total.rows_kept += report.rows_kept
        total.tokens += report.tokens
        total.longest = max(total.longest, report.longest)
        total.engine = total.engine or report.engine
    stages = dict.fromkeys(stage for report, _, _ in there for stage in report.seconds if stage != "total")
    total.seconds = {stage: sum(report.seconds.get(stage, 0.0) for report, _, _ in there) for stage in stages}
    total.overlapping = list(stages)
    if there:
        total.seconds["total"] = max(each.ended for each in there) - min(each.began for each in there)
    total.reference_seconds = sum(report.reference_seconds for report, _, _ in there)
    total.check.seconds = sum(report.check.seconds for report, _, _ in there)
    total.notes.append(
        f"seconds of stages are sums over all workers; {len(there):,} of {len(parts):,} parts have been tokenized"
    )
    return total
