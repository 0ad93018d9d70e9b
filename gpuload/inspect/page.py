"""The page of `gpuload inspect --html`: one file that loads nothing, made of `page.html`.

Everything from the data is escaped by the template engine, and characters that cannot be seen are shown by marks, so
that no text of a row is markup, script or direction of writing.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from gpuload._version import __version__
from gpuload.core.words import counted
from gpuload.dataset.report import Report
from gpuload.inspect import plots
from gpuload.inspect.findings import findings
from gpuload.inspect.statistics import PERCENTILES, Lengths, Statistics
from gpuload.inspect.tokens import SampleRow, Token, TokenSequence, shown, visible

_MOST_TEXT = 240  # characters of a name, a type or a reason
_MOST_ROW = 4000  # of a row as its file has it
_MOST_BYTES = 256  # of a token
_MOST_LINES = 200  # of a table
_MOST_POINTS = 500  # of the limits that the slider has
_LEAST_SHARED = 8  # tokens
_ROLES = {"template": 0, "system": 1, "user": 2, "prompt": 2, "text": 2, "assistant": 3, "completion": 3, "tool": 4}
_OTHER_ROLE = 5


@dataclass(frozen=True)
class Number:
    """A number that a table is sorted by, and how it is shown."""

    value: float
    text: str


Line = list[str | Number]


@dataclass(frozen=True)
class PageTable:
    """A sortable table."""

    title: str  # what it shows
    columns: Sequence[str]  # its headers
    lines: Sequence[Line]  # its cells: texts, or numbers with the text that shows them
    note: str = ""  # a sentence below it


def page_of(found: Statistics, tokenizer: str) -> str:
    """The page that shows statistics with rows; `tokenizer` is its name."""
    groups, everything = found.groups[: plots.FEW], found.groups[0]
    dropped = _dropped(found.report)
    report = found.report
    return template(__package__, collapsed, boxes, role_class).render(
        title=_some(report.files),
        version=__version__,
        facts=_facts(found, tokenizer),
        report="\n".join(map(clipped, str(report).split("\n")[:_MOST_LINES])),
        findings=[clipped(each) for each in findings(found)],
        dropped=dropped,
        tables=_tables(found),
        points=_points(everything.lengths, found.limits()),
        limit=found.limit_near(99),
        histograms=[(clipped(group.name), Markup(plots.histogram(groups, at))) for at, group in enumerate(groups)],
        longest_shown=plots.longest_shown(groups),
        kept=Markup(plots.kept_by_limit(groups)),
        legend=[(clipped(group.name), at, plots.DASHES[at]) for at, group in enumerate(groups)],
        limit_name=found.limit_name,
        unplotted=len(found.groups) - len(groups),
        samples=found.samples,
        roles=_roles_of(found.samples),
        with_loss=found.kind != "prompts",
        with_pairs=found.kind == "pairs",
    )


@functools.cache
def template(package: str, *functions: Callable[..., Any]) -> jinja2.Template:
    """The `page.html` of a package, which may call these functions."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"clipped": clipped, "as_lines": as_lines, "number": "{:,}".format}
    environment.globals |= {function.__name__: function for function in functions}
    return environment.from_string(resources.files(package).joinpath("page.html").read_text(encoding="utf-8"))


# -- rows ------------------------------------------------------------------------------------------------------------


def boxes(sequence: TokenSequence, differs_at: int | None) -> Markup:
    """One box per token, and how many are not shown between them. Number `differs_at` is marked as the first
    difference."""
    made = []
    for (start, tokens), gap in zip(sequence.parts, sequence.gaps, strict=False):
        made += [_gap(gap)] * bool(gap) + [_box(token, at == differs_at) for at, token in enumerate(tokens, start)]
    made += [_gap(sequence.gaps[-1])] * bool(sequence.gaps[-1])
    # Lines break between tokens, and within one only if it is longer than a line.
    return Markup("<wbr>").join(made)


def collapsed(row: SampleRow) -> tuple[TokenSequence | None, Sequence[TokenSequence]]:
    """What both sequences of a pair begin with, if that is much, and the rest of each; or nothing, and all of them."""
    at = row.difference
    if at is None or at < _LEAST_SHARED:
        return None, row.sequences
    return row.sequences[0].between(0, at), [each.between(at, each.length) for each in row.sequences]


def _gap(count: int) -> Markup:
    return Markup('<span class="omitted">… {} tokens are not shown …</span>').format(f"{count:,}")


def _box(token: Token, differs: bool) -> Markup:
    parts = visible(token.piece[:_MOST_BYTES])
    text = "".join(part for part, _ in parts)
    classes = ["t", role_class(token.role), *["l"] * bool(token.loss), *["s"] * token.special, *["d"] * differs]
    words = [f"id {token.id}", text, token.role or "role unknown"]
    if token.loss is not None:
        words.append("loss" if token.loss else "no loss")
    words += ["special token"] * token.special + ["first difference"] * differs
    inner = Markup("").join(Markup("<i>{}</i>").format(part) if mark else Markup.escape(part) for part, mark in parts)
    box = Markup('<span class="{}" title="{}">{}</span>').format(" ".join(classes), " · ".join(words), inner)
    return box + Markup("<br>") * token.piece.endswith(b"\n")


def role_class(role: str | None) -> str:
    """The class of a role's color."""
    return "u" if role is None else f"r{_ROLES.get(role, _OTHER_ROLE)}"


