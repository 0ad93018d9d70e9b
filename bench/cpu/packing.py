"""Packing and packed batches, compared with TRL: `python -m bench --only packing`."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.data import Plan
from bench.process import run_contender
from bench.report import table

SIZE = 4096
BATCH = 8
_REAL = "sgd_multiturn"
_GENERATED = 6  # documents for each row of the real dataset

NOTES = f"""\
One core (pinned), in turns in one process. Rows per second, where a row is a document, and fill: the share of packs of
{SIZE:,} tokens that is used. TRL's `pack_dataset` runs on a dataset in memory with `input_ids` only, and writes the
packed ids; gpuload makes a plan from the lengths, and gathers the ids of a pack when its batch is drawn. The packs of
`trl`, `trl_bfd_split` and `trl_wrapped` were compared with TRL's and are equal.

Batches are one flat row of {BATCH} × {SIZE:,} tokens: ids, labels, positions and bounds of documents. TRL's are rows of
the packed dataset through `DataCollatorForLanguageModeling` with `padding_free`. Log-normal lengths are generated, six
times as many as there are real ones, with a median of 403 tokens."""


def measure_packing(plan: Plan) -> list[dict[str, Any]]:
    """Measure packing of the prompts of one dataset, and of documents of generated lengths."""
    dataset = next((each for each in plan.datasets if each.name == _REAL), plan.datasets[-1])
    runs = []
    for name, count in ((dataset.name, 0), ("log-normal", _GENERATED * dataset.rows)):
        for repeat in range(plan.repeats):
            task = plan.task(dataset, generated=count, size=SIZE, batch=BATCH, seconds=plan.seconds)
            run = run_contender("packing", task, plan.scratch / "packing")
            runs.append({"data": name, "repeat": repeat} | run)
            speeds = ", ".join(f"{key} {run['rows'] / took:,.0f}" for key, took in run["seconds"].items())
            print(f"  {name:14} {repeat + 1}/{plan.repeats} rows/s: {speeds}", flush=True)
    return runs


def packing_tables(section: dict[str, Any]) -> str:
    """Return rows/s and fill of each strategy, and rows/s of batches."""
    strategies, batches = [], []
    for data in dict.fromkeys(run["data"] for run in section["runs"]):
        runs = [run for run in section["runs"] if run["data"] == data]
        count = f"{runs[0]['rows']:,}"
        speed = {name: runs[0]["rows"] / _median(runs, "seconds", name) for name in runs[0]["seconds"]}
        for name in speed:
            against = f"TRL: {name.split(': ')[1].removeprefix('trl_').replace('trl', 'bfd')}"
            ratio = "" if name == against else f"**{speed[name] / speed[against]:.0f}×**"
            fill = f"{100 * runs[0]['fill'][name]:.2f} %"
            strategies.append([data, count, name, f"{speed[name]:,.0f}", fill, ratio])
        rates = {name: _median(runs, "batch_rates", name) for name in runs[0]["batch_rates"]}
        packs = {name: _median(runs, "pack_rates", name) for name in rates}
        for name, rate in rates.items():
            ratio = "" if name == "TRL" else f"**{packs[name] / packs['TRL']:.0f}×**"
            batches.append([data, name, f"{rate:,.0f}", f"{packs[name]:,.0f}", f"{packs[name] / BATCH:,.0f}", ratio])
    first = table(["packing", "rows", "strategy", "rows/s", "fill", "ratio"], strategies)
    return f"{first}\n\n" + table(["batches", "", "rows/s", "packs/s", "batches/s", "ratio"], batches, 2)


def _median(runs: Sequence[dict[str, Any]], key: str, name: str) -> float:
    return float(median(run[key][name] for run in runs))
