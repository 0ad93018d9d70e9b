"""The smaller sections: batches, memory, stages. Each gives its runs as plain data; each run is a fresh process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.inputs import VERL_PYTHON, DataSet
from bench.launch import forget, run_worker

BATCH = 256


def measure_batches(
    data_set: DataSet, tokenizer: str, limit: int, repeats: int, seconds: float, scratch: Path
) -> list[dict[str, Any]]:
    """Rows per second of drawing shuffled batches of the rows that pass the filter, the same rows for all.

    Args:
        seconds: how long each way draws.
    """
    task = {
        "files": data_set.files,
        "tokenizer": tokenizer,
        "limit": limit,
        "batch": BATCH,
        "seconds": seconds,
        "kept": str(scratch / "kept.npy"),
    }
    runs = []
    for repeat in range(repeats):
        ours = run_worker("batches_gpuload", task, scratch / "gpuload")
        answers = {"gpuload": ours, "row by row": run_worker("batches_rowwise", task, scratch / "rowwise")}
        if VERL_PYTHON.exists():
            answers["verl 0.9.1"] = run_worker("batches_verl", task, scratch / "verl", VERL_PYTHON)
        for contender, answer in answers.items():
            runs.append({"data": data_set.name, "contender": contender, "repeat": repeat} | answer)
            rates = ", ".join(f"{way} {rate:,.0f}" for way, rate in answer["rates"].items())
            print(f"  {data_set.name} {repeat + 1}/{repeats} {contender}, rows/s: {rates}", flush=True)
    return runs


def measure_memory(
    data_sets: Sequence[DataSet], tokenizer: str, limit: int, repeats: int, scratch: Path
) -> list[dict[str, Any]]:
    """The peak of a whole load, and of a load of one row: what a load needs whatever the data."""
    runs = []
    for data_set in data_sets:
        for repeat in range(repeats):
            for rows in (data_set.rows, 1):
                cache = scratch / "memory"
                forget(cache, data_set.files)
                options = {"max_samples": 1, "filter_overlong_prompts": False} if rows == 1 else {}
                task = {"files": data_set.files, "tokenizer": tokenizer, "limit": limit, "options": options}
                run = run_worker("load_gpuload", task, cache)
                runs.append({"data": data_set.name, "repeat": repeat, "rows": rows} | run)
                grown = run["peak_rss"] - run["baseline_rss"]
                print(f"  {data_set.name:14} {repeat + 1}/{repeats} {rows:6,} rows: {grown / 1e6:,.0f} MB", flush=True)
    return runs


def measure_stages(
    data_sets: Sequence[DataSet], tokenizers: Sequence[str], repeats: int, scratch: Path
) -> list[dict[str, Any]]:
    """Rendering and encoding alone, on one core."""
    runs = []
    for tokenizer in tokenizers:
        for data_set in data_sets:
            for repeat in range(repeats):
                run = run_worker("stages", {"files": data_set.files, "tokenizer": tokenizer}, scratch / "stages")
                name = Path(tokenizer).name
                runs.append({"data": data_set.name, "tokenizer": name, "repeat": repeat} | run)
                speeds = ", ".join(f"{what} {run['text_bytes'] / s / 1e6:,.1f}" for what, s in run["seconds"].items())
                print(f"  {name} {data_set.name:14} {repeat + 1}/{repeats} MB/s: {speeds}", flush=True)
    return runs
