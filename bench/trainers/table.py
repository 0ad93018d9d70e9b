"""The tables of the record of a trainer's script."""

from statistics import median
from typing import Any

from bench import ROOT
from bench.fit import fitted_table, runs_of, spread
from bench.report import busy, circumstances, table

RESULTS = ROOT / "bench" / "results" / "trainers"
OURS = "gpuload"
BY_ROWS = ("start", "an epoch", "start and an epoch")
"""What takes longer the more rows there are. Everything else is of a fixed number of rows."""


def trainer_table(record: dict[str, Any]) -> str:
    """Return tables of what depends on the number of rows, and of what does not, and the circumstances."""
    described, runs = record["about"], record["runs"]
    # Other programs make seconds longer, and change CPU seconds little.
    clock = "cpu_seconds" if busy(described) else "seconds"
    fitted: dict[str, dict[str, dict[int, list[float]]]] = {}
    fixed: dict[tuple[str, str], dict[str, list[float]]] = {}
    for run in runs:
        for what, seconds in run[clock].items():
            if what in BY_ROWS:
                of_case = fitted.setdefault(f"{run['case']}: {what}", {}).setdefault(run["library"], {})
                of_case.setdefault(run["rows"], []).append(seconds)
            elif run["rows"] == described["stock_rows"][-1]:  # the same rows for all
                fixed.setdefault((run["case"], what), {}).setdefault(run["library"], []).append(seconds)
    unit = "CPU seconds" if busy(described) else "seconds"
    parts = [runs_of(described["repeats"]), fitted_table(fitted, described["rows"], described, unit=unit)]
    lines = []
    for (case, what), found in fixed.items():
        for library, seconds in found.items():
            ratio = "" if library == OURS else f"**{median(seconds) / median(found[OURS]):.1f}×**"
            lines.append([case, what, library, spread(seconds), ratio])
    if lines:
        parts.append(table(["", "", "", unit, "times gpuload's"], lines, 3, described))
    counts = {
        (run["case"], run["library"], what): count for run in runs for what, count in run.get("counts", {}).items()
    }
    if counts:
        lines = [[case, library, what, f"{count:,}"] for (case, library, what), count in counts.items()]
        parts.append(table(["", "", "", ""], lines, 3))
    return "\n\n".join([*parts, circumstances(described, (run["versions"] for run in runs))])
