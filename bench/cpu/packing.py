"""Packing and packed batches, compared with TRL: `python -m bench --only packing`."""

from statistics import median
from typing import Any

from bench.data import Plan
from bench.fit import spread
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
`trl`, `trl_bfd_split` and `trl_wrapped` were compared with TRL's and are equal. Log-normal lengths are generated, six
times as many as there are real ones, with a median of 403 tokens.

An epoch: seconds for all conversations in batches of {BATCH} packs, shuffled; a batch is one flat row of ids, labels
and positions. gpuload's are those of `load_chats(...).loader(packing="bfd")`, which makes a new plan for each epoch.
TRL's are rows of the packed dataset through `DataCollatorForLanguageModeling` with `padding_free`, in PyTorch's
`DataLoader`; it was packed before."""


def measure_packing(plan: Plan) -> list[dict[str, Any]]:
    """Measure packing of the prompts of one dataset, and of documents of generated lengths."""
    dataset = next((each for each in plan.datasets if each.name == _REAL), plan.datasets[-1])
    runs = []
    for name, count in ((dataset.name, 0), ("log-normal", _GENERATED * dataset.rows)):
        for repeat in range(plan.repeats):
            task = plan.task(dataset, generated=count, size=SIZE, batch=BATCH)
            run = run_contender("packing", task, plan.scratch / "packing")
            runs.append({"data": name, "repeat": repeat} | run)
            speeds = ", ".join(f"{key} {run['rows'] / took:,.0f}" for key, took in run["seconds"].items())
            print(f"  {name:14} {repeat + 1}/{plan.repeats} rows/s: {speeds}", flush=True)
    return runs


def packing_tables(measured: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Return rows/s and fill of each strategy, and the seconds of an epoch."""
    strategies, batches = [], []
    for data in dict.fromkeys(run["data"] for run in measured):
        runs = [run for run in measured if run["data"] == data]
        count = f"{runs[0]['rows']:,}"
        speed = {name: [run["rows"] / run["seconds"][name] for run in runs] for name in runs[0]["seconds"]}
        for name in speed:
            against = f"TRL: {name.split(': ')[1].removeprefix('trl_').replace('trl', 'bfd')}"
            ratio = "" if name == against else f"**{median(speed[name]) / median(speed[against]):.0f}×**"
            fill = f"{100 * runs[0]['fill'][name]:.2f} %"
            strategies.append([data, count, name, spread(speed[name]), fill, ratio])
        for name, of in runs[0].get("epochs", {}).items():
            seconds = {key: [run["epochs"][key]["seconds"] for run in runs] for key in ("gpuload", name)}
            ratio = "" if name == "gpuload" else f"**{median(seconds[name]) / median(seconds['gpuload']):.1f}×**"
            batches.append([data, name, f"{of['rows']:,}", spread(seconds[name]), ratio])
    parts = [table(["packing", "rows", "strategy", "rows/s", "fill", "ratio"], strategies, 1, about)]
    parts += [table(["an epoch", "", "rows", "seconds", "ratio"], batches, 2, about)] if batches else []
    return "\n\n".join(parts)
