"""The page of `gpuload check --html`: one file that loads nothing, made of `page.html`."""

from collections.abc import Sequence

from gpuload._version import __version__
from gpuload.inspect.checks.lines import kept_by, lines_for
from gpuload.inspect.checks.run import Checked, CheckedTrainer
from gpuload.inspect.page import clipped, template

_ROWS = 20  # numbers of rows that are shown of a finding


def page_of_findings(found: Checked, trainer: CheckedTrainer | None, limit: int | None) -> str:
    """The page, with the lines of `lines_for`."""
    return template(__package__, some_rows).render(
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


def some_rows(rows: Sequence[int], most: int = _ROWS) -> str:
    """The numbers of the first rows of a finding."""
    return ", ".join(map(str, rows[:most])) + (", …" if len(rows) > most else "")
