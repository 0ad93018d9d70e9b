"""Load and filter: all contenders side by side, cold and warm."""

import sys
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench import VERL_PYTHON
from bench.data import Plan
from bench.process import ContenderError, make_cold, run_contender

OURS = "gpuload"
IN_VERL = "gpuload inside verl 0.9.1"
VERL = "verl 0.9.1"
VERL_1, VERL_2 = f"{VERL}, 1 worker", f"{VERL}, 2 workers"
TRL = "TRL-style batched `map`"
BASELINE = "baseline, row by row"

_COMPARED = ("rows_read", "rows_kept", "rows_digest", "prompts_digest", "tokens_digest")


@dataclass(frozen=True)
class Contender:
    """A program that loads and filters.

    Attributes:
        name: Name in tables.
        module: Module in `bench.contenders`.
        python: Interpreter of its environment.
        settings: Its own part of the task.
    """

    name: str
    module: str
    python: str = sys.executable
    settings: dict[str, Any] = field(default_factory=dict)


def contenders() -> list[Contender]:
    """Return the contenders that can run on this machine; some need the environment of `make verl-env`."""
    found = [Contender(OURS, "load_gpuload"), Contender(TRL, "load_trl"), Contender(BASELINE, "load_rowwise")]
    if not VERL_PYTHON.exists():
        print("no .venv-verl (make verl-env creates it): nothing is measured inside verl")
        return found
    python = str(VERL_PYTHON)
    found.append(Contender(IN_VERL, "load_gpuload_in_verl", python))
    return found + [
        Contender(name, "load_verl", python, {"workers": workers}) for workers, name in ((1, VERL_1), (2, VERL_2))
    ]


def measure_load(plan: Plan) -> list[dict[str, Any]]:
    """Run, per dataset and repeat, every contender once cold, then every contender once warm.

    Raises:
        ContenderError: A contender failed, kept other rows or made other tokens than the contenders before it.
    """
    runs: list[dict[str, Any]] = []
    everyone = contenders()
    for dataset in plan.datasets:
        seen: dict[str, tuple[Any, str]] = {}
        for repeat in range(plan.repeats):
            for temperature in ("cold", "warm"):
                for contender in everyone:
                    cache = plan.scratch / f"{contender.module}-{contender.settings.get('workers', '')}"
                    if temperature == "cold":
                        make_cold(cache, dataset.files)
                    task = plan.task(dataset, **contender.settings)
                    run = run_contender(contender.module, task, cache, contender.python)
                    _compare(seen, run, contender.name, dataset.name)
                    about = {"data": dataset.name, "contender": contender.name, "temperature": temperature}
                    runs.append(about | {"repeat": repeat} | run)
                    print(
                        f"  {dataset.name:14} {temperature} {repeat + 1}/{plan.repeats} {contender.name:26}"
                        f" {run['seconds']:8.2f} s  {dataset.rows / run['seconds']:10,.0f} rows/s",
                        flush=True,
                    )
    return runs


def median_seconds(section: dict[str, Any], data: str, temperature: str) -> dict[str, float]:
    """Return the median seconds of each contender on one dataset."""
    seconds: dict[str, list[float]] = {}
    for run in section["runs"]:
        if run["data"] == data and run["temperature"] == temperature:
            seconds.setdefault(run["contender"], []).append(run["seconds"])
    return {name: median(values) for name, values in seconds.items()}


def _compare(seen: dict[str, tuple[Any, str]], run: dict[str, Any], contender: str, data: str) -> None:
    """Compare the rows read and kept, and the tokens if the contender has them, with those of the first run."""
    for key in _COMPARED:
        if key not in run:
            continue
        value, first = seen.setdefault(key, (run[key], contender))
        if value != run[key]:
            raise ContenderError(f"{data}: {key} differs: {first} has {value}, {contender} has {run[key]}")