def _roles_of(rows: Sequence[SampleRow]) -> list[str]:
    """The roles of all tokens that are shown."""
    roles = {token.role for row in rows for sequence in row.sequences for token in sequence.tokens}
    return sorted((role for role in roles if role), key=lambda role: (_ROLES.get(role, _OTHER_ROLE), role))


# -- tables ----------------------------------------------------------------------------------------------------------


def _facts(found: Statistics, tokenizer: str) -> list[tuple[str, str]]:
    """The few numbers at the head of the page."""
    report, everything = found.report, found.groups[0]
    total = int(everything.lengths.sum())
    facts = [("rows", f"{report.rows_kept:,}"), ("dropped", f"{report.rows_read - report.rows_kept:,}")]
    facts += [("tokens", f"{total:,}"), ("longest row", f"{int(everything.lengths[-1]):,}")]
    if everything.loss is not None:
        facts.append(("tokens with loss", f"{100 * everything.loss / total:.1f}%"))
    if found.equal_pairs is not None:
        facts.append(("chosen equals rejected", f"{found.equal_pairs:,}"))
    return [*facts, ("tokenizer", clipped(tokenizer.rstrip("/").rpartition("/")[2]))]


def _tables(found: Statistics) -> list[PageTable]:
    named = "data source" if found.by == "data_source" else "file"
    limits = found.limits()
    lengths: list[Line] = []
    kept: list[Line] = []
    for group in found.groups:
        start: Line = [clipped(group.name), _count(len(group.lengths))]
        with_loss = [] if group.loss is None else [_share(group.loss / int(group.lengths.sum()))]
        lengths.append([*start, _count(int(group.lengths.sum())), *with_loss, *map(_count, group.percentiles())])
        kept.append([*start, *(_share(group.within(limit)) for limit in limits)])
    loss_column = [] if found.groups[0].loss is None else ["with loss"]
    percentiles = [f"p{value}" for value in PERCENTILES]
    tables = [
        PageTable("Lengths in tokens", [named, "rows", "tokens", *loss_column, *percentiles], lengths),
        PageTable(f"Rows kept by {found.limit_name}", [named, "rows", *(f"{limit:,}" for limit in limits)], kept),
    ]
    tables += _role_tables(found)
    columns: list[Line] = [[clipped(name), clipped(kind)] for name, kind in found.columns[:_MOST_LINES]]
    return [*tables, *[PageTable("Columns", ["column", "type"], columns)] * bool(columns)]


def _points(lengths: Lengths, limits: Sequence[int]) -> list[tuple[int, int, int]]:
    """Limits for the slider, each with the rows and tokens within it: exact for each of them."""
    different = np.unique(lengths)
    some = different[np.unique(np.linspace(0, len(different) - 1, _MOST_POINTS).astype(int))]
    values = np.unique(np.concatenate([some, np.array(limits, np.int64)]))
    rows = np.searchsorted(lengths, values, side="right")
    tokens = np.append(0, np.cumsum(lengths))[rows]
    return list(zip(values.tolist(), rows.tolist(), tokens.tolist(), strict=True))


def _role_tables(found: Statistics) -> list[PageTable]:
    tables = []
    title = "Tokens per part of a pair" if found.kind == "pairs" else "Tokens per role"
    total = sum(role.tokens for role in found.roles)
    unknown, note = found.rows_without_roles, ""
    if unknown:
        note = f"{counted(unknown, 'rows are')} not counted: transformers renders them, so their roles are unknown."
    if found.roles or note:
        lines: list[Line] = []
        for role in found.roles[:_MOST_LINES]:
            of_all, with_loss = _share(role.tokens / total), _share(role.loss / role.tokens)
            lines.append([clipped(role.role), _count(role.tokens), of_all, _count(role.loss), with_loss])
        tables.append(PageTable(title, ["role", "tokens", "share", "with loss", "share of role"], lines, note))
    if found.fill:
        packs: list[Line] = [
            [_count(fill.size), _count(fill.packs), _share(fill.share, 2), _count(fill.longer)] for fill in found.fill
        ]
        note = 'packing="bfd" over all rows. Longer rows are truncated to one pack.'
        tables.append(PageTable("Packs", ["pack_length", "packs", "fill", "longer rows"], packs, note))
    return tables


def _dropped(report: Report) -> list[PageTable]:
    if not report.rejected:
        return []
    lines: list[Line] = [
        [clipped(reason), _count(count), clipped(", ".join(report.examples.get(reason, [])))]
        for reason, count in Counter(report.rejected).most_common(_MOST_LINES)
    ]
    return [PageTable("Dropped rows", ["reason", "rows", "first rows"], lines)]


def _count(value: int) -> Number:
    return Number(value, f"{value:,}")


def _share(value: float, digits: int = 1) -> Number:
    return Number(value, f"{100 * value:.{digits}f}%")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return clipped(names[0]) + more


def clipped(text: str) -> str:
    """A text of a bounded length, in which everything can be seen but spaces are spaces."""
    return shown(text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 1]}…")


def as_lines(text: str) -> str:
    """The lines of a text of a bounded length, in which everything can be seen but spaces are spaces."""
    text = text if len(text) <= _MOST_ROW else f"{text[: _MOST_ROW - 1]}…"
    return "\n".join(map(shown, text.split("\n")))
