"""The table of a record of `bench.agents`."""

from statistics import median
from typing import Any

from bench import ROOT
from bench.fit import number, runs_of, spread
from bench.report import BY_ROW, BY_ROW_1, table

RECORD = ROOT / "bench" / "results" / "scale" / "agents.json"
_WITHOUT_MASKS = "tokenizers 1.0.0rc3 has no offsets, so that its times are without masks. "


def agents_table(record: dict[str, Any]) -> str:
    """The table of a record, with two more columns if `tokenizers` 1.0 was measured."""
    lines, with_1 = [], all(BY_ROW_1 in found for found in record["datasets"].values())
    for name, found in record["datasets"].items():
        run = found["gpuload"][0]
        old, new = (
            [each["seconds"][0] * run["read"] / each["rows"] for each in found.get(by, ())] for by in (BY_ROW, BY_ROW_1)
        )
        first, second = ([each["seconds"][k] for each in found["gpuload"]] for k in (0, 1))
        ratios = [f"{number(median(old) / median(each))}×" for each in (first, second)]
        more = [f"{spread(new)} s", f"{number(median(new) / median(second))}×"] if with_1 else []
        share = f"{run['compiled'] / run['read']:.1%}"
        lines.append([name, share, *(f"{spread(each)} s" for each in (old, first, second)), *ratios, *more])
    head = ["dataset", "rows compiled", BY_ROW, "gpuload, first load", "second load", "ratio, first", "second"]
    head += [BY_ROW_1, "ratio, second load"] if with_1 else []
    about, few = record["machine"], record["rows_by_row"]
    by = record["versions"]
    note = (
        "Seconds from JSONL to ids and masks, for 5,000 conversations if the name says no other number; row by row is "
        f"measured on {few:,} rows, and has no part that is the same for any number of rows. "
        f"{runs_of(record['repeats'])} {_WITHOUT_MASKS if with_1 else ''}TRL's template of Qwen2.5, "
        f"transformers {by['transformers']}, tokenizers {by['tokenizers']}; {about['cores']} cores of "
        f"{about['cpu']}, load average at the start {about['load_average']}, {about['date']}, commit "
        f"{record['commit']}; `python -m bench.agents`."
    )
    return f"{table(head, lines)}\n\n<sub>{note}</sub>"
