"""Data for SFT with loss masks, and preference data, compared with TRL: `python -m bench --only chats,pairs`."""

from statistics import median
from typing import Any

from bench.data import Plan
from bench.process import run_contender
from bench.report import table

_REAL = "sgd_multiturn"
_TRL_ROWS = 2_000
"""Rows that TRL prepares: its rate does not depend on their number."""

_SECOND = "gpuload, second load"
_OWN = ("gpuload", _SECOND)

_CONTENDERS = (("gpuload", 1), ("TRL", 1), ("TRL", 2))

NOTES = f"""\
Conversations with loss on the answers of assistants, each contender in a process of its own: from a parquet file to ids
and labels. TRL: `SFTTrainer`'s own preparation with `assistant_only_loss=True`, for the first {_TRL_ROWS:,} rows, with
1 and 2 processes (`dataset_num_proc`). gpuload: `load_chats` without the token cache; the second load is made in the
same process. Both use TRL's training template, and ids and labels were compared and are equal."""


PAIR_NOTES = f"""\
Pairs with explicit prompts, each contender in a process of its own: from a parquet file to the ids of prompt, chosen
and rejected answer. TRL: `DPOTrainer`'s own preparation, for the first {_TRL_ROWS:,} rows, with 1 and 2 processes
(`dataset_num_proc`). gpuload: `load_pairs` without the token cache; the second load is made in the same process. The
ids were compared and are equal."""


def measure_chats(plan: Plan) -> list[dict[str, Any]]:
    """Prepare the conversations of one dataset with each contender."""
    return _measure(plan, "chats")


def measure_pairs(plan: Plan) -> list[dict[str, Any]]:
    """Prepare pairs made of the same conversations with each contender."""
    return _measure(plan, "pairs")


def _measure(plan: Plan, module: str) -> list[dict[str, Any]]:
    dataset = next((each for each in plan.datasets if each.name == _REAL), plan.datasets[-1])
    runs = []
    for repeat in range(plan.repeats):
        for library, processes in _CONTENDERS:
            scratch = plan.scratch / f"{module}-{library}-{processes}-{repeat}"
            most = _TRL_ROWS if library == "TRL" else dataset.rows
            task = plan.task(
                dataset, library=library, processes=processes, most=most, compared=min(_TRL_ROWS, dataset.rows),
                scratch=str(scratch),
            )  # fmt: skip
            run = run_contender(module, task, scratch)
            name = library if library == "gpuload" else f"TRL, {processes} process{'es' * (processes > 1)}"
            runs.append({"data": dataset.name, "name": name, "repeat": repeat} | run)
            print(f"  {name:16} {repeat + 1}/{plan.repeats} {run['rows'] / run['seconds']:,.0f} rows/s", flush=True)
    if len({run["digest"] for run in runs}) > 1:
        raise SystemExit(f"{module}: gpuload and TRL prepare other ids or labels")
    return runs


def chats_table(section: dict[str, Any]) -> str:
    """Return rows/s of each contender, and how much faster gpuload's first and second load are."""
    runs = section["runs"]
    again = [run | {"name": _SECOND, "seconds": run["second_seconds"]} for run in runs if "second_seconds" in run]
    runs = runs[:1] + again + runs[1:]
    names = dict.fromkeys(run["name"] for run in runs)
    speed = {name: median(run["rows"] / run["seconds"] for run in runs if run["name"] == name) for name in names}
    lines = []
    for name in names:
        rows = next(run["rows"] for run in runs if run["name"] == name)
        own = [] if name in _OWN else [each for each in _OWN if each in names]
        ratio = " and ".join(f"**{speed[each] / speed[name]:.0f}×**" for each in own)
        lines.append([runs[0]["data"], name, f"{rows:,}", f"{speed[name]:,.0f}", ratio])
    return table(["data", "", "rows", "rows/s", "gpuload is faster by"], lines, 2)
