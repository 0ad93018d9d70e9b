"""The numbers of a dataset as text."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuload.core.words import counted
from gpuload.inspect.findings import findings, kept
from gpuload.inspect.statistics import PERCENTILES, Lengths, Statistics
from gpuload.inspect.tokens import shown

_NO_TERMINAL = 1000  # columns of a file or a pipe
_SHORT = (0, 50, 95, 99, 100)  # the percentiles that are printed where a line is too short for all


def as_text(found: Statistics, limit: int | None = None) -> str:
    """What `gpuload inspect` prints, in lines of the width of the terminal; with the rows that a `limit` would drop."""
    columns = max(60, shutil.get_terminal_size((_NO_TERMINAL, 24)).columns)
    groups, limits = found.groups, found.limits()
    percentiles = PERCENTILES if columns >= 12 + 8 + 9 * len(PERCENTILES) + 10 else _SHORT
    most = columns - 13 - 9 * max(len(percentiles), len(limits))
    width = min(32, most, max(len(shown(group.name)) for group in groups))
    title = {"prompts": "prompt lengths", "chats": "row lengths", "pairs": "longer sequences"}[found.kind]
    lines = [line for each in findings(found) for line in _wrapped(f"- {each}", columns, 2)]
    lines += ["", *(part for line in str(found.report).split("\n") for part in _wrapped(line, columns, 13))]
    if found.columns:
        lines += ["", "columns"]
        lines += [f"  {shown(name):20} {shown(kind)}"[:columns] for name, kind in found.columns]
    names = [f"  {_name(group.name, width):{width}} {len(group.lengths):>9,} " for group in groups]
    lines += ["", *_heading(f"{title} in tokens", width, _row([f"p{value}" for value in percentiles]))]
    lines += [name + _row(group.percentiles(percentiles)) for name, group in zip(names, groups, strict=True)]
    lines += ["", "histogram", *_histogram(groups[0].lengths, columns)]
    lines += ["", *_heading(f"rows kept with {found.limit_name}", width, _row(limits))]
    for name, group in zip(names, groups, strict=True):
        lines.append(name + _row([f"{100 * group.within(limit):.1f}%" for limit in limits]))
    lines += _roles(found) + _loss(found, width) + _packs(found)
    if found.equal_pairs is not None:
        lines += ["", f"pairs whose chosen equals rejected: {found.equal_pairs:,}"]
    if limit is not None:
        lines += ["", *_dropped(found, limit)]
    return "\n".join(lines)


def _heading(text: str, width: int, numbers: str) -> list[str]:
    """What is above a table whose numbers begin behind a name of `width` characters and a count: a line, or two."""
    if len(text) <= width + 12:
        return [f"{text:{width + 13}}{numbers}"]
    return [text, " " * (width + 13) + numbers]


def _name(text: str, width: int) -> str:
    """A name of at most `width` characters: files of one directory differ at the end."""
    text = shown(text)
    return text if len(text) <= width else f"…{text[1 - width :]}"


def _wrapped(line: str, columns: int, indent: int) -> list[str]:
    """A line in parts that are no wider than the terminal, if its words allow that."""
    if len(line) <= columns:
        return [line]
    return textwrap.wrap(line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _dropped(found: Statistics, limit: int) -> list[str]:
    """What a limit does, and the first rows that it would drop, the longest first."""
    lines = [f"{found.limit_name}={kept(found.groups[0], limit)}"]
    lines += [f"  {tokens:>9,} tokens  {shown(file)} row {row}" for tokens, file, row in found.over]
    more = len(found.groups[0].lengths) - found.groups[0].count(limit) - len(found.over)
    return [*lines, *[f"  and {counted(more, 'more rows')}"] * (more > 0)]


def _roles(found: Statistics) -> list[str]:
    lines = []
    if found.roles:
        total = sum(role.tokens for role in found.roles)
        width = max(16, *(min(32, len(shown(role.role))) for role in found.roles))
        title = "tokens per part" if found.kind == "pairs" else "tokens per role"
        lines = ["", f"{title:{width + 2}} {'tokens':>13} {'share':>8} {'with loss':>13}"]
        for role in found.roles:
            share = f"{100 * role.tokens / total:.1f}%"
            lines.append(f"  {shown(role.role):{width}.{width}} {role.tokens:>13,} {share:>8} {role.loss:>13,}")
    if found.rows_without_roles:
        lines += [""] * (not lines) + [
            f"  {counted(found.rows_without_roles, 'rows')} whose roles are unknown are not counted"
        ]
    return lines


def _loss(found: Statistics, width: int) -> list[str]:
    if found.groups[0].loss is None:
        return []
    lines = ["", "tokens with loss"]
    for group in found.groups:
        assert group.loss is not None
        total = int(group.lengths.sum())
        share = f"{100 * group.loss / total:.1f}%"
        lines.append(f"  {_name(group.name, width):{width}} {group.loss:>13,} of {total:>13,} {share:>8}")
    return lines


def _packs(found: Statistics) -> list[str]:
    if not found.fill:
        return []
    lines = ["", 'packs with packing="bfd"' + _row(["packs", "fill", "longer"], 12)]
    for fill in found.fill:
        values = [f"{fill.packs:,}", f"{100 * fill.share:.2f}%", f"{fill.longer:,}"]
        lines.append(f"  pack_length={fill.size:<10}" + _row(values, 12))
    return lines


def _row(values: Sequence[Any], width: int = 8) -> str:
    return " ".join(f"{value:>{width}}" for value in values)


def _histogram(lengths: Lengths, columns: int) -> list[str]:
    """Rows in about 16 bins up to the 99th percentile, and one for the rest."""
    top = max(1, int(np.percentile(lengths, 99)))
    edges = np.append(np.unique(np.linspace(0, top, 16).astype(int)), max(top + 1, int(lengths[-1]) + 1))
    counts, _ = np.histogram(lengths, edges)
    scale = min(50, columns - 32) / max(1, counts.max())
    return [
        f"  {int(low):>8,} - {int(high) - 1:>8,} {count:>9,} {'#' * int(np.ceil(count * scale))}"
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
