"""The stages of a load by 1, 2, 4, ... all cores: which of them limits a load, and what each costs."""

import os
from statistics import median
from typing import Any

from bench.data import Plan
from bench.fit import spread
from bench.process import make_cold, run_contender
from bench.report import table

STAGES = ("construct", "read", "first render", "render", "first encode", "encode")
_ROWS_PER_THREAD = 40_000
"""At least so many rows per thread, of the data several times in a row: every thread has several batches."""

NOTES = """\
Each stage of a load alone, in a process that has as many cores as threads, over all batches of the last dataset several
times in a row: rows/s, and after the semicolon CPU seconds for a million rows. "Construct" is gigatoken's
construction, in seconds. The first rendering traces the template; in the first encoding gigatoken fills the caches of
its workers. "Load" is `gpuload.load` of the data once, in the same process, with nothing cached on disk but gigatoken
constructed. A load cannot be faster than its slowest stage: reading and rendering should be faster than encoding in
every line."""


def thread_counts() -> list[int]:
    """1, 2, 4, ... and the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [*(1 << k for k in range(cores.bit_length()) if 1 << k < cores), cores]


def measure_cores(plan: Plan) -> list[dict[str, Any]]:
    """Measure every stage with every number of threads."""
    dataset = plan.datasets[-1]
    runs = []
    for repeat in range(plan.repeats):
        for threads in thread_counts():
            copies = -(-_ROWS_PER_THREAD * threads // dataset.rows) if dataset.rows > 1000 else 1
            cache = plan.scratch / "cores"
            make_cold(cache, dataset.files)
            run = run_contender("cores", plan.task(dataset, threads=threads, copies=copies), cache)
            runs.append({"data": dataset.name, "repeat": repeat} | run)
            speeds = ", ".join(f"{name} {run['rows'] / run['stages'][name]['seconds']:,.0f}" for name in STAGES[1:])
            print(f"  {dataset.name} {repeat + 1}/{plan.repeats} {threads} threads, rows/s: {speeds}", flush=True)
    return runs


def cores_table(measured: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Return rows/s and CPU seconds of each stage, one line per number of threads."""
    lines = []
    for threads in dict.fromkeys(run["threads"] for run in measured):
        runs = [run for run in measured if run["threads"] == threads]

        def cell(name: str, runs: list[dict[str, Any]] = runs) -> str:
            cost = median(run["stages"][name]["cpu"] / run["rows"] * 1e6 for run in runs)
            return f"{spread([run['rows'] / run['stages'][name]['seconds'] for run in runs])}; {cost:.1f}"

        construct = spread([run["stages"]["construct"]["seconds"] for run in runs])
        load = spread([run["load"]["rows"] / run["load"]["seconds"] for run in runs])
        busy = spread([run["load"]["cpu_seconds"] / run["load"]["seconds"] for run in runs])
        lines.append([str(threads), construct, *map(cell, STAGES[1:]), load, busy])
    return table(["threads", "construct, s", *STAGES[1:], "load", "cores busy"], lines, 1, about)
