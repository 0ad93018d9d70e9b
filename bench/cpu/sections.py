"""Memory and stages. Each function returns its runs as plain data; each run is a new process."""

from pathlib import Path
from typing import Any

from bench.data import JOINT, Plan, with_other_tokenizers
from bench.process import make_cold, run_contender


def measure_memory(plan: Plan) -> list[dict[str, Any]]:
    """Measure the peak memory of a load, and of a load of one row, which is the part that does not grow with data."""
    runs = []
    for dataset in plan.datasets:
        for repeat in range(plan.repeats):
            for rows in (dataset.rows, 1):
                cache = plan.scratch / "memory"
                make_cold(cache, dataset.files)
                options = {"max_samples": 1, "filter_overlong_prompts": False} if rows == 1 else {}
                run = run_contender("load_gpuload", plan.task(dataset, options=options), cache)
                runs.append({"data": dataset.name, "repeat": repeat, "rows": rows} | run)
                grown = (run["peak_rss"] - run["baseline_rss"]) / 1e6
                print(f"  {dataset.name:14} {repeat + 1}/{plan.repeats} {rows:6,} rows: {grown:,.0f} MB", flush=True)
    return runs


def measure_stages(plan: Plan) -> list[dict[str, Any]]:
    """Measure rendering and encoding alone, on one core, with tokenizers of several families."""
    parts = [dataset for dataset in plan.datasets if dataset.name != JOINT] or plan.datasets
    runs = []
    for tokenizer in with_other_tokenizers(plan.tokenizer):
        for dataset in parts:
            for repeat in range(plan.repeats):
                task = {"files": dataset.files, "tokenizer": tokenizer}
                run = run_contender("stages", task, plan.scratch / "stages")
                name = Path(tokenizer).name
                runs.append({"data": dataset.name, "tokenizer": name, "repeat": repeat} | run)
                speeds = ", ".join(f"{stage} {run['text_bytes'] / s / 1e6:,.1f}" for stage, s in run["seconds"].items())
                print(f"  {name} {dataset.name:14} {repeat + 1}/{plan.repeats} MB/s: {speeds}", flush=True)
    return runs
