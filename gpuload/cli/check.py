"""`gpuload check`: what would spoil a training run, as text, as JSON and as a page."""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from gpuload._version import __version__
from gpuload.cli.arguments import rows_of, served_of
from gpuload.cli.inspect import check_page, write_page
from gpuload.cli.output import printable
from gpuload.cli.show import uses_color
from gpuload.core.words import counted
from gpuload.inspect.checks.findings import Finding
from gpuload.inspect.checks.lines import kept_by, lines_for
from gpuload.inspect.checks.run import Checked, CheckedTrainer, checked
from gpuload.inspect.page import clipped, template

_COLORS = {"error": 31, "warning": 33, "info": 36, "ok": 32}
_WIDEST, _ROWS = 100, 8
_ROWS_OF_PAGE = 20


def run(given: argparse.Namespace) -> int:
    """Prints what was found, or as JSON a list of findings, and may also write a page. Returns the exit status: 1 if
    there are errors."""
    if not given.files:
        given.parser.error("no files given")
    options = rows_of(given) | served_of(given)
    if given.html:  # errors come before the work
        check_page(Path(given.html))
    for name in ("against", "trainer", "limit", "overlong"):
        options[name] = getattr(given, name)
    found = checked(given.files, given.tokenizer, **options)
    if given.as_json:
        print(json.dumps([each.to_dict() for each in found.findings], indent=2))
    else:
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        print(findings_as_text(found, given.trainer, given.limit, width, uses_color(sys.stdout)))
    if given.html:
        write_page(given.html, page_of_findings(found, given.trainer, given.limit))
        print(printable(f"wrote {given.html}"), file=sys.stderr if given.as_json else sys.stdout)
    return int(any(each.level == "error" for each in found.findings))


def findings_as_text(found: Checked, trainer: CheckedTrainer | None, limit: int | None, width: int, color: bool) -> str:
    """What is printed. Only lines to paste may be longer than `width`."""

    def colored(text: str, level: str) -> str:
        return f"\033[{_COLORS[level]}m{text}\033[0m" if color else text

    files = found.files[0] if len(found.files) == 1 else f"{len(found.files)} files"
    lines = _wrapped(f"{files}: {counted(found.rows, 'rows')} of {found.kind}, {verdict(found)}", width, "")
    for each in found.findings:
        name, *rest = _of_finding(each, width)
        lines += ["", colored(each.level, each.level) + name.removeprefix(each.level), *rest]
    if found.passed:
        lines += ["", colored("not found", "ok"), *_wrapped(", ".join(found.passed), width)]
    paste = lines_for(found, trainer, limit)
    about = f"for {trainer or 'Python'}; {kept_by(found, trainer, limit)}{':' if paste else ''}"
    lines += ["", *_wrapped(about, width, "")]
    return "\n".join([*lines, *(f"  {printable(line)}" for line in paste)])


def _of_finding(finding: Finding, width: int) -> list[str]:
    lines = _wrapped(f"{finding.level}  {finding.check}: {finding.counted}", width, "")
    lines += _wrapped(finding.example, width)
    if len(finding.rows) > 1:
        lines += _wrapped(f"rows {some_rows(finding.rows, _ROWS)}", width)
    return lines + _wrapped(f"→ {finding.remedy}", width)


def _wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    """Lines of at most some characters."""
    return textwrap.wrap(
        printable(text.replace("\n", " ")), width, initial_indent=indent, subsequent_indent=indent or "  "
    )


def page_of_findings(found: Checked, trainer: CheckedTrainer | None, limit: int | None) -> str:
    """The HTML page, which loads nothing."""
    return template("gpuload.inspect.checks", some_rows).render(
        found=found,
        version=__version__,
        title=", ".join(map(clipped, found.files[:3])) + (" …" if len(found.files) > 3 else ""),
        tokenizer=clipped(found.tokenizer.rstrip("/").rpartition("/")[2]),
        verdict=verdict(found),
        trainer=trainer or "Python",
        kept=kept_by(found, trainer, limit),
        lines="\n".join(lines_for(found, trainer, limit)),
    )


def verdict(found: Checked) -> str:
    """How many errors and warnings there are, in words."""
    counts = {level: sum(each.level == level for each in found.findings) for level in ("error", "warning")}
    words = [f"{count} {level}{'s' * (count > 1)}" for level, count in counts.items() if count]
    return " and ".join(words) or "nothing to worry about"


def some_rows(rows: Sequence[int], most: int = _ROWS_OF_PAGE) -> str:
    """The numbers of the first rows of a finding."""
    return ", ".join(map(str, rows[:most])) + (", …" if len(rows) > most else "")
