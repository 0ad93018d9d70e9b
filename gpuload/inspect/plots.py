"""Plots of lengths as SVG elements for a page: text in its muted color, series in the colors of its theme."""

from collections.abc import Iterable, Sequence
from math import ceil, floor, log2

import numpy as np

from gpuload.inspect.statistics import LengthGroup

FEW = 8  # how many groups are plotted
DASHES = ("", "4 1.5", "1.2 1.2", "7 2 1.5 2", "10 3", "4 1.5 1.2 1.5", "2.5 1", "12 2 2 2")
"""Dashes of the lines of groups, in widths of the line: they can be told apart without color."""

_BINS = 40


def longest_shown(groups: Sequence[LengthGroup]) -> int:
    """Up to which length histograms go, in tokens."""
    return max(1, int(np.percentile(groups[0].lengths, 99)))


def histogram(groups: Sequence[LengthGroup], number: int) -> str:
    """How many rows of group `number` have which length; up to the 99th percentile of all rows, those of the first
    group, so that plots compare."""
    top, lengths = longest_shown(groups), groups[number].lengths
    counts, edges = np.histogram(lengths[lengths <= top], np.linspace(0, top, min(_BINS, top) + 1))
    left, right, low, high = 38, 312, 100, 8  # of the plot, in a view of 320 by 122
    most = max(1, int(counts.max()))
    bars = [
        f"M{left + (right - left) * start / top:.1f} {low}V{low - (low - high) * count / most:.1f}"
        f"H{left + (right - left) * end / top:.1f}V{low}Z"
        for count, start, end in zip(counts.tolist(), edges, edges[1:], strict=False)
        if count
    ]
    ticks = [_text(left + (right - left) * at / top, 117, at, "middle") for at in _ticks(top)]
    ticks += [_text(left - 6, low - (low - high) * at / most + 4, at, "end") for at in _ticks(most, 3) if at]
    return _svg(320, 122, [f'<path d="{"".join(bars)}" fill="var(--series-{number})"/>', *ticks])


def kept_by_limit(groups: Sequence[LengthGroup]) -> str:
    """Which share of the rows of each group is within a limit, with a line that marks one limit."""
    left, right, low, high = 44, 690, 226, 14  # in a view of 720 by 250
    least = max(1, min(int(group.lengths[0]) for group in groups))
    first, last = floor(log2(least)), max(floor(log2(least)) + 1, ceil(log2(max(int(groups[0].lengths[-1]), 2))))

    def x(length: float) -> float:
        return left + (right - left) * (log2(max(length, least)) - first) / (last - first)

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = low - (low - high) * share
        parts.append(
            f'<path d="M{left} {y:g}H{right}" stroke="var(--line)"/>{_text(left - 6, y + 4, share, "end", True)}'
        )
    step = ceil((last - first + 1) / 11)
    parts += [_text(x(2**power), 245, 2**power, "middle") for power in range(first, last + 1, step)]
    for number, group in reversed(list(enumerate(groups[:FEW]))):
        places = np.unique(np.linspace(0, len(group.lengths) - 1, 300).astype(int)).tolist()
        points = " ".join(
            f"{x(int(group.lengths[at])):.1f},{low - (low - high) * (at + 1) / len(group.lengths):.1f}" for at in places
        )
        width = 1.6 if number else 2.4
        dashes = " ".join(f"{float(part) * width:g}" for part in DASHES[number].split())
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="var(--series-{number})" stroke-width="{width}"'
            + (f' stroke-dasharray="{dashes}"' if dashes else "")
            + "/>"
        )
    scale = f'data-left="{left}" data-right="{right}" data-first="{first}" data-last="{last}"'
    parts.append(f'<path id="at" {scale} data-high="{high}" data-low="{low}" stroke="var(--diff)" stroke-width="1.5"/>')
    return _svg(720, 250, parts)


def _ticks(top: int, most: int = 4) -> list[int]:
    """Round numbers from 0 to `top`."""
    size = 10 ** (len(str(top)) - 1)
    steps = (size * factor / 100 for factor in (10, 20, 25, 50, 100, 200, 500))
    step = next(step for step in steps if step * most >= top)
    return list(range(0, top + 1, max(1, ceil(step))))


def _text(x: float, y: float, value: float, anchor: str, share: bool = False) -> str:
    text = f"{100 * value:.0f}%" if share else f"{value:,}"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _svg(width: int, height: int, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" aria-hidden="true">{"".join(parts)}</svg>'
