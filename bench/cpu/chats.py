"""Data for SFT with loss masks, and preference data, compared with TRL: `python -m bench --only chats,pairs`."""

from typing import Any

from bench.data import Plan, two_sizes
from bench.fit import fitted_table
from bench.process import run_contender
from bench.report import imports_note

_REAL = "sgd_multiturn"
_TRL_ROWS = 3_000
"""TRL prepares at most so many rows, and a quarter of them, for a line through both."""

_CONTENDERS = (("gpuload", 1), ("TRL", 1), ("TRL", 2))

_HOW = f"""\
Seconds on two numbers of rows, which are spread evenly over the dataset, and the line through both: TRL on up to
{_TRL_ROWS:,} rows, gpuload on as many and on all. A part of the time is the same for any number of rows: TRL hashes the
tokenizer, and gpuload opens it and compiles the template. The ratio is that of the seconds for all rows, which for TRL
are those of its line: to gpuload's first load in a process, and to a second one."""

NOTES = f"""\
Conversations with loss on the answers of assistants, each contender in a process of its own: from a parquet file to ids
and labels. TRL: `SFTTrainer`'s own preparation with `assistant_only_loss=True`, with 1 and 2 processes
(`dataset_num_proc`). gpuload: `load_chats` without the token cache; the second load is made in the same process. Both
use TRL's training template. Ids and labels of the same rows were compared and are equal.

{_HOW}"""

PAIR_NOTES = f"""\
Pairs with explicit prompts, each contender in a process of its own: from a parquet file to the ids of prompt, chosen
and rejected answer. TRL: `DPOTrainer`'s own preparation, with 1 and 2 processes (`dataset_num_proc`). gpuload:
`load_pairs` without the token cache; the second load is made in the same process. Ids of the same rows were compared
and are equal.

{_HOW}"""


def measure_chats(plan: Plan) -> list[dict[str, Any]]:
    """Prepare the conversations of one dataset with each contender."""
    return _measure(plan, "chats")


def measure_pairs(plan: Plan) -> list[dict[str, Any]]:
    """Prepare pairs made of the same conversations with each contender."""
    return _measure(plan, "pairs")


def _measure(plan: Plan, module: str) -> list[dict[str, Any]]:
    dataset = next((each for each in plan.datasets if each.name == _REAL), plan.datasets[-1])
    small, large = two_sizes(dataset.rows, _TRL_ROWS)
    runs = []
    for repeat in range(plan.repeats):
        for library, processes in _CONTENDERS:
            name = library if library == "gpuload" else f"TRL, {processes} process{'es' * (processes > 1)}"
            for size in (large, dataset.rows) if library == "gpuload" else (small, large):
                scratch = plan.scratch / f"{module}-{library}-{processes}-{size}-{repeat}"
                task = plan.task(
                    dataset, library=library, processes=processes, most=size, compared=size == large,
                    scratch=str(scratch),
                )  # fmt: skip
                run = run_contender(module, task, scratch)
                runs.append({"data": dataset.name, "name": name, "repeat": repeat} | run)
                print(f"  {name:16} {repeat + 1}/{plan.repeats} {size:7,} rows {run['seconds']:8.2f} s", flush=True)
    if len({run["digest"] for run in runs if run["rows"] == large}) > 1:
        raise SystemExit(f"{module}: gpuload and TRL prepare other ids or labels")
    return runs


def chats_table(runs: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Return seconds, fixed part and rate of each contender, and ratios to gpuload's first and second load."""
    seconds: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        seconds.setdefault(run["name"], {}).setdefault(run["rows"], []).append(run["seconds"])
        if "second_seconds" in run:
            again = seconds.setdefault(f"{run['name']}, second load", {})
            again.setdefault(run["rows"], []).append(run["second_seconds"])
    made = fitted_table({runs[0]["data"]: seconds}, max(run["rows"] for run in runs), about)
    return f"{made}\n\n{imports_note(runs)}".rstrip()
