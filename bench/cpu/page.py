"""Record of a run on the CPU → Markdown page. Every number is the median of its runs, with minimum and maximum."""

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from bench.cpu import chats, cores, load, packing
from bench.fit import runs_of, spread
from bench.report import circumstances, table
from bench.verl import epochs

Run = dict[str, Any]
Runs = list[Run]
About = dict[str, Any]

_MEMORY_NOTES = """\
Peak resident memory of `gpuload.load` in addition to what the process held before (imports and tokenizer), from the
kernel's high-water mark. "One row" is a load of one row of the same files: compiled tokenizer tables, thread stacks,
buffers. The goal is a peak of at most 3 times text + tokens. The columns that are passed through come on top."""


def page(record: dict[str, Any], name: str, summary: str = "") -> str:
    """Return the page of a record, which is one run on one machine.

    Args:
        record: `about`, the description of the run, and section → its runs.
        name: Name of the record's file.
        summary: Text before the sections.
    """
    about = record["about"]
    packages = [run["versions"] for key, runs in record.items() if key != "about" for run in runs]
    parts = [
        "# Benchmarks",
        f"Made by `python -m bench` from [{name}]({name}): one session on one machine. {runs_of(about['repeats'])}",
        circumstances(about, packages),
    ]
    parts += [summary] if summary else []
    tables: dict[str, tuple[str, str, Callable[[Runs, About], str]]] = {
        "load": ("Starts and epochs", load.NOTES, load.load_tables),
        "memory": ("Memory", _MEMORY_NOTES, memory_table),
        "cores": ("Cores", cores.NOTES, cores.cores_table),
        "packing": ("Packing", packing.NOTES, packing.packing_tables),
        "chats": ("Data for SFT", chats.NOTES, chats.chats_table),
        "pairs": ("Preference data", chats.PAIR_NOTES, chats.chats_table),
        "epochs": ("Epochs inside verl 0.9.1", epochs.NOTES, epochs.epochs_table),
    }
    for key, (title, notes, render) in tables.items():
        if key in record:
            parts += [f"## {title}", notes, render(record[key], about)]
    return "\n\n".join(parts) + "\n"


def memory_table(measured: Runs, about: About) -> str:
    """Return peak memory, text and tokens in MB."""
    lines = []
    for data in dict.fromkeys(run["data"] for run in measured):
        runs = [run for run in measured if run["data"] == data]
        whole, one = [run for run in runs if run["rows"] > 1], [run for run in runs if run["rows"] == 1]
        text, tokens, columns = (whole[0][key] / 1e6 for key in ("text_bytes", "token_bytes", "column_bytes"))
        peaks, fixed = _grown(whole), _grown(one)
        rest = max(median(peaks) - median(fixed), 0)
        ratios = [f"{value / (text + tokens):.2f}" for value in (median(peaks), rest)]
        lines.append(
            [data, *(f"{value:,.1f}" for value in (text, tokens, columns)), spread(peaks), spread(fixed), *ratios]
        )
    head = ["MB", "text", "tokens", "columns", "peak", "one row", "peak / (text + tokens)", "the same without one row"]
    return table(head, lines, 1, about)


def _grown(runs: Iterable[Run]) -> list[float]:
    """MB of resident memory that a load added, of each run."""
    return [(run["peak_rss"] - run["baseline_rss"]) / 1e6 for run in runs]
