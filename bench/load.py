"""Load + filter, all contenders side by side, cold and warm."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.inputs import VERL_PYTHON, DataSet
from bench.launch import WorkerError, forget, run_worker


@dataclass(frozen=True)
class Contender:
    """One way to load and filter.

    Attributes:
        name: for tables.
        module: its worker.
        python: of its environment.
        settings: its own part of the task.
    """

    name: str
    module: str
    python: str = sys.executable
    settings: dict[str, Any] = field(default_factory=dict)


OURS = "gpuload"
VERL = "verl 0.9.1"


def contenders() -> list[Contender]:
    """All that can run here: verl's needs the environment that `make verl-env` makes."""
    found = [
        Contender(OURS, "load_gpuload"),
        Contender("row by row", "load_rowwise"),
        Contender("batched map", "load_trl"),
    ]
    if VERL_PYTHON.exists():
        for workers in (1, 2):
            name = f"{VERL}, {workers} worker{'s' * (workers > 1)}"
            found.append(Contender(name, "load_verl", str(VERL_PYTHON), {"workers": workers}))
    else:
        print("no .venv-verl here (make verl-env makes it): verl is left out")
    return found


def measure(
    data_sets: Sequence[DataSet],
    tokenizer: str,
    limit: int,
    repeats: int,
    scratch: Path,
    everyone: Sequence[Contender] | None = None,
) -> list[dict[str, Any]]:
    """All runs: per data set and repeat, every contender once cold, then every contender once warm.

    Raises:
        WorkerError: a contender failed, or kept other rows or made other tokens than those before it.
    """
    runs: list[dict[str, Any]] = []
    everyone = everyone or contenders()
    for data_set in data_sets:
        seen: dict[str, tuple[Any, str]] = {}
        for repeat in range(repeats):
            for temperature in ("cold", "warm"):
                for contender in everyone:
                    cache = scratch / f"{contender.module}-{contender.settings.get('workers', '')}"
                    if temperature == "cold":
                        forget(cache, data_set.files)
                    task = {"files": data_set.files, "rows": data_set.rows, "tokenizer": tokenizer, "limit": limit}
                    run = run_worker(contender.module, task | contender.settings, cache, contender.python)
                    about = {
                        "data": data_set.name,
                        "contender": contender.name,
                        "temperature": temperature,
                        "repeat": repeat,
                    }
                    _agree(seen, run, contender.name, data_set.name)
                    runs.append(about | run)
                    print(
                        f"  {data_set.name:14} {temperature} {repeat + 1}/{repeats} {contender.name:22}"
                        f" {run['seconds']:8.2f} s  {data_set.rows / run['seconds']:10,.0f} rows/s",
                        flush=True,
                    )
    return runs


def _agree(seen: dict[str, tuple[Any, str]], run: dict[str, Any], contender: str, data: str) -> None:
    """Rows read and kept, and tokens where a contender has them, must be those of every run before."""
    for key in ("rows_read", "rows_kept", "rows_digest", "prompts_digest", "tokens_digest"):
        if key not in run:
            continue
        value, first = seen.setdefault(key, (run[key], contender))
        if value != run[key]:
            raise WorkerError(f"{data}: {key} of {first} is {value}, of {contender} {run[key]}")
