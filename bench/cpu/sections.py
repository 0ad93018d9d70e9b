"""Memory of a load. Returns runs as plain data; each run is a new process."""

from typing import Any

from bench.data import Plan
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
