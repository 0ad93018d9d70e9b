"""Epochs inside verl 0.9.1: all keys of all rows, through the loader of verl's trainer."""

from statistics import median
from typing import Any

from bench import VERL_PYTHON
from bench.data import JOINT, Plan
from bench.fit import spread
from bench.process import run_contender
from bench.report import table

_BATCH = 256
_WORKERS = (2, 0)
NOTES = """\
One process per dataset. The loader is that of verl's trainer (torchdata's `StatefulDataLoader` with verl's sampler and
`collate_fn`), the filter is off, and the contenders run whole epochs in turns. Before that, one epoch of each was
compared: all keys of all batches are equal. An epoch contains starting its workers and stopping them. CPU seconds are
those of the trainer's process and of its workers; 0 workers: batches are made in the trainer's process."""


def measure_epochs(plan: Plan) -> list[dict[str, Any]]:
    """Measure whole epochs over each dataset."""
    if not VERL_PYTHON.exists():
        print("no .venv-verl (make verl-env creates it): nothing to measure")
        return []
    runs = []
    for dataset in [dataset for dataset in plan.datasets if dataset.name != JOINT] or plan.datasets:
        task = plan.task(dataset, batch=min(_BATCH, dataset.rows), workers=_WORKERS, repeats=plan.repeats)
        run = run_contender("epochs_verl", task, plan.scratch / "epochs", VERL_PYTHON)
        runs.append({"data": dataset.name} | run)
        for name, epochs in run["epochs"].items():
            print(f"  {dataset.name:14} {name:36} {spread(_values(epochs, 'seconds'))} s", flush=True)
    return runs


def epochs_table(measured: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Return the table of a record's epochs. The ratio is that to verl with workers."""
    lines = []
    for run in measured:
        first = _values(next(iter(run["epochs"].values())), "seconds")
        for name, epochs in run["epochs"].items():
            seconds, *cpu = (_values(epochs, key) for key in ("seconds", "process_cpu", "workers_cpu"))
            ratio = f"{median(first) / median(seconds):.1f}×"
            lines.append([run["data"], f"{run['rows']:,}", name, *map(spread, (seconds, *cpu)), ratio])
    head = ["dataset", "rows", "", "seconds", "CPU seconds of the process", "of its workers", "ratio"]
    return table(head, lines, 3, about)


def _values(epochs: list[dict[str, float]], key: str) -> list[float]:
    return [epoch[key] for epoch in epochs]
