"""Tables of records in README.md and in docs/, each between two markers of its name."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import ROOT, report
from bench.agents_table import RECORD as OF_AGENTS
from bench.agents_table import agents_table
from bench.cpu import headline
from bench.cpu.chats import chats_table
from bench.cpu.packing import packing_tables
from bench.startup_table import RECORD as OF_STARTUP
from bench.startup_table import startup_table
from bench.trainers.ray_table import ray_tables
from bench.trainers.table import RESULTS as OF_TRAINERS
from bench.trainers.table import trainer_table

_SFT = ROOT / "bench" / "results" / "sft" / "sft.json"


@dataclass(frozen=True)
class Embedded:
    """A table in a document.

    Attributes:
        page: The document, from the root of the repository.
        name: Name of its markers: `<!-- NAME:begin -->` and `<!-- NAME:end -->`.
        record: File of the record.
        render: Makes the table of the record.
    """

    page: str
    name: str
    record: Path
    render: Callable[[dict[str, Any]], str]

    def rendered(self) -> str:
        """Return the table of the record as it is now."""
        return self.render(json.loads(self.record.read_text()))


def _section(name: str, render: Callable[[Any, Any], str]) -> Callable[[dict[str, Any]], str]:
    def rendered(record: dict[str, Any]) -> str:
        versions = (run["versions"] for run in record[name])
        about = report.circumstances(record["about"], versions)
        return f"{render(record[name], record['about'])}\n\n{about}"

    return rendered


TABLES = (
    Embedded("README.md", "outcome", headline.RECORD, headline.outcome),
    Embedded("docs/index.md", "outcome", headline.RECORD, headline.outcome),
    Embedded("README.md", "headline", headline.RECORD, headline.headline_table),
    Embedded("docs/sft.md", "chats", _SFT, _section("chats", chats_table)),
    Embedded("docs/sft.md", "packing", _SFT, _section("packing", packing_tables)),
    Embedded("docs/agents.md", "agents", OF_AGENTS, agents_table),
    Embedded("docs/caching.md", "startup", OF_STARTUP, startup_table),
    Embedded("docs/scale.md", "ray", OF_TRAINERS / "ray.json", ray_tables),
    Embedded("docs/preference.md", "pairs", _SFT, _section("pairs", chats_table)),
    *(
        Embedded(f"docs/trainers/{name.replace('_', '-')}.md", name, OF_TRAINERS / f"{name}.json", trainer_table)
        for name in ("automodel", "llamafactory", "nemo_rl", "slime", "trl")
    ),
)


def write(record: Path) -> list[str]:
    """Write all tables of a record into the documents that have markers for them, and return the documents."""
    written = []
    for table in (table for table in TABLES if table.record == record.resolve()):
        page = ROOT / table.page
        if f"<!-- {table.name}:begin -->" in (text := page.read_text()):
            page.write_text(report.embed(text, table.name, table.rendered()))
            written.append(table.page)
    return written
