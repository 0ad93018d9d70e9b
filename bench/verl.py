"""Inside verl: gpuload's RLHFDataset beside verl's own, both in verl's environment, by turns.

Start-up is constructing the data set (read + filter); rows are drawn by verl's `__getitem__` and gpuload's
`__getitems__`. A rollout step is n samples of each prompt through verl's agent loop worker and a server that answers at
once, with the loader's ids reused and without.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.inputs import VERL_PYTHON, DataSet
from bench.launch import run_worker
from bench.load import Contender, measure
from bench.sections import BATCH

OURS = "gpuload's class"
THEIRS = "verl's class, {} worker{}"
PROMPTS, SAMPLES = 128, 8
"""Of a rollout step."""


def measure_verl(
    data_sets: Sequence[DataSet], tokenizer: str, limit: int, repeats: int, seconds: float, scratch: Path
) -> list[dict[str, Any]]:
    """Start-up cold and warm on every data set, then rows of the last one.

    Args:
        seconds: how long each way draws.
    """
    if not VERL_PYTHON.exists():
        print("no .venv-verl here (make verl-env makes it): nothing to measure")
        return []
    python = str(VERL_PYTHON)
    everyone = [Contender(OURS, "load_verl_ours", python)]
    for workers in (1, 2):
        everyone.append(
            Contender(THEIRS.format(workers, "s" * (workers > 1)), "load_verl", python, {"workers": workers})
        )
    runs = measure(data_sets, tokenizer, limit, repeats, scratch, everyone)
    common = {"files": data_sets[-1].files, "tokenizer": tokenizer, "limit": limit}
    for repeat in range(repeats):
        task = {**common, "batch": BATCH, "seconds": seconds}
        answer = run_worker("batches_verl_both", task, scratch / "both", python)
        print("  rows/s: " + ", ".join(f"{way} {rate:,.0f}" for way, rate in answer["rates"].items()), flush=True)
        runs.append({"data": data_sets[-1].name, "contender": "rows", "repeat": repeat} | answer)
    task = {**common, "prompts": PROMPTS, "samples": SAMPLES, "repeats": repeats, "model": str(scratch / "model")}
    answer = run_worker("rollout_verl", task, scratch / "rollout", python)
    for way, steps in answer["rollouts"].items():
        print(f"  {way}: " + ", ".join(f"{step['seconds']:.2f} s, {step['tokenized']} tokenized" for step in steps))
    runs.append({"data": data_sets[-1].name, "contender": "rollout"} | answer)
    return runs


def verl_table(section: dict[str, Any], table: Any, circumstances: str) -> list[str]:
    """Seconds of start-up, and rows per second.

    Args:
        table: makes Markdown of a head and lines.
    """
    loads = [run for run in section["runs"] if "temperature" in run]
    names = list(dict.fromkeys(run["contender"] for run in loads))
    lines = []
    for data, temperature in dict.fromkeys((run["data"], run["temperature"]) for run in loads):
        seconds = {
            name: median(
                run["seconds"]
                for run in loads
                if (run["data"], run["temperature"], run["contender"]) == (data, temperature, name)
            )
            for name in names
        }
        ratios = [f"{seconds[name] / seconds[OURS]:.1f}×" for name in names if name != OURS]
        rows = f"{section['about']['data_sets'][data]['rows']:,}"
        lines.append([f"{data}, {temperature}", rows, *(f"{seconds[name]:.2f}" for name in names), *ratios])
    head = ["start-up, seconds", "rows", *names, *(f"{name} / gpuload's" for name in names if name != OURS)]
    drawn = [run["rates"] for run in section["runs"] if "rates" in run]
    rates = {way: median(rate[way] for rate in drawn) for way in (drawn[0] if drawn else {})}
    rows_table = [[way, f"{rate:,.0f}"] for way, rate in rates.items()]
    steps = [
        [
            way,
            f"{run['prompts']} × {run['samples']}",
            f"{median(step['tokenized'] for step in found):.0f}",
            f"{median(step['seconds'] for step in found):.2f}",
        ]
        for run in section["runs"]
        for way, found in run.get("rollouts", {}).items()
    ]
    return [
        "## Inside verl 0.9.1",
        circumstances,
        table(head, lines),
        table(["rows", "rows/s"], rows_table),
        table(["a rollout step", "prompts × samples", "prompts tokenized", "seconds of CPU, all of the step"], steps),
    ]
