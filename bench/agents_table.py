"""The table of a record of `bench.agents`."""

from typing import Any

from bench import ROOT
from bench.fit import number, runs_of, spread
from bench.report import table

RECORD = ROOT / "bench" / "results" / "scale" / "agents.json"


def agents_table(record: dict[str, Any]) -> str:
    """The table of a record."""
    lines = []
    for name, found in record["datasets"].items():
        run = found["gpuload"][0]
        by_row = [each["seconds"][0] * run["read"] / each["rows"] for each in found["row by row"]]
        first, second = ([each["seconds"][k] for each in found["gpuload"]] for k in (0, 1))
        share = f"{run['compiled'] / run['read']:.1%}"
        middle = [sorted(each)[len(each) // 2] for each in (by_row, first, second)]
        ratios = [f"{number(middle[0] / each)}×" for each in middle[1:]]
        lines.append([name, share, *(f"{spread(each)} s" for each in (by_row, first, second)), *ratios])
    head = ["dataset", "rows compiled", "row by row", "gpuload, first load", "second load", "ratio, first", "second"]
    about, few = record["machine"], record["rows_by_row"]
    by = record["versions"]
    note = (
        "Seconds from JSONL to ids and masks, for 5,000 conversations if the name says no other number; row by row is "
        f"measured on {few:,} rows, and has no part that is the same for any number of rows. "
        f"{runs_of(record['repeats'])} TRL's template of Qwen2.5, "
        f"transformers {by['transformers']}, tokenizers {by['tokenizers']}; {about['cores']} cores of "
        f"{about['cpu']}, load average at the start {about['load_average']}, {about['date']}, commit "
        f"{record['commit']}; `python -m bench.agents`."
    )
    return f"{table(head, lines)}\n\n<sub>{note}</sub>"
