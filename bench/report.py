"""Writer of records: JSON with everything, and the same as Markdown tables."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

BY_ROW, BY_ROW_1 = "row by row", "row by row, tokenizers 1.0"  # what gpuload is compared with

_LONGEST = 160  # characters of a cell
_BUSY = 0.5  # load average per core from which on a machine is busy
_UNITS = {"gb_per_s": "GB/s", "rows_per_s": "rows/s", "peak_bytes_per_byte": "peak bytes per byte"}


def save(record: Mapping[str, Any], file: Path, page: Path, text: str) -> None:
    """Write a record and its page."""
    file.write_text(json.dumps(record, indent=1) + "\n")
    page.write_text(text)


def busy(about: Mapping[str, Any]) -> str:
    """Return a mark if other programs were running when a measurement began, and nothing otherwise."""
    load, cores = about["load_average"], about["cores"]
    return f"**busy machine: load average {load} on {cores} cores**" if load > _BUSY * cores else ""


def embedded(text: str, name: str) -> list[str]:
    """Return what a document has between each pair of markers of a name."""
    return re.findall(f"<!-- {name}:begin -->\n(.*?)\n<!-- {name}:end -->", text, re.DOTALL)


def embed(text: str, name: str, rendered: str) -> str:
    """Return a document with the text between its markers replaced; the same document if it has no markers."""
    begin, end = (f"<!-- {name}:{side} -->" for side in ("begin", "end"))
    return re.sub(f"{begin}\n.*?{end}", lambda _: f"{begin}\n{rendered}\n{end}", text, flags=re.DOTALL)


def table(
    head: Sequence[str],
    lines: Iterable[Sequence[str]],
    text_columns: int = 1,
    about: Mapping[str, Any] | None = None,
) -> str:
    """Return a Markdown table.

    Args:
        head: Column titles.
        lines: Cells.
        text_columns: Number of leading columns that are aligned left; all others are aligned right.
        about: Description of the run, for a mark in the first title if the machine was busy.
    """
    if about is not None and (mark := busy(about)):
        head = [f"{mark} {head[0]}".strip(), *head[1:]]
    align = ["---" if column < text_columns else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, align, *lines])


def facts_table(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of rows that have different cells: a column for each cell that some row has.

    Where no two rows share a column, each cell gets a line.
    """
    columns = list(dict.fromkeys(column for cells in facts.values() for column in cells))
    if 8 < len(columns) == sum(len(cells) for cells in facts.values()):
        pairs = [(row, column, value) for row, cells in facts.items() for column, value in cells.items()]
        return table(["", "", ""], [[row, _title(column), cell(value)] for row, column, value in pairs], 3)
    lines = [[cell(row), *(cell(cells.get(column, "")) for column in columns)] for row, cells in facts.items()]
    return table(["", *map(_title, columns)], lines)


def cell(value: Any) -> str:
    """Return a value as the text of a table cell."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")[:_LONGEST]


def circumstances(about: Mapping[str, Any], versions: Iterable[Mapping[str, str]]) -> str:
    """Return one small paragraph: time, commit, machine, parameters and packages.

    Args:
        about: Description of a run.
        versions: Packages of each process.
    """
    found: dict[str, dict[str, None]] = {}
    for packages in versions:
        for package, number in packages.items():
            found.setdefault(package, {})[number] = None
    named = ", ".join(f"{name} {' and '.join(sorted(numbers))}" for name, numbers in found.items())
    commit = f", commit {about['commit']}" if about["commit"] else ""
    command = f"; `{about['command']}`" if "command" in about else ""
    rough = "Smoke run on a few rows, not a measurement. " if about["quick"] else ""
    limit = f", limit {about['limit']:,} tokens" if "limit" in about else ""
    return (
        f"<sub>{rough}{about['date']}{commit}{command}; {about['cpu']}, {about['cores']} cores, "
        f"{about['memory_gib']} GiB, {about['system']}, load average at the start {about['load_average']}; tokenizer "
        f"{about['tokenizer']}{limit}; {about['repeats']} run{'s' * (about['repeats'] > 1)}; {named}.</sub>"
    )


def imports_note(runs: Iterable[Mapping[str, Any]]) -> str:
    """Return a sentence on what was imported while the clocks ran, if anything was."""
    found: set[str] = set()
    for run in runs:
        if "imported" not in run:
            return "Seconds may contain imports: this record does not say what was imported while the clocks ran."
        found |= set(run["imported"])
    return f"Imported while the clocks ran: {', '.join(sorted(found))}." if found else ""


def gpu_page(record: Mapping[str, Any], name: str) -> str:
    """Return the page of a GPU record.

    Args:
        record: The record.
        name: Name of the record's file.
    """
    parts = [f"# {record['gpu']}", f"Made by `python -m bench.gpu_record` from [{name}]({name})."]
    if record["rehearsal"]:
        parts.append("**A rehearsal on the host: counts only. Nothing was measured, and no GPU was used.**")
    parts.append("The [README](README.md) explains the sections.")
    for key, section in record["sections"].items():
        parts += [
            f"## {section.get('title', key)}",
            f"<sub>{section['at']}, commit {section['commit'] or 'unknown'}</sub>",
        ]
        if section["status"] != "done":
            why = str(section.get("why", "")).strip()
            # The last line of a traceback is the error; the JSON has all of it.
            parts.append(f"**{section['status']}**: {cell(why.splitlines()[-1] if why else '')}")
        if section["facts"]:
            parts.append(facts_table(section["facts"]))
    return "\n\n".join(parts) + "\n"


def _title(column: str) -> str:
    return _UNITS.get(column, column.replace("_", " "))
