"""The reports of all workers as one.

An actor on the driver's node keeps the report of each part under the part's key. A part that Ray runs twice, because
its worker died or because the dataset is read again, is counted once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuload.report import Report

Key = tuple[int, int]


class ReportKeeper:
    """The actor's class."""

    def __init__(self) -> None:
        self._reports: dict[Key, Report] = {}

    def put(self, key: Key, report: Report) -> None:
        """Keeps the report of a part."""
        self._reports[key] = report

    def get(self) -> dict[Key, Report]:
        """All reports so far."""
        return self._reports


def start_keeper() -> Any:
    """Starts the actor on this node: it lives as long as the driver."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(ReportKeeper).remote()


def merged(empty: Report, reports: Mapping[Key, Report], parts: Sequence[Key]) -> Report:
    """One report of all parts that were made so far.

    Args:
        empty: with the names and bytes of all files.
        reports: those of parts.
        parts: all parts, in order.

    Returns:
        The report. Its seconds are the sums over all workers.
    """
    total = replace(empty, check=replace(empty.check))
    seconds: dict[str, float] = {}
    checked = 0.0
    for key in parts:
        if key not in reports:
            continue
        report = reports[key]
        total.add(report)
        total.rows_kept += report.rows_kept
        total.tokens += report.tokens
        total.longest = max(total.longest, report.longest)
        total.engine = total.engine or report.engine
        checked += report.check.seconds
        for stage, value in report.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + value
    total.seconds, total.check.seconds = seconds, checked
    done = sum(key in reports for key in parts)
    total.notes.append(f"seconds are the sum over all workers; {done:,} of {len(parts):,} parts have been tokenized")
    return total
