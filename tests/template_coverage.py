"""Which share of random conversations the automaton of a template renders, for folders of templates.

    PYTHONPATH=.:tests python tests/template_coverage.py FOLDER...      # each with files *.jinja

For each template, conversations of random shapes are rendered, plain ones and ones with tool calls, and every text is
compared with transformers. What was counted is in FOLDER.json; `--table` prints these files as the table in
`docs/templates.md`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from test_template_automaton import conversation, tool

from gpuload.demo_data import demo_files
from gpuload.reference.template_call import TemplateCall, rejection
from gpuload.template.automaton.rows import RowRenderer
from gpuload.template.program import ByReference, Rejected, RenderedRow
from gpuload.template.symbol import NotCompilableError

ROWS, MOST_ROWS = 60, 300
"""So many rows that the template accepts are rendered, or so many in all."""

ENOUGH = 0.95

KINDS = {
    "plain": "texts only",
    "calls": "with tool calls and their results",
    "tools": "with tool calls, and a list of tools for each conversation",
    "parts": "with each content as a list of parts",
}


def row(draw: random.Random, kind: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """A random conversation, and its tools."""
    messages = conversation(draw, kind in ("calls", "tools"), draw.choice((4, 12, 40)))
    if kind == "parts":
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
    return messages, [tool(draw) for _ in range(draw.randint(1, 3))] if kind == "tools" else None


def counted(call: TemplateCall, kind: str, draw: random.Random) -> dict[str, Any]:
    """Renders rows; returns how many transformers accepts, how many were compiled, how many texts differ, and why
    transformers rendered the rest."""
    reasons: Counter[str] = Counter()
    accepted = compiled = wrong = 0
    try:
        renderer = RowRenderer(call, own_tools=kind == "tools")
    except NotCompilableError as error:
        renderer, reason = None, str(error)
    for _ in range(MOST_ROWS):
        if accepted == ROWS:
            break
        messages, tools = row(draw, kind)
        try:
            truth, why = replace(call, tools=tools).render(messages), None
        except Exception as error:
            truth, why = "", rejection(error)
        made = ByReference(reason) if renderer is None else renderer.render(messages, tools)
        accepted += why is None
        if isinstance(made, RenderedRow):
            compiled += why is None
            wrong += (made.text, None) != (truth, why)
        elif isinstance(made, Rejected):
            wrong += made.message != why
        elif why is None:
            reasons[made.reason] += 1
    return {"accepted": accepted, "compiled": compiled, "wrong": wrong, "reasons": reasons}


def measure(folder: Path, only: str) -> None:
    """Counts for each template of a folder, and writes them into a file next to it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_files()[1], bos_token="<s>", eos_token="</s>")
    out = folder.with_suffix(".json")
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for file in sorted(folder.glob(f"{only}.jinja")):
        found[file.stem] = {}
        for kind in KINDS:
            counts = counted(TemplateCall(tokenizer, file.read_text()), kind, random.Random(file.stem))
            found[file.stem][kind] = counts
            print(file.stem, kind, *counts.values(), file=sys.stderr, flush=True)
        out.write_text(json.dumps(found, indent=1))


def table(folders: list[Path]) -> str:
    """The counts of folders as a table: of how many templates at least 95 % of the accepted rows are compiled, of those
    that accept any, and the reasons for other rows."""
    lines = ["| templates of | files | " + " | ".join(KINDS) + " | rows | compiled | reasons for the rest |"]
    lines.append("|---|" + "---|" * (len(KINDS) + 4))
    for folder in folders:
        found = json.loads(folder.with_suffix(".json").read_text())
        every = [counts for each in found.values() for counts in each.values()]
        assert not any(counts["wrong"] for counts in every)
        cells = []
        for kind in KINDS:
            accepting = [each[kind] for each in found.values() if each[kind]["accepted"]]
            enough = sum(each["compiled"] >= ENOUGH * each["accepted"] for each in accepting)
            cells.append(f"{enough} of {len(accepting)}")
        reasons: dict[str, set[str]] = {}
        for name, each in found.items():
            for reason in {reason for counts in each.values() for reason in counts["reasons"]}:
                reasons.setdefault(reason, set()).add(name)
        why = "; ".join(f"{reason} ({', '.join(sorted(names))})" for reason, names in sorted(reasons.items()))
        rows, compiled = (sum(counts[which] for counts in every) for which in ("accepted", "compiled"))
        lines.append(f"| {folder.name} | {len(found)} | {' | '.join(cells)} | {rows:,} | {compiled:,} | {why} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="*", help="names of templates, with wildcards")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print(table(given.folders))
    else:
        for each in given.folders:
            measure(each, given.only)
