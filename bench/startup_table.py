"""The table of a record of `bench.startup`."""

from statistics import median
from typing import Any

from bench import ROOT
from bench.fit import number, runs_of, spread
from bench.report import BY_ROW, BY_ROW_1, table

RECORD = ROOT / "bench" / "results" / "scale" / "startup.json"


_ENCODERS = {"each different word once": "words", "gigatoken": "gigatoken", "row by row": "the tokenizer itself"}
"""In the line `engine` of a report → in the table."""


def tokenizers1_table(record: dict[str, Any]) -> str:
    """Seconds of CPU time with `tokenizers` 1.0 row by row, and without it, for the numbers of rows that have both."""
    lines = []
    for name, sizes in record["datasets"].items():
        for rows, found in sizes.items():
            if BY_ROW_1 in found:
                old, new, first, known = (
                    median(run["cpu_seconds"] for run in found[each])
                    for each in (BY_ROW, BY_ROW_1, "first", "known tokenizer")
                )
                seconds = (f"{number(each)} s" for each in (old, new, first, known))
                lines.append([name, f"{int(rows):,}", *seconds, f"{number(new / first)}×", f"{number(new / known)}×"])
    return table(["prompts", "rows", BY_ROW, "with 1.0", "first load", "known", "1.0 to first", "to known"], lines)


def startup_table(record: dict[str, Any]) -> str:
    """The table of a record."""
    lines = []
    for name, sizes in record["datasets"].items():
        by_row = {int(rows): _seconds(found, "row by row") for rows, found in sizes.items() if "row by row" in found}
        slowest = max(by_row)
        for rows, found in sizes.items():
            first, known, cached = (_seconds(found, each) for each in ("first", "known tokenizer", "cached"))
            # A row takes the same time whatever their number.
            other = by_row.get(int(rows)) or [each * int(rows) / slowest for each in by_row[slowest]]
            shown = spread(other) if int(rows) in by_row else f"about {number(median(other))}"
            ratios = [f"{number(median(other) / median(each))}×" for each in (first, known)]
            if int(rows) in by_row:
                cpu = (median(run["cpu_seconds"] for run in found[each]) for each in (BY_ROW, "first"))
                ratios.append(f"{number(next(cpu) / next(cpu))}×")
            else:
                ratios.append("")
            text = found["first"][0]["text_bytes"] / 1e6
            engine = next((name for said, name in _ENCODERS.items() if said in found["first"][0]["engine"]), "")
            cells = (f"{each} s" for each in (shown, *map(spread, (first, known, cached))))
            lines.append([name, f"{int(rows):,}", f"{number(text)} MB", engine, *cells, *ratios])
    head = ["prompts", "rows", "text", "encoder", "row by row", "first load", "tokenizer known", "ids cached"]
    about, by = record["machine"], record["versions"]
    note = (
        "Seconds until all rows are tokenized and filtered, in a new process that has imported torch, transformers and "
        "pandas and opened the tokenizer; the last column compares seconds of CPU time. Tokenizer known: with what an "
        "earlier load of other data has kept of it. "
        f"{runs_of(record['repeats'])} Tokenizer {record['tokenizer']}, transformers {by['transformers']}, tokenizers "
        f"{by['tokenizers']}; {about['cores']} cores of {about['cpu']}, load average at the start "
        f"{about['load_average']}, {about['date']}, commit {record['commit']}; `{record['command']}`."
    )
    return f"{table([*head, 'ratio, first', 'known', 'first, CPU'], lines)}\n\n<sub>{note}</sub>"


def _seconds(found: dict[str, Any], contender: str) -> list[float]:
    return [run["seconds"] for run in found[contender]]
