"""A GPU record → Markdown. A section's facts are a table, whatever they are about: its rows, and a column for each
kind of cell that some row has."""

from typing import Any

_TITLES = {
    "machine": "Machine",
    "loads": "Exactness: loads by both engines",
    "tables": "Tokenizers compiled",
    "tokens": "Exactness: ids against `tokenizers`",
    "batches": "Filter and batches",
    "memory": "Memory after a load",
    "host_copies": "Copies while batches are drawn",
    "dlpack": "Batches in torch",
    "read": "Reading parquet",
    "render": "Rendering",
    "encode": "Text to ids",
    "first_batch": "Parquet to the first batch",
    "others": "The ways that trainers have",
    "sanitizer": "compute-sanitizer",
    "tests": "Tests marked gpu",
}
_LONGEST = 160


def markdown(record: dict[str, Any], name: str) -> str:
    """The whole record."""
    parts = [f"# {record['gpu']}", f"Made by `python -m bench.gpu_record`; all of it is in [{name}]({name})."]
    if record["rehearsal"]:
        parts.append("**A rehearsal on the host: counts, no measurements, nothing of a GPU.**")
    parts.append("What the numbers mean: [README](README.md).")
    for key, section in record["sections"].items():
        parts += _section(_TITLES.get(key, key), section)
    return "\n\n".join(parts) + "\n"


def _section(title: str, section: dict[str, Any]) -> list[str]:
    parts = [f"## {title}", f"<sub>{section['at']}, commit {section['commit'] or 'unknown'}</sub>"]
    if section["status"] != "done":
        why = str(section.get("why", "")).strip()
        # Of a traceback the last line says most; the JSON has it all.
        parts.append(f"**{section['status']}**: {_cell(why.splitlines()[-1] if why else '')}")
    if section["facts"]:
        parts.append(_table(section["facts"]))
    return parts


def _table(facts: dict[str, dict[str, Any]]) -> str:
    """Rows as lines; a line for each cell where rows have no column in common."""
    columns = list(dict.fromkeys(column for cells in facts.values() for column in cells))
    if 8 < len(columns) == sum(len(cells) for cells in facts.values()):
        pairs = [(row, column, value) for row, cells in facts.items() for column, value in cells.items()]
        lines = [["", "", ""], *([row, _heading(column), _cell(value)] for row, column, value in pairs)]
        align = ["---", "---", "---"]
    else:
        lines = [["", *map(_heading, columns)]]
        lines += [[_cell(row), *(_cell(cells.get(column, "")) for column in columns)] for row, cells in facts.items()]
        align = ["---", *["---:"] * len(columns)]
    lines.insert(1, align)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _heading(column: str) -> str:
    return {"gb_per_s": "GB/s", "rows_per_s": "rows/s", "peak_bytes_per_byte": "peak bytes per byte"}.get(
        column, column.replace("_", " ")
    )


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")[:_LONGEST]
